"""Audits and guards on two and four processes: what one process finds, on every rank alike, and no rank waits."""

import json

import pytest
import torch

import attnflow as af
from attnflow.audit.shards import Shards, positions_of
from tests.processes import torchrun

LEAK = "order: model.layers.1.mlp (layer 1): position 0 moves with position 1"
TOGETHER = ("FSDP2", "tensor parallel", "tp_plan", "FSDP2 x tensor parallel")
ELSEWHERE = "pass the same inputs on each"
STEPS = {  # case: (verdict, words that the report must have)
    "step, contiguous": ("clean", []),
    "step, contiguous by indices": ("clean", []),
    "step, zigzag": ("clean", []),
    "step, zigzag by indices": ("clean", []),
    "one row, contiguous": ("clean", []),
    "one row, zigzag": ("clean", []),
    "whole on each rank": ("clean", []),
    "rows of their own": ("clean", []),
    "mask, contiguous": ("leak", ["order: step", "is of rank 1", "reference: step.output"]),
    "mask, zigzag": ("leak", ["order: step", "is of rank 1", "reference: step.output"]),
    "positions, contiguous": ("leak", ["reference: step.output", "is of rank 1"]),
    "positions, zigzag": ("leak", ["reference: step.output", "is of rank 1"]),
    "halves exchanged": ("leak", ["order: step", "reference: step.output"]),
    "without a shard": ("nothing tested", ["say with shard= which they are", "rank 1"]),
    "a hole": ("nothing tested", ["which no rank returned"]),
    "replicas that differ": ("nothing tested", ["rank 1 returns other values"]),
    "a norm on parts of the sequence, False": ("clean", []),
    "a norm on parts of the sequence, True": ("leak", ["order: Normed"]),
    "a replica that leaks": ("leak", ["order: lambda", "rank 1 returns other values"]),
    "beside a whole output": ("leak", ["rank 0: b: position 0 moves with position 1"]),
    "without the last": ("nothing tested", ["position 15, which no rank returned"]),
    "an outlier": ("leak", ["reference"]),
    "other arguments": ("ValueError", ["other arguments"]),
    "a reference on one rank": ("ValueError", ["other arguments"]),
    "another order on one rank": ("ValueError", ["other arguments"]),
    "a step that one rank cannot copy": ("clean", []),
    "one row beside its reference": ("clean", []),
    "other ids": ("ValueError", [ELSEWHERE]),
    "a length that does not fit": ("ValueError", ["equal parts, which leaves"]),
    "what cannot be sent": ("RankFailed", ["rank 0", "cannot be sent to other ranks"]),
    "guard of a ring": ("UnsupportedArchitecture", ["audit.check(step, ids, shard=...)"]),
    "check of a ring": ("UnsupportedArchitecture", ["audit.check(step, ids, shard=...)"]),
    "layers, FSDP2": ("UnsupportedArchitecture", ["by='output'"]),
    "raises": ("RankFailed", ["rank 1: ValueError: planted"]),
    "raises inside": ("RankFailed", ["rank 1: ValueError: planted", "groups were closed to release them"]),
}


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    """{case: answer} of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    done = torchrun("tests/parallel/audits.py", str(folder), processes=request.param, timeout=540)
    files = [folder / f"{rank}.json" for rank in range(request.param)]
    assert all(file.exists() for file in files), done.stderr[-3000:]
    return [json.loads(file.read_text()) for file in files]


def wrapped(ranks):
    return [name.removeprefix("check, ") for name in ranks[0] if name.startswith("check, ")]


@pytest.mark.slow
def test_every_rank_comes_to_the_end(ranks):
    assert [list(answers)[-1] for answers in ranks] == ["raises inside"] * len(ranks)
    assert len(wrapped(ranks)) == (4 if len(ranks) == 2 else 1)


@pytest.mark.slow
@pytest.mark.parametrize("case", STEPS)
def test_a_step(case, ranks):
    verdict, words = STEPS[case]
    for answers in ranks:
        assert answers[case][0] == verdict, answers[case]
        assert all(word in " ".join(answers[case]) for word in words), answers[case]
        assert verdict != "clean" or answers[case] == ["clean"]
    assert len({json.dumps(answers[case]) for answers in ranks}) == 1, "every rank has the same report"


@pytest.mark.slow
def test_an_error_beside_the_step_reaches_the_others(ranks):
    assert ranks[1]["progress that raises"][0] == "ZeroDivisionError"
    assert ranks[0]["progress that raises"][0] == "RankFailed"
    assert "ZeroDivisionError" in ranks[0]["progress that raises"][1]
    assert "rank " in ranks[0]["progress that raises"][1]


@pytest.mark.slow
def test_a_model_is_audited_as_on_one_process(ranks):
    for name in wrapped(ranks):
        for answers in ranks:
            assert answers[f"check, {name}"] == answers[f"quick, {name}"] == ["clean"]
            (verdict, found) = answers[f"leak, {name}"]
            assert verdict == "leak"
            assert found.startswith(LEAK)


@pytest.mark.slow
def test_a_batch_is_checked_as_on_one_process(ranks):
    for name in wrapped(ranks):
        for answers in ranks:
            assert answers[f"batch, {name}"] == ["no mistake", "same", "mistakes"]
            if name in ("DDP", "FSDP2"):
                other = answers[f"other batches, {name}"]
                assert other == ["no mistake", "same", "mistakes"] if name == "DDP" else ELSEWHERE in other[1]


@pytest.mark.slow
def test_a_guard_tells_every_rank(ranks):
    for name in wrapped(ranks):
        batches = len(ranks) if name == "FSDP2" else 1
        for rank, answers in enumerate(ranks):
            assert answers[f"guard, {name}"] == [True, batches, {}]
            error, words = answers[f"guard of a leak, {name}"]
            assert error == "LeakFound"
            assert LEAK in words
            if name not in ("DDP", "FSDP2"):
                continue
            error, words = answers[f"guard of rank 1's batch, {name}, raise"]
            assert LEAK in words
            assert "rank 1: " in words or rank == 1
            assert error == ("RankFailed" if name == "DDP" and rank == 0 else "LeakFound")
            assert answers[f"guard of rank 1's batch, {name}, log"][0] is False
            assert answers[f"guard of rank 1, {name}"][0] in ("LeakFound", "RankFailed")  # and no rank waits for it
            other = answers[f"other inputs, {name}"]
            assert other == ["clean"] if name == "DDP" else ELSEWHERE in other[1]


@pytest.mark.slow
def test_what_runs_on_one_rank_alone_is_named(ranks):
    ok, _, elsewhere = ranks[0]["guard on one rank"]
    assert not ok
    assert elsewhere == {str(rank): "no guard" for rank in range(1, len(ranks))}
    assert all(answers["measured, FSDP2"] == [True] for answers in ranks)
    assert all(answers["DDP trains on"] == [True, True, True] for answers in ranks)
    assert all(answers["guard before FSDP2"] == [True, len(ranks), True] for answers in ranks)


ZIGZAG = [[[0, 1, 6, 7], [8, 9, 14, 15]], [[2, 3, 4, 5], [10, 11, 12, 13]]]
PLACES = [  # (shard, rank, flat places in ids of shape [2, 8]) of 2 ranks
    ("contiguous", 1, [[4, 5, 6, 7], [12, 13, 14, 15]]),
    ("zigzag", 0, ZIGZAG[0]),
    ("zigzag", 1, ZIGZAG[1]),
    (slice(3, 5), 0, [[3, 4], [11, 12]]),
    ([0, 7], 0, [[0, 7], [8, 15]]),
    (torch.tensor([0, 7]), 0, [[0, 7], [8, 15]]),
    ((slice(1, 2), slice(6, None)), 0, [[14, 15]]),
    (None, 1, [[*range(8)], [*range(8, 16)]]),
]


@pytest.mark.parametrize(("shard", "rank", "places"), PLACES)
def test_the_places_of_a_shard(shard, rank, places):
    assert positions_of(shard, (2, 8), rank, 2).tolist() == places


@pytest.mark.parametrize(
    "shard", ["striped", torch.tensor([8]), "half", (slice(0, 1), torch.tensor([9])), [1, 1], [0, -8]]
)
def test_places_that_are_not_there(shard):
    with pytest.raises(ValueError, match="shard must"):
        positions_of(shard, (2, 8), 0, 2)


def test_one_process_may_compare_with_a_reference():
    ids = torch.randint(9, (2, 8), generator=torch.Generator().manual_seed(0))
    table = torch.randn(9, 3, generator=torch.Generator().manual_seed(1))

    def step(ids):
        return table[ids].cumsum(1)

    assert af.audit.check(step, ids, against=step).ok
    report = af.audit.check(lambda ids: table[ids], ids, against=step)
    assert [violation.kind for violation in report.violations] == ["reference"]
    assert "7 positions" not in str(report)
    assert "positions 1 to 7 of sequence 0" in str(report)
    other = af.audit.check(step, ids, against=lambda ids: table[ids][..., :2])
    assert other.verdict == "nothing tested"
    with pytest.raises(ValueError, match="are of a step"):
        af.audit.check(torch.nn.Embedding(9, 3), ids, shard="zigzag")


def test_ranks_that_return_other_widths_are_a_doubt():
    shards = Shards(None, "contiguous", (1, 4), {0: torch.arange(2)[None], 1: torch.arange(2, 4)[None]})
    shards._joined("logits", {0: torch.zeros(2, 3), 1: torch.zeros(2, 4)})
    assert list(shards.doubts) == [
        "logits of rank 1, [2, 4] of torch.float32, unlike other ranks",
        "logits at positions 2 to 3, which no rank returned",
    ]
