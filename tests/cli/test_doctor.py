import json
import re
from collections.abc import Callable

import pytest

from attnflow import testing
from attnflow.testing import Environment, Part


def test_text(run: Callable) -> None:
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    assert out.rstrip().endswith("everything needed works")
    assert max(map(len, out.splitlines())) <= 80


def test_json(run: Callable) -> None:
    code, out, err = run("doctor", "--json")
    assert (code, err) == (0, "")
    assert Environment.from_json(out).ok


def test_something_broken_is_a_finding(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Environment((Part("python", "ok", "3.11"), Part("scipy", "broken", "1.0", "needs >=1.13")))
    monkeypatch.setattr(testing, "examine", lambda: machine)
    code, out, _ = run("doctor")
    assert code == 1
    assert out.rstrip().endswith("broken: scipy")
    code, out, _ = run("doctor", "--json")
    assert (code, [part["status"] for part in json.loads(out)["parts"]]) == (1, ["ok", "broken"])


@pytest.mark.parametrize("width", [40, 60, 80, 110])
def test_no_word_is_broken_on_a_narrow_terminal(run: Callable, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    machine = testing.examine()
    monkeypatch.setattr(testing, "examine", lambda: machine)
    monkeypatch.setenv("COLUMNS", str(width))
    lines = run("doctor").out.splitlines()
    words = set(re.findall(r"\S+", " ".join(f"{p.name} {p.status} {p.state} {p.advice}" for p in machine.parts)))
    assert {word for line in lines[:-2] for word in line.split()} == words
    assert max(map(len, lines)) <= max(width, 52)
