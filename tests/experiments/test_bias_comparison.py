"""Arms go on where their start ended, rates are chosen as the README says, and verdicts follow from the contrasts."""

from pathlib import Path

import pytest

from experiments.bias_comparison.verdicts import judge
from experiments.runner.files import write

TEXT, LOST, DEPTH = "text: loss, guidance less", "distractors: loss of accuracy,", "depth: accuracy in the middle,"
NAMES = {
    **{arm: f"{TEXT} {arm}" for arm in ("plain", "key", "lowrank", "dense")},
    "saved": "text: share of the steps saved, guidance less plain",
    "third": f"{LOST} guidance less a third of plain",
    "own": f"{LOST} guidance",
    "theirs": f"{LOST} plain",
    "drops": f"{LOST} guidance less plain",
    "hurt": f"{LOST} guidance less key",
    "middle": f"{DEPTH} guidance less plain",
    "deep": f"{DEPTH} guidance less key",
}
GAIN = {"plain": -0.1, "key": -0.1, "lowrank": -0.1, "dense": -0.1, "saved": 0.2}
HURT = {"third": -0.1, "own": 0.05, "theirs": 0.45, "drops": -0.4, "hurt": -0.1, "middle": 0.2, "deep": 0.2}


@pytest.mark.parametrize(
    ("means", "verdicts"),
    [
        (GAIN, {"D7": "confirmed", "D12": "confirmed rule after", "D17": "confirmed"}),
        ({**GAIN, "key": 0.0}, {"D7": "confirmed empty", "D12": "confirmed rule after", "D17": "confirmed"}),
        ({**GAIN, "plain": 0.0, "saved": -0.1}, {"D7": "no effect", "D12": "refuted rule after", "D17": "confirmed"}),
        (HURT, {"D15": "confirmed rule after", "D16": "confirmed rule after"}),
        (
            {**HURT, "hurt": 0.0, "deep": 0.0},
            {"D15": "confirmed empty rule after", "D16": "confirmed empty rule after"},
        ),
        (
            {**HURT, "theirs": 0.0, "middle": -0.2},
            {"D15": "not testable here rule after", "D16": "refuted empty rule after"},
        ),
        ({**HURT, "third": 0.0}, {"D15": "no effect rule after", "D16": "confirmed rule after"}),
    ],
)
def test_verdicts_say_what_a_control_gains_as_well(
    means: dict[str, float], verdicts: dict[str, str], tmp_path: Path
) -> None:
    made = {NAMES[name]: {"t": [mean, mean - 0.01, mean + 0.01]} for name, mean in means.items()}
    write(tmp_path / "results.json", {"contrasts": made, "extras": {}})
    assert {one.claim: " ".join((one.verdict, *one.tags)) for one in judge(tmp_path)} == verdicts
