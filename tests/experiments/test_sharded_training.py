"""Processes of a launch that share each step, or the model too (FSDP): the same numbers, resumed bit by bit."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.runner.processes import launched
from tests.experiments.sharded_job import CLIP, STEPS, fit, made, seen
from tests.processes import torchrun

WAYS = {
    "whole": {},
    "sharded": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_ACTIVATION_CHECKPOINTING": "true"},
}


def job(folder: Path, way: str, at: int = -1) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    return torchrun("-m", "tests.experiments.sharded_job", str(folder), str(at), **WAYS[way])


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def shared(way: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes saw that trained to the end."""
    folder = tmp_path_factory.mktemp("shared")
    done = job(folder, way)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def of(folder: Path, kind: str) -> dict[str, Any]:
    return json.loads((folder / "seen.json").read_text())[kind]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tolerance"), [("all", 1e-6), ("frozen", torch.finfo(torch.bfloat16).eps)])
def test_two_processes_train_what_one_trains(kind, tolerance, way, shared, tmp_path):
    """In float64; and a bias in float32 on a frozen model in bfloat16. Sums in another order differ by rounding."""
    theirs, mine = of(shared, kind), seen(*fit(tmp_path, kind == "frozen"))
    assert [entry["step"] for entry in theirs["log"]] == list(range(1, STEPS + 1))
    for one, two in zip(mine["log"] + mine["measured"], theirs["log"] + theirs["measured"], strict=True):
        assert two == pytest.approx(one, rel=tolerance)
    clipped = [entry["clipped"] for entry in theirs["measured"] if "clipped" in entry]
    assert clipped == pytest.approx([CLIP**2] * STEPS, rel=tolerance), "over all shards"
    assert theirs["types"] == mine["types"]
    bias = {dtype for name, dtype in theirs["types"].items() if "score_terms" in name}
    assert bias == {"torch.float32" if kind == "frozen" else "torch.float64"}
    if way == "sharded":
        assert theirs["whole"] == [], "every parameter is a shard, the bias with its layer"
        assert theirs["own"] < 0.6 * mine["own"]
    assert theirs["tensors"].keys() == mine["tensors"].keys()
    if kind == "all":
        before = dict(made(frozen=False).named_parameters())
        for name, weights in mine["weights"].items():
            assert theirs["weights"][name] == pytest.approx(weights, rel=tolerance, abs=tolerance)
            moved = theirs["weights"][name] != before[name].double().flatten().tolist()
            assert moved or "output_bias" in name, name


@pytest.mark.slow
def test_killed_at_a_step_it_goes_on_bit_by_bit_and_one_process_can_read_it(way, shared, tmp_path):
    died = job(tmp_path, way, 5)
    assert died.returncode != 0
    assert f"exitcode: {-signal.SIGKILL}" in died.stderr
    assert {path.name for path in (tmp_path / "all").iterdir()} == {"checkpoint-2", "checkpoint-4"}
    done = job(tmp_path, way, STEPS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert of(tmp_path, "all") == of(shared, "all")
    alone = seen(*fit(tmp_path / "all"))
    for name in ("log", "measured", "tensors", "weights"):
        assert alone[name] == of(shared, "all")[name], name


def test_what_the_environment_asks_for(monkeypatch):
    for name in ("WORLD_SIZE", "ACCELERATE_USE_FSDP", "FSDP_VERSION"):
        monkeypatch.delenv(name, raising=False)
    alone = launched()
    assert (alone.rank, alone.count, alone.sharded) == (0, 1, False)
    assert (alone.share(3), alone.once(lambda: 4), alone.mean(torch.ones(()))) == (3, 4, 1.0)
    with pytest.raises(ValueError, match="expected 8 processes that share each model"):
        alone.expect(8)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="expected FSDP of version 2, got version 1: pass --fsdp_version 2"):
        launched()
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(ValueError, match=r"expected several processes .* and this one is alone"):
        launched()
