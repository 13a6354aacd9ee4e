"""The hasse experiments: committed results are those of their tables."""

import json

from experiments.hasse import from_table as hasse
from experiments.infilling import from_table as infilling
from experiments.runner.experiment import ROOT
from experiments.runner.files import read

HASSE, INFILLING = (ROOT / name / "results" for name in ("hasse", "infilling"))


def test_committed_results_are_those_of_the_committed_tables():
    assert json.loads(json.dumps(hasse.recomputed(HASSE)[0])) == read(HASSE / "results.json")
    assert json.loads(json.dumps(infilling.recomputed(INFILLING))) == read(INFILLING / "results.json")
