"""`torchrun ... -m attnflow audit SCRIPT.py:NAME`: one report, one exit code, errors with their rank."""

import json
import re
from pathlib import Path

import pytest

from tests.processes import torchrun

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("audited.py")


def audited(name, *words):
    """What two ranks print, what they complain of, and their exit codes."""
    done = torchrun("-m", "attnflow", "audit", f"{SCRIPT}:{name}", *words, timeout=120)
    codes = [int(code) for code in re.findall(r"^ +exitcode +: (-?\d+)", done.stderr, re.MULTILINE)]
    said = [line for line in done.stderr.splitlines() if line.startswith("attnflow: ")]
    assert done.returncode == bool(codes), done.stderr
    return done.stdout, said, codes


def test_a_clean_step_is_one_json_object():
    out, said, codes = audited("clean", "--json")
    report = json.loads(out)
    assert (report["ok"], report["batch"], report["positions"]) == (True, 2, 12)
    assert (said, codes) == ([], [])


def test_a_leak_is_reported_once_and_both_ranks_end_alike():
    out, said, codes = audited("leaks")
    assert out.count("LEAK") == 1
    assert "(6 is of rank 1, 11 of rank 1)" in out
    assert (said, codes) == ([], [1, 1])


FAILURES = {
    "fails": [
        r"rank 1: RuntimeError: no kernel for this shard$",
        r"rank 1: .*audited.py:fails raised RuntimeError: no kernel for this shard \(line \d+\)",
    ],
    "unmade": [r"rank 1: ValueError: .*audited.py:unmade raised RuntimeError: out of memory \(line \d+\)"],
    "alone": [r"2 processes run .*audited.py:alone, but have no process group: call torch.distributed.init_proc"],
}


@pytest.mark.parametrize("name", FAILURES)
def test_an_error_carries_its_rank_and_both_ranks_end_alike(name):
    out, said, codes = audited(name)
    assert (out, codes) == ("", [2, 2])
    assert len(said) == len(FAILURES[name])
    for line, pattern in zip(sorted(said), sorted(FAILURES[name]), strict=True):
        assert re.match(f"attnflow: {pattern}", line), line


def test_a_rank_that_fails_before_it_joins_the_others_ends_them():
    out, said, codes = audited("early")
    assert out == ""
    assert re.match(r"attnflow: rank 1: .*audited.py:early raised RuntimeError: no device \(line \d+\)", *said)
    assert 2 in codes
