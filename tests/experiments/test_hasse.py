"""Arms that are what their names say, costs, tables, decoding that agrees, and what the runs are summarised to."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attnflow as af
from experiments.hasse import study, summary
from experiments.hasse.arms import Arm, arms, build, cost, narrowest
from experiments.hasse.recipe import EXPERIMENT, ROUNDING
from experiments.hasse.settings import Training
from experiments.hasse.summary import read_curves
from experiments.hasse.tables import after, frequencies
from experiments.hasse.writing import agreement, decoded
from experiments.runner import text as texts
from experiments.runner.jobs import Job
from experiments.runner.text import Split, word_pieces
from tests.experiments.miniature import read_random_rows, rows, run_miniature

SIZES = {"width": 32, "inner": 16, "layers": 2, "vocabulary": 50}


@pytest.mark.parametrize("name", Training().arms)
def test_masks_have_the_depth_of_their_name(name: str) -> None:
    arm = Training().arms[name]
    made = arm.task(258)
    task = made(list(range(64)))
    assert af.tasks.check(task).ok
    dense = replace(arm, depth=None).task(258)(list(range(64)))
    assert dense.is_dense
    if arm.depth is None:
        assert task == dense
    else:
        assert 1 < task.depth <= arm.depth
        assert task.mask.nnz < dense.mask.nnz
        window = narrowest(dense, arm.depth)
        assert window == 1 or dense.sparsified(window=window - 1).depth > arm.depth
        assert torch.equal(task.flow.reachability(), dense.flow.reachability()), "the order is the same"


def test_arms_are_those_of_the_issue() -> None:
    made = arms((2, 4), (1, 8), (2, 4), (2,))
    assert list(made) == [
        "causal", "block 1", "block 8", "butterfly", "warm 1", "warm 8",
        "sparse causal", "sparse block 1", "sparse block 8", "sparse butterfly",
        "causal of 2 layers", "depth 2 of 2 layers", "depth 4 of 2 layers", "depth 2 of 4 layers",
        "repeats", "repeats depth 2",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no window gives"):
        narrowest(af.tasks.merge(af.tasks.butterfly(range(9))).task, 0)


def test_flops_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    task = Arm("causal", 2).task(49)(list(range(16)))
    model = build(SIZES, 16, 0)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        batch = af.tasks.Collator(lambda _: task, by_length=False)([list(range(16))])
        labels = batch.pop("labels")
        af.tasks.loss(model(**batch), labels).backward()
    unskipped = 3 * 4 * SIZES["layers"] * SIZES["width"] * (task.size**2 - task.mask.nnz)
    counted = sum(value for name, value in counter.get_flop_counts()["Global"].items() if "mm" in str(name))
    assert counted == pytest.approx(cost(task, SIZES).flops + unskipped, rel=0.01)


def test_tables_count() -> None:
    training = torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1, 2]] * 200)
    assert frequencies(training, training, 3) == pytest.approx(math.log(3), rel=1e-3)
    for distance in (1, 2, 3):
        assert after(training, training[:1], distance, 3) < 0.1
    unseen = torch.tensor([[3, 0, 3, 0]])
    assert after(training, unseen, 1, 4) > 2.0, "what never followed has a chance all the same"


@pytest.mark.parametrize("block", [1, 2, 4])
def test_decoding_is_what_was_trained(block: int) -> None:
    model = build(SIZES, 16, 3).eval()
    held = torch.randint(49, (3, 16), generator=torch.Generator().manual_seed(0))
    found = agreement(model, Arm("blocks", 2, block), held, 49)
    assert found["compared"] == 3 * (16 - block)
    assert found["margin"] < 1e-4
    tokenizer = word_pieces(["alpha beta"], 270)
    tokens = held.clamp(min=32)
    written = decoded(model, Arm("blocks", 2, block), tokens, 49, tokenizer, frozenset())
    assert written["tokens_per_pass"] == block
    causal = decoded(model, Arm("causal", 2), tokens, 49, tokenizer, frozenset())
    assert (causal["passes"], causal["tokens_per_pass"]) == (8, 1.0)


def test_a_wrong_decoder_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, right = build(SIZES, 16, 3).eval(), af.tasks.generate_blocks
    held = torch.randint(49, (3, 16), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(af.tasks, "generate_blocks", lambda *a, **b: right(*a, **(b | {"mask_token": 48})))
    assert agreement(model, Arm("blocks", 2, 2), held, 49)["margin"] > ROUNDING


@pytest.fixture(scope="module", name="finished")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        read_random_rows(patch)
        patch.setattr(summary, "_DRAWS", 50)
        config = replace(EXPERIMENT.miniature(EXPERIMENT.recipes["tiny"]()), steps=4, save_every=0)
        run_miniature(EXPERIMENT, folder, config)
    return folder


def test_results_are_written_and_judged(finished: Path) -> None:
    content = json.loads((finished / "results" / "results.json").read_text())
    names = list(EXPERIMENT.miniature(EXPERIMENT.recipes["tiny"]()).arms)
    assert [one["arm"] for one in content["arms"]] == names
    assert set(content["sparse_less_dense"]) == {"causal", "block 1", "block 2", "butterfly"}
    assert [(one["layers"], one["depth"], one["reached"]) for one in content["depths"]] == [
        (2, 2, True), (2, 3, False), (2, 5, False), (3, 2, True), (3, 3, True), (3, 5, False),
    ]  # fmt: skip
    assert [(one["depth"], one["reached"]) for one in content["repeats"]] == [(1, True), (2, True)]
    assert {one["arm"] for one in content["written"]} == {"causal", "block 1", "block 2", "warm 1", "warm 2"}
    assert (finished / "results" / "results.csv").read_text().count("\n") == 1 + len(names) * 2 * 5
    assert (finished / "results" / "figure.png").stat().st_size > 50_000
    assert [one.claim for one in EXPERIMENT.judge(finished / "results")] == ["H16", "H17", "H18"]


def test_compute_is_that_of_what_ran(finished: Path) -> None:
    about, curves = read_curves(finished)
    costs, config = about["costs"], about["config"]
    each = config["batch_size"]
    causal, warm, block = curves["causal"], curves["warm 2"], curves["block 2"]
    assert causal.flops.tolist() == [each * step * costs["causal"]["flops"] for step in range(5)]
    halves = [0, 1, 2, 2, 2], [0, 0, 0, 1, 2]
    expected = [
        each * (a * costs["causal"]["flops"] + b * costs["block 2"]["flops"]) for a, b in zip(*halves, strict=True)
    ]
    assert warm.flops.tolist() == expected
    assert block.at(block.flops[2]).tolist() == block.held_out[:, 2].tolist()
    assert block.at(0.5 * (block.flops[2] + block.flops[3])) == pytest.approx(block.held_out[:, 2:4].mean(axis=1))
    arms_of = {one["arm"]: one for one in json.loads((finished / "results" / "results.json").read_text())["arms"]}
    assert arms_of["causal"]["less_causal_at_equal_compute"] == [0, 0, 0]
    difference = block.held_out[:, -1] - causal.held_out[:, -1]
    assert arms_of["block 2"]["less_causal"][0] == pytest.approx(difference.mean())


def test_warm_arms_are_causal_at_first(finished: Path) -> None:
    logs = {name: json.loads((finished / "runs" / f"{name}-0.0015-0.json").read_text())["log"] for name in (
        "causal", "warm-1", "warm-2", "block-1")}  # fmt: skip
    for step in (0, 1):
        assert logs["warm-1"][step] == logs["warm-2"][step] == logs["causal"][step]
    assert logs["warm-2"][2] != logs["causal"][2]
    assert logs["block-1"][0] != logs["causal"][0]


def test_rows_must_be_whole_blocks() -> None:
    with pytest.raises(ValueError, match="rows of 60 tokens are not a multiple of twice 8"):
        study.setup(replace(Training(), length=60))


def test_a_tokenizer_without_a_mask_gets_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tokenizer = word_pieces(["alpha beta"], 270)
    tokenizer.mask_token = None
    monkeypatch.setattr(texts, "learned_from_training", lambda size: tokenizer)
    monkeypatch.setattr(texts, "split_text", lambda *_: Split(rows(8, 0), rows(2, 1), rows(3, 2)))
    made = study.setup(EXPERIMENT.miniature(Training()))
    assert made.about["vocabulary"] == len(tokenizer) + 1
    found = made.run(Job("block 2", 1e-3, 0), tmp_path, lambda *_: None)
    agreed: Any = found["agreement"]
    assert agreed["compared"] == 2 * 14
    assert agreed["margin"] < ROUNDING
