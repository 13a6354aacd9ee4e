"""Initialisations that share all else, losses, and what the runs are summarised to."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnflow as af
from experiments.geometry_init import study
from experiments.geometry_init.model import CONTROLS, INITIALISATIONS, PENALTIES, build, penalised, token_losses
from experiments.geometry_init.recipe import EXPERIMENT
from experiments.geometry_init.summary import compare, read_curves
from tests.experiments.miniature import read_random_rows, run_miniature

SIZES = {**study.sizes(32, 2, 0.0), "vocab_size": 60, "max_position_embeddings": 16, "num_attention_heads": 2}


def projections(model: Any) -> set[str]:
    return {name for name in model.state_dict() if name.endswith(("query.weight", "key.weight"))}


@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_arms_of_a_seed_share_all_but_queries_and_keys(objective: Any) -> None:
    base = build(SIZES, "default", objective, 3)
    for arm in (*INITIALISATIONS, *PENALTIES):
        made = build(SIZES, arm, objective, 3)
        differ = {
            name for name, tensor in made.state_dict().items() if not torch.equal(tensor, base.state_dict()[name])
        }
        assert differ <= projections(made), arm
        assert bool(differ) == (arm in INITIALISATIONS[1:]), arm
    other = build(SIZES, "default", objective, 4)
    assert not torch.equal(other.state_dict()[min(projections(other))], base.state_dict()[min(projections(base))])


def test_arms_start_as_their_names_say() -> None:
    symmetry = {
        arm: np.mean(
            [row["symmetry"] for row in af.geometry.score(build(SIZES, arm, "masked", 0), per_head=False).rows()]
        )
        for arm in INITIALISATIONS
    }
    assert symmetry["symmetric"] == pytest.approx(1.0, abs=1e-6)
    assert symmetry["symmetric small"] == pytest.approx(1.0, abs=1e-6)
    assert symmetry["skew"] == pytest.approx(-1.0, abs=1e-6)
    assert abs(symmetry["default"]) < 0.3
    assert abs(symmetry["scaled"]) < 0.3

    def scale(arm: str) -> float:
        state = build(SIZES, arm, "masked", 0).state_dict()
        weights = [tensor for name, tensor in state.items() if name.endswith(("query.weight", "key.weight"))]
        return float(torch.stack([weight.square().mean() for weight in weights]).mean().sqrt())

    assert scale("symmetric") == pytest.approx(scale("scaled"), rel=0.05)
    assert scale("scaled") == pytest.approx((1 / 3 / 32) ** 0.5, rel=0.05), "std of nn.Linear's uniform weights"
    assert scale("symmetric small") == pytest.approx(scale("default"), rel=0.05)
    with pytest.raises(ValueError, match="arms are default, scaled"):
        build(SIZES, "other", "masked", 0)


@pytest.mark.parametrize(("arm", "quantity", "end"), [
    ("penalty symmetric", "symmetry", 1.0),
    ("penalty skew", "symmetry", -1.0),
    ("penalty columns", "directionality", -1.0),
])  # fmt: skip
def test_penalties_pull_where_they_should(arm: str, quantity: str, end: float) -> None:
    model = build({**SIZES, **study.sizes(128, 2, 0.0)}, arm, "masked", 0)  # narrow ones have D = 1, without gradient
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)

    def now() -> float:
        return float(np.mean([row[quantity] for row in af.geometry.score(model, per_head=False).rows()]))

    before = now()
    for _ in range(20):
        optimiser.zero_grad()
        term = penalised(model, arm)
        assert term is not None
        term.backward()
        optimiser.step()
    assert abs(now() - end) < abs(before - end)
    assert penalised(model, "default") is None


def test_losses_are_those_of_the_models() -> None:
    tokens = torch.randint(60, (3, 9), generator=torch.Generator().manual_seed(0))
    causal = build(SIZES, "default", "causal", 0).eval()
    generator = torch.Generator()
    with torch.no_grad():
        found = token_losses(causal, tokens, "causal", 59, generator)
        torch.testing.assert_close(found.mean(), causal(input_ids=tokens, labels=tokens).loss)
        changed = tokens.clone()
        changed[:, 5:] = 0
        later = token_losses(causal, changed, "causal", 59, generator).view(3, 8)
        torch.testing.assert_close(later[:, :4], found.view(3, 8)[:, :4]), "under a causal mask"
        masked = build(SIZES, "default", "masked", 0).eval()
        losses = token_losses(masked, tokens.expand(30, 3, 9).flatten(0, 1), "masked", 59, generator.manual_seed(0))
    assert len(losses) == pytest.approx(0.15 * 30 * 27, rel=0.35)


@pytest.fixture(scope="module", name="finished")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        read_random_rows(patch)
        config = replace(EXPERIMENT.miniature(EXPERIMENT.recipes["tiny"]()), steps=4, rates=(1e-3, 1e-2), save_every=0)
        config = replace(config, masked=("default", "scaled", "symmetric", "skew"), causal=("default", "scaled"))
        run_miniature(EXPERIMENT, folder, config)
    return folder


def test_results_are_written_and_judged(finished: Path) -> None:
    content = json.loads((finished / "results" / "results.json").read_text())
    assert [(one["objective"], one["arm"]) for one in content["arms"]] == [
        ("masked", "default"), ("masked", "scaled"), ("masked", "symmetric"), ("masked", "skew"),
        ("causal", "default"), ("causal", "scaled"),
    ]  # fmt: skip
    assert [(one["arm"], one["control"]) for one in content["comparisons"]] == [
        ("scaled", "default"), ("symmetric", "scaled"), ("skew", "scaled"), ("scaled", "default"),
    ]  # fmt: skip
    assert (finished / "results" / "results.csv").read_text().count("\n") == 1 + 6 * 2 * 5
    assert (finished / "results" / "figure.png").stat().st_size > 20_000
    said = EXPERIMENT.judge(finished / "results")
    assert [one.claim for one in said] == ["G13", "G14", "G9", "G10", "G11", "G12", "G15", "G16"]


def test_differences_are_paired_by_seed(finished: Path) -> None:
    curves = {(one.objective, one.arm): one for one in read_curves(finished)}
    arm, control = curves["masked", "symmetric"], curves["masked", "scaled"]
    assert arm.seeds == control.seeds == (0, 1)
    found = compare(arm, control)
    differences = arm.held_out[:, -1] - control.held_out[:, -1]
    assert found.loss.mean == pytest.approx(differences.mean())
    assert min(differences) - 1e-12 <= found.loss.low <= found.loss.high <= max(differences) + 1e-12
    turned = replace(arm, seeds=(1, 0), held_out=arm.held_out[::-1])
    assert compare(turned, control).loss.mean == pytest.approx(found.loss.mean)
    assert set(CONTROLS) == {*INITIALISATIONS[1:], *PENALTIES}
