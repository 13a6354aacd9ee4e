"""The grid of stores and models, its gains, and what it is summarised to."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.knowledge_scaling.recipe import EXPERIMENT, Grid, judge
from experiments.knowledge_scaling.summary import gains, name, summarise
from experiments.knowledge_twins import summary
from experiments.knowledge_twins.summary import Curve
from experiments.runner.files import write
from experiments.runner.jobs import Record
from tests.experiments.miniature import read_random_rows, run_miniature


def test_gains_are_paired_by_seed() -> None:
    losses = {(32, 8): (3.0, 3.2, 9.0), (32, 24): (2.5, 2.6), (64, 8): (2.4, 2.5), (64, 24): (2.2, 2.4)}
    curves: dict[str, Curve] = {}
    for place, ends in losses.items():
        runs: dict[int, Record] = {seed: {} for seed in range(len(ends))}
        curves[name(*place)] = Curve(name(*place), 1e-3, runs, (0, 1), np.array([[9.0, end] for end in ends]))
    found = {one["name"]: one["each"] for one in gains(curves, (32, 64), (8, 24))}
    assert list(found) == [
        "24 entries for 8, width 32", "24 entries for 8, width 64", "width 64 for 32, 8 entries",
        "width 64 for 32, 24 entries", "interaction", "width 32 with 24 less width 64 with 8",
    ]  # fmt: skip
    assert found["24 entries for 8, width 32"] == pytest.approx([0.5, 0.6])
    assert found["width 64 for 32, 8 entries"] == pytest.approx([0.6, 0.7])
    assert found["interaction"] == pytest.approx([0.3, 0.5])
    assert found["width 32 with 24 less width 64 with 8"] == pytest.approx([0.1, 0.1])


def test_results_are_written_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_random_rows(monkeypatch)
    monkeypatch.setattr(summary, "_DRAWS", 50)
    run_miniature(EXPERIMENT, tmp_path, EXPERIMENT.miniature(Grid()))
    content = json.loads((tmp_path / "results" / "results.json").read_text())
    assert [one["arm"] for one in content["arms"]] == [name(w, n) for w in (32, 64) for n in (8, 24)]
    assert len(content["gains"]) == 6
    assert (tmp_path / "results" / "figure.png").stat().st_size > 15_000
    assert [one.claim for one in judge(tmp_path / "results")] == ["K11"]
    for path in (tmp_path / "runs").glob("width-64-with-24-*"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match="has no width 64 with 24 with all its learning rates yet"):
        summarise(tmp_path, tmp_path / "results")


@pytest.mark.parametrize(
    ("stores", "both", "verdict"),
    [
        (0.1, 0.0, "confirmed"),
        (0.0, 0.0, "refuted"),
        (0.1, 0.1, "refuted"),
        (0.1, -0.1, "refuted"),
        (0.02, 0.0, "not confirmed"),
        (0.1, 0.02, "not confirmed"),
    ],
)
def test_the_rule(stores: float, both: float, verdict: str, tmp_path: Path) -> None:
    found = {f"24 entries for 8, width {width}": stores for width in (32, 64)} | {"interaction": both}
    rows = [{"name": key, "nats": [value, value - 0.01, value + 0.01]} for key, value in found.items()]
    write(tmp_path / "results.json", {"widths": [32, 64], "entries": [8, 24], "gains": rows})
    assert judge(tmp_path)[0].verdict == verdict
    write(tmp_path / "results.json", {"widths": [32, 64], "entries": [8, 24], "gains": rows[:2]})
    assert judge(tmp_path) == []
