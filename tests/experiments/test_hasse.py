"""The hasse experiments: committed results are those of their tables, and how two studies are judged together."""

import json

from experiments.hasse import from_table as hasse
from experiments.hasse.judging import judge
from experiments.infilling import from_table as infilling
from experiments.runner.experiment import ROOT
from experiments.runner.files import read, write

HASSE, INFILLING = (ROOT / name / "results" for name in ("hasse", "infilling"))


def test_committed_results_are_those_of_the_committed_tables():
    assert json.loads(json.dumps(hasse.recomputed(HASSE)[0])) == read(HASSE / "results.json")
    assert json.loads(json.dumps(infilling.recomputed(INFILLING))) == read(INFILLING / "results.json")


def test_verdicts_follow_the_rules(tmp_path):
    content = read(HASSE / "results.json")
    verdicts = {one.claim: one for one in judge(HASSE)}
    assert [(one.verdict, one.tags) for one in verdicts.values()] == [
        ("confirmed", ()),
        ("not confirmed", ("floor",)),
        ("not confirmed", ()),
    ]
    assert "reaches its depth and ends at 2.248 nats, the dense one at 0.022" in verdicts["H18"].sentence
    next(one for one in content["arms"] if one["arm"] == "warm 8")["held_out"] = [3.09, 3.08, 3.10]
    content["sparse_less_dense"]["block 1"] = [-0.05, -0.09, 0.01]
    write(tmp_path / "results.json", content)
    assert [(one.verdict, one.tags) for one in judge(tmp_path)][1:] == [
        ("confirmed", ("floor",)),
        ("confirmed", ("empty",)),
    ]
    content["sparse_less_dense"]["block 1"] = [0.05, 0.03, 0.07]
    write(tmp_path / "results.json", content)
    assert judge(tmp_path)[2].verdict == "refuted"
