"""Proposition 2.1 on small models against the definition, counts of roles against brute force, and the rules."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch

from experiments.geometry_corpus import combination, counts, study
from experiments.geometry_corpus.recipe import EXPERIMENT, judge
from experiments.runner.files import write
from experiments.runner.statistics import ratios
from experiments.runner.text import word_pieces
from tests.experiments.miniature import run_miniature
from tests.models import tiny

IDS = torch.randint(50, (1, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", ["Llama", "Bert", "GPT2"])
def test_what_is_recorded_is_what_the_model_computes(family: str) -> None:
    model = tiny(family, torch.float32)
    before = model.config._attn_implementation
    outputs: list[torch.Tensor] = []
    found = combination.record(model, IDS)
    assert model.config._attn_implementation == before
    model.set_attn_implementation("eager")
    name = found[0][0].name
    behind = {"Bert": f"{name.rpartition('.')[0]}.output.dense", "GPT2": f"{name}.c_proj", "Llama": f"{name}.o_proj"}
    module = model.get_submodule(behind[family])
    hook = module.register_forward_hook(lambda _, __, output: outputs.append(output))
    with torch.no_grad():
        weights = model(input_ids=IDS, output_attentions=True).attentions
    hook.remove()
    assert len(found) == len(weights)
    for (_, seen), expected in zip(found, weights, strict=True):
        torch.testing.assert_close(seen.weights.float(), expected[0])
        joint = torch.einsum("hqk,hkd->qhd", seen.weights, seen.value)
        torch.testing.assert_close(joint.float(), seen.heads.float(), atol=1e-5, rtol=1e-4)
    bias = 0 if module.bias is None else module.bias.detach()
    torch.testing.assert_close(found[0][1].output.float() + bias, outputs[0][0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["Llama", "Bert"])
def test_the_order_is_that_of_the_models_own_scores(family: str) -> None:
    torch.manual_seed(0)
    model = tiny(family, torch.float32)
    for name, parameter in model.named_parameters():  # biases and gains that are there to be seen
        if name.endswith("bias") or "norm" in name.lower():
            torch.nn.init.normal_(parameter, mean=float("norm" in name.lower()), std=0.5)
    for layer, seen in combination.record(model, IDS):
        row = combination.measure(layer, seen)
        assert row["negative weights"] == 0
        assert row["largest error of a sum"] < 1e-5
        assert row["largest error of a head"] < 1e-4
        assert row["order, the model's own scores"] > 0.999
        assert row["order, form of a head"] < row["order, the model's own scores"]
        assert row["distance to the hull of values"] > 0.01


def test_without_biases_the_form_is_the_score() -> None:
    model = tiny("Bert", torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith(("query.bias", "key.bias")):
            torch.nn.init.zeros_(parameter)
    for layer, seen in combination.record(model, IDS):
        row = combination.measure(layer, seen)
        assert row["order, form of a head"] > 0.999
        assert row["order, form of a head without the norm"] == row["order, form of a head"]


def test_distance_to_a_hull() -> None:
    square = torch.tensor([[1.0, 1.0], [1.0, -1.0], [3.0, -1.0], [3.0, 1.0]], dtype=torch.float64)
    assert combination.distance(torch.tensor([2.0, 0.5], dtype=torch.float64), square) == pytest.approx(0, abs=1e-9)
    assert combination.distance(torch.tensor([0.5, 0.0], dtype=torch.float64), square) == pytest.approx(1)
    assert combination.distance(torch.tensor([4.0, 2.0], dtype=torch.float64), square) == pytest.approx(0.1**0.5)
    generator = torch.Generator().manual_seed(1)
    corners, point = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((6, 9), (9,)))

    def far(weights: np.ndarray) -> float:
        return float(np.linalg.norm(weights @ corners.numpy() - point.numpy()))

    best = scipy.optimize.minimize(
        lambda w: far(w) ** 2, np.full(6, 1 / 6), method="SLSQP", bounds=[(0, 1)] * 6, options={"ftol": 1e-12},
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
    )  # fmt: skip
    assert combination.distance(point, corners) * float(point.norm()) == pytest.approx(far(best.x), abs=1e-5)


def by_hand(row: list[int], objective: str, predicted: list[bool], shown: list[bool]) -> tuple[list[int], list[int]]:
    context, target = [0] * len(row), [0] * len(row)
    for i in range(len(row)):
        for j in range(i if objective == "causal" else len(row)):
            if i != j and predicted[i] and shown[j]:
                context[j] += 1
                target[i] += 1
    return context, target


def test_roles_of_the_next_token_are_counted() -> None:
    rows = torch.tensor([[4, 7, 4, 9, 1], [3, 3, 2, -1, -1]])
    found = counts.roles(rows, "causal", 10)
    assert found.context.tolist() == [[4, 3, 2, 1, 0], [2, 1, 0, 0, 0]]
    assert found.predicted.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 0, 0]]
    assert found.key.tolist() == found.context.tolist()
    assert found.query.tolist() == [[1, 2, 3, 4, 0], [1, 2, 0, 0, 0]]
    assert by_hand([4, 7, 4, 9, 1], "causal", [True] * 5, [True] * 5) == ([4, 3, 2, 1, 0], [0, 1, 2, 3, 4])
    tokens = torch.tensor([4, 3])
    ahead, behind = counts.expected(rows, tokens)
    assert ahead.tolist() == counts.by_token(rows, found.context, tokens).sum(0).tolist() == [6, 3]
    assert behind.tolist() == counts.by_token(rows, found.predicted, tokens).sum(0).tolist() == [2, 1]


def test_roles_of_masked_tokens_are_counted() -> None:
    rows = torch.randint(6, (40, 12), generator=torch.Generator().manual_seed(3))
    rows[5, 7:] = counts.PADDING
    found = counts.roles(rows, "masked", 6)
    assert int(found.context.sum()) == int(found.predicted.sum()) > 0
    generator = torch.Generator().manual_seed(0)
    drawn, kind = (torch.rand(rows.shape, generator=generator) for _ in range(2))
    other = torch.randint(6, rows.shape, generator=generator)
    for r, row in enumerate(rows.tolist()):
        predicted = [token >= 0 and float(drawn[r, i]) < 0.15 for i, token in enumerate(row)]
        left = [0.8 <= value < 0.9 for value in kind[r].tolist()]  # as they are; beyond 0.9 by any token
        kept = [left[i] or (float(kind[r, i]) >= 0.9 and int(other[r, i]) == token) for i, token in enumerate(row)]
        shown = [token >= 0 and (not predicted[i] or kept[i]) for i, token in enumerate(row)]
        assert by_hand(row, "masked", predicted, shown) == (found.context[r].tolist(), found.predicted[r].tolist())
        asks, real = sum(predicted), sum(token >= 0 for token in row)
        assert found.key[r].tolist() == [asks * sees for sees in shown]
        assert found.query[r].tolist() == [real * (p and s) for p, s in zip(predicted, shown, strict=True)]


def test_rows_are_cut() -> None:
    documents = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    assert counts.cut_rows(documents, "packed", 4, 9, 0).tolist() == [[1, 2, 3, 0], [4, 0, 5, 6], [7, 8, 9, 0]]
    assert counts.cut_rows(documents, "beginnings", 4, 9, 0).tolist() == [[1, 2, 3, -1], [5, 6, 7, 8]]
    shuffled = counts.cut_rows(documents, "shuffled", 4, 2, 0)
    assert [sorted(row) for row in shuffled.tolist()] == [[0, 1, 2, 3], [0, 4, 5, 6]]


def test_ratios_are_those_of_a_plain_bootstrap() -> None:
    generator = np.random.default_rng(5)
    part, whole = generator.integers(1, 9, (30, 2)).astype(float), generator.integers(1, 9, (30, 2)).astype(float)
    found = ratios(part, whole, 2000)
    assert found[:, 0] == pytest.approx(part.sum(0) / whole.sum(0))
    expected = scipy.stats.bootstrap(
        (part[:, 0], whole[:, 0]), lambda a, b, axis: a.sum(axis) / b.sum(axis), paired=True, vectorized=True,
        method="percentile", n_resamples=4000, rng=1,
    ).confidence_interval  # fmt: skip
    assert found[0, 1:] == pytest.approx([expected.low, expected.high], rel=0.03)
    assert ratios(part, 0 * whole, 10)[0, 0] == np.inf


def test_a_study_of_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = word_pieces(["alpha beta gamma delta"], 270)

    def loaded(*_: object, **__: object) -> Any:
        model = tiny("Llama", torch.float32)
        model.resize_token_embeddings(len(pieces))
        return SimpleNamespace(model=model, tokenizer=pieces)

    text = ["alpha beta gamma delta " * 20, "delta gamma " * 30] * 20
    monkeypatch.setattr(study, "load_model", loaded)
    monkeypatch.setattr(study.texts, "learned_from_training", lambda _: pieces)
    monkeypatch.setattr(study, "passages", lambda count: text[:count])
    monkeypatch.setattr(study, "documents", lambda _: text)
    said = run_miniature(EXPERIMENT, tmp_path, EXPERIMENT.miniature(study.tiny()))
    assert "270 pieces, beginnings" in said
    content = json.loads((tmp_path / "results" / "results.json").read_text())
    assert [one["model"] for one in content["models"]] == ["smollm2-135m"]
    assert {(one["cut"], one["objective"]) for one in content["texts"]} == {
        (cut, objective) for cut in counts.CUTS for objective in counts.OBJECTIVES
    }
    assert all(one["from the formula"] == 0 for one in content["texts"] if one["objective"] == "causal")
    assert (tmp_path / "results" / "figure.png").stat().st_size > 20_000
    assert [one.claim for one in judge(tmp_path / "results")] == ["G1", "G19"]


def model(**changes: float) -> dict[str, object]:
    row = {"negative weights": 0, "largest error of a sum": 1e-6, "largest error of a head": 1e-6}
    means = {"order, the model's own scores": 1.0, "order, form of a head": 1.0, "within the hull of tokens": 1.0}
    means["distance to the hull of tokens"] = 0.0
    return {"model": "m", **row, **{name: [changes.get(name, value)] * 3 for name, value in means.items()}}


def text(objective: str, cut: str, apart: int, above: int = 50) -> dict[str, object]:
    exact = 0.0 if objective == "causal" else None
    row = {"objective": objective, "cut": cut, "tokens": 100, "apart": apart, "above": above}
    return {**row, "from the formula": exact}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "confirmed"),
        ({"order, form of a head": 0.8}, "corrected"),
        ({"within the hull of tokens": 0.5}, "corrected"),
        ({"order, the model's own scores": 0.9}, "refuted"),
    ],
)
def test_the_rule_of_combinations(changes: dict[str, float], verdict: str, tmp_path: Path) -> None:
    write(tmp_path / "results.json", {"models": [model(), model(**changes)], "texts": []})
    assert judge(tmp_path)[0].verdict == verdict


@pytest.mark.parametrize(
    ("packed", "above", "beginnings", "masked", "verdict"),
    [
        (40, 70, 90, 5, "confirmed"),
        (40, 50, 90, 5, "corrected"),
        (5, 70, 90, 5, "corrected"),
        (5, 50, 30, 5, "refuted"),
        (40, 70, 90, 20, "refuted"),
    ],
)
def test_the_rule_of_counts(
    packed: int, above: int, beginnings: int, masked: int, verdict: str, tmp_path: Path
) -> None:
    rows = [text("causal", "packed", packed, above), text("causal", "beginnings", beginnings)]
    rows += [text("causal", "shuffled", 5), text("masked", "packed", masked)]
    write(tmp_path / "results.json", {"models": [], "texts": rows})
    assert judge(tmp_path)[1].verdict == verdict
