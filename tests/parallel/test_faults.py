"""Faults that only parallel runs have: each is found on two or four processes, and no clean twin is accused."""

import json
import re

import pytest
import torch

import attnflow as af
from tests.leaks.losses import BATCH, MODEL, PLAIN
from tests.parallel.faults import CASES
from tests.parallel.layers import PAIRS
from tests.parallel.losses import LOSSES, OTHERS, SAME
from tests.processes import torchrun

LAUNCHES = 2, 4


def launched(cases):
    return [(processes, cause) for processes in LAUNCHES for cause, case in cases.items() if processes in case.launches]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{number of processes: what was found on them}."""
    answers = {}
    for processes in LAUNCHES:
        path = tmp_path_factory.mktemp("parallel") / "found.json"
        done = torchrun("-m", "tests.parallel.run_faults", str(path), processes=processes)
        assert done.returncode == 0, done.stderr[-3000:]
        answers[processes] = json.loads(path.read_text())
    return answers


@pytest.mark.parametrize("processes", LAUNCHES)
@pytest.mark.parametrize("layer", PAIRS)
def test_a_parallel_layer_computes_what_one_process_does(layer, processes, found):
    values, gradients, largest = found[processes]["layers"][layer]
    assert values < 1e-13
    assert gradients < 1e-13 * largest
    assert largest > 1


@pytest.mark.parametrize(("processes", "cause"), launched(CASES))
def test_a_fault_and_its_clean_twin(processes, cause, found):
    case, faulty, clean = CASES[cause], *(found[processes][cause][twin] for twin in ("faulty", "clean"))
    assert clean["ok"], clean["text"]
    assert not faulty["ok"], faulty["text"]
    assert (case.kind or ("reference" if case.against else "order")) in faulty["kinds"], faulty["text"]
    assert case.where in faulty["text"], faulty["text"]
    assert re.search(r"rank \d", faulty["text"]), faulty["text"]


@pytest.mark.parametrize(("processes", "cause"), launched(LOSSES))
def test_a_wrong_loss_and_its_clean_twin(processes, cause, found):
    case, faulty, clean = LOSSES[cause], *(found[processes][cause][twin] for twin in ("faulty", "clean"))
    assert clean["ok"], clean["text"]
    assert case.says in faulty["text"], faulty["text"]
    assert case.says not in clean["text"], clean["text"]
    assert faulty["ok"] == (case.says == SAME)
    assert not case.kind or case.kind in faulty["kinds"], faulty["text"]


@pytest.mark.parametrize(("processes", "cause"), launched(OTHERS))
def test_what_cannot_be_judged_is_not_green(processes, cause, found):
    case, said = OTHERS[cause], found[processes][cause]
    assert not said["ok"]
    assert said["kinds"] == [case.kind] * bool(case.kind), said["text"]
    assert case.says in said["text"]


@pytest.mark.parametrize("processes", LAUNCHES)
def test_all_ranks_get_one_report(processes, found):
    assert found[processes]["unequal"] == []


def test_the_catalogue():
    assert len(CASES) + len(LOSSES) >= 50


def test_one_process_has_all_of_a_shard():
    plain, alone = (af.audit.check_loss(PLAIN, BATCH, MODEL, shard=shard) for shard in (None, "contiguous"))
    assert alone.ok
    assert alone.trained == plain.trained
    rows = af.audit.check_loss(PLAIN, BATCH, MODEL, shard=(torch.tensor([1, 0]), slice(None)))
    assert {mistake.kind for mistake in rows.mistakes} == {"targets"}, "the other rows' targets"
