"""Losses that are those of the family, gaps filled as the tasks say, the table of neighbours, and the summary."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import attnflow as af
from attnflow.tasks import Collator
from experiments.hasse.arms import Arm, build
from experiments.hasse.recipe import ROUNDING
from experiments.infilling import study, summary
from experiments.infilling.filling import Gaps, agreement, filled, nats, quality, readings
from experiments.infilling.recipe import EXPERIMENT
from experiments.infilling.settings import Infilling
from experiments.infilling.tables import between
from experiments.runner.text import word_pieces
from tests.experiments.miniature import read_random_rows, run_miniature

SIZES = {"width": 32, "inner": 16, "layers": 2, "vocabulary": 50}
GAPS = Gaps(16, range(4, 12, 4), 4, 49)
ROWS = torch.randint(49, (3, 16), generator=torch.Generator().manual_seed(0))


def batch(collate: Collator, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    return collate(list(tokens))


@pytest.fixture(scope="module", name="model")
def _model() -> torch.nn.Module:
    return build(SIZES, 16, 3).eval()


def test_arms_are_those_of_the_settings() -> None:
    config = Infilling()
    assert {way.arm for way in config.ways.values()} == set(config.arms)
    assert [arm.warm for arm in config.arms.values()] == [False, True, True]
    whole = config.arms["one shot"].task(258)(list(range(64)))
    assert (whole.size, len(whole.targets), whole.depth) == (184, 64, 1)
    torch.manual_seed(0)
    parts = [config.arms["random"].task(258)(list(range(64))) for _ in range(2)]
    assert all(16 <= len(part.targets) < 64 for part in parts)
    assert parts[0] != parts[1], "drawn anew"
    assert list(config.firsts) == list(range(4, 60, 4))


def test_the_loss_is_that_of_the_family(model: torch.nn.Module) -> None:
    family = partial(af.tasks.butterfly, block=4, mask_token=49)
    scores = torch.stack([af.tasks.log_probs(model, family(row.tolist())) for row in ROWS])
    whole = nats(model, batch, readings(GAPS, None, 4), ROWS)
    assert torch.allclose(whole, -scores[:, 4:12].mean(dim=1), atol=1e-5)
    causal = nats(model, batch, readings(GAPS, Arm("causal", 2).task(49), None), ROWS)
    scores = torch.stack([af.tasks.log_probs(model, af.tasks.causal_lm(row.tolist())) for row in ROWS])
    assert torch.allclose(causal, -scores[:, 3:11].mean(dim=1), atol=1e-5)  # the first token has none


@pytest.mark.parametrize("per_pass", [1, 2])
def test_the_loss_of_several_passes_is_that_of_the_text_in_order(model: torch.nn.Module, per_pass: int) -> None:
    expected = torch.zeros(len(ROWS))
    for number, row in enumerate(ROWS):
        for first in GAPS.firsts:
            for start in range(0, 4, per_pass):
                hidden = range(first + start, first + 4)
                family = af.tasks.butterfly(row.tolist(), block=4, masked=hidden, mask_token=49)
                expected[number] -= af.tasks.log_probs(model, family)[:per_pass].sum() / len(GAPS.places)
    found = nats(model, batch, readings(GAPS, None, per_pass), ROWS)
    assert torch.allclose(found, expected, atol=1e-5)


def test_gaps_need_passes() -> None:
    with pytest.raises(ValueError, match="needs per_pass"):
        readings(GAPS, None, None)


@pytest.mark.parametrize("per_pass", [4, 2, 1])
def test_gaps_are_filled_as_the_task_says(model: torch.nn.Module, per_pass: int) -> None:
    found = agreement(model, GAPS, ROWS, per_pass)
    assert found["compared"] == ROWS.shape[0] * 8
    assert found["closest"] < ROUNDING
    tokens, passes, seconds = filled(model, GAPS, ROWS, per_pass)
    assert (tokens.shape, passes, seconds > 0) == ((3, 2, 4), 4 // per_pass, True)


def test_a_wrong_filler_is_seen(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    right = af.tasks.infill
    monkeypatch.setattr(af.tasks, "infill", lambda *a, **b: right(*a, **(b | {"mask_token": 48})))
    for per_pass in (4, 1):
        found = agreement(model, GAPS, ROWS, per_pass)
        assert (found["differ"], found["closest"] > ROUNDING) != (0, False)


def test_a_causal_model_writes_on_from_the_left(model: torch.nn.Module) -> None:
    tokens, passes, _ = filled(model, GAPS, ROWS, None)
    text = ROWS[0, :4].clone()
    for _ in range(4):
        text = torch.cat([text, model(text[None]).logits[0, -1:].argmax(dim=-1)])
    assert (tokens[0, 0].tolist(), passes) == (text[4:].tolist(), 4)


def test_quality_counts() -> None:
    tokenizer = word_pieces(["x"], 259)
    whole = torch.tensor([tokenizer("or loves a foe be")["input_ids"]])
    gaps = Gaps(whole.shape[1], (4,), 4, 258)
    words = frozenset({"loves", "foe"})
    truth = whole[:, None, 4:8]
    assert quality(gaps, whole, truth, tokenizer, words) == {"right": [1.0], "whole": [1.0], "real_words": 1.0}
    wrong = truth.clone()
    wrong[..., 0] = tokenizer("i")["input_ids"][0]
    assert quality(gaps, whole, wrong, tokenizer, words) == {"right": [0.75], "whole": [0.0], "real_words": 0.0}


def test_the_table_learns_what_neighbours_say() -> None:
    training = torch.tensor([[0, 1, 2, 3, 4, 5] * 3] * 300)
    gaps = Gaps(18, (4, 8), 4, 9)
    best, losses = between(gaps, training, training[:2], 10)
    assert torch.equal(best, torch.stack([training[:2, first : first + 4] for first in gaps.firsts], dim=1))
    assert max(losses) < 0.05
    unseen = torch.full((1, 18), 7)
    assert between(gaps, training, unseen, 10)[1][0] > 2.0, "what was never seen has a chance all the same"


@pytest.fixture(scope="module", name="finished")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        read_random_rows(patch)
        patch.setattr(summary, "_DRAWS", 50)
        config = replace(EXPERIMENT.miniature(EXPERIMENT.recipes["tiny"]()), steps=2, save_every=0)
        run_miniature(EXPERIMENT, folder, config)
    return folder


def test_results_are_written(finished: Path) -> None:
    content = json.loads((finished / "results" / "results.json").read_text())
    ways = {one["way"]: one for one in content["ways"]}
    assert list(ways) == list(Infilling().ways)
    assert {name: one["passes"] for name, one in ways.items()} == {
        "causal": 2, "one shot": 1, "random, one shot": 1, "random, half": 2, "random, one by one": 2,
    }  # fmt: skip
    assert all(len(one["seeds"]) == 2 for one in ways.values())
    assert all(one["closest"] < ROUNDING for name, one in ways.items() if name != "causal")
    apart = content["differences"]["random, one by one less one shot"]["held_out"]
    means = [ways[name]["held_out"][0] for name in ("random, one by one", "one shot")]
    assert apart[0] == pytest.approx(means[0] - means[1])
    bar = content["differences"]["one shot less neighbours"]["held_out"][0]
    assert bar == pytest.approx(means[1] - content["table"]["held_out"][0])
    assert (finished / "results" / "results.csv").read_text().count("\n") == 1 + 5 * 2 * 3
    assert (finished / "results" / "figure.png").stat().st_size > 50_000


def test_arms_are_causal_at_first(finished: Path) -> None:
    logs = [
        json.loads((finished / "runs" / f"{name}-0.0015-0.json").read_text())["log"]
        for name in ("causal", "one-shot", "random")
    ]
    assert logs[0][0] == logs[1][0] == logs[2][0]
    assert logs[1][1] != logs[2][1] != logs[0][1]


@pytest.mark.parametrize("more", [{"length": 62}, {"blocks": (2, 4)}])
def test_settings_that_do_not_fit_are_refused(more: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"rows must be at least 3 times 4 tokens|expected one length of gaps"):
        study.setup(replace(Infilling(), **more))
