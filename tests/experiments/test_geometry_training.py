"""The authors' runs are whole, Table 1 follows from their losses, and larger scales decide unless ours contradicts."""

from pathlib import Path

import numpy as np
import pytest

from experiments.geometry_training.measures import LAYERS, Course, courses, settled, table_1
from experiments.geometry_training.recipe import CLAIMS, judge
from experiments.runner.files import write

# Loss from the default start and from the symmetric one, speed-up in %, as printed; and over itself, which is not.
TABLE_1 = {
    ("bert-small", "jigsaw"): (2.782, 2.758, 26, 14),
    ("bert-small", "wikipedia"): (0.984, 0.812, 73, 10),
    ("bert-small", "red_pajama"): (1.106, 0.907, 69, 8),
    ("bert", "jigsaw"): (1.419, 1.430, 0, 3),
    ("bert", "wikipedia"): (0.256, 0.247, 20, 2),
    ("bert", "red_pajama"): (0.297, 0.274, 35, 0),
}


def test_the_data_are_whole_and_table_1_follows_from_them() -> None:
    assert len(courses()) == 12
    assert all(one.symmetry.shape == (200, LAYERS[model]) for (model, _, _), one in courses().items())
    for place, (*ends, ahead, itself) in TABLE_1.items():
        found = table_1(*place)
        assert [found["default"], found["symmetric"]] == pytest.approx(ends, abs=6e-4)
        assert [round(100 * found[name]) for name in ("speed-up", "over itself")] == [ahead, itself]


def test_a_layer_has_settled_once_it_stays_near_its_end() -> None:
    steps = np.array([10.0, 20.0, 30.0, 40.0])
    symmetry = np.array([[0.0, 1.0], [0.9, 0.0], [0.5, 0.95], [1.0, 1.0]])
    assert settled(Course(steps, symmetry, symmetry), 0.2).tolist() == [1.0, 0.75]


@pytest.mark.parametrize(
    ("mean", "verdicts"),
    [  # ours at tiny confirms G10 and refutes G31
        (0.2, ["confirmed"] * 7 + ["not confirmed"]),
        (-0.2, ["refuted", "not confirmed", *["refuted"] * 6]),
        (0.0, ["no effect"] * 8),
    ],
)
def test_the_larger_scale_decides_unless_ours_contradicts(mean: float, verdicts: list[str], tmp_path: Path) -> None:
    rows = []
    for claim in CLAIMS.values():
        value = mean if claim.where == "above" else -mean
        row = {"quantity": claim.quantity, "values": {"one": value}, "t": [value, value - 0.01, value + 0.01]}
        rows += [{**row, "definition": name} for name in ("main", "another")]
    write(tmp_path / "results.json", {"quantities": rows})
    found = judge(tmp_path)
    assert [one.verdict for one in found] == verdicts
    assert all(f"claim's side in {int(mean > 0)} of 1" in one.sentence for one in found)
