import json
from collections.abc import Callable
from pathlib import Path

import pytest

import attnflow as af
from attnflow.tasks import derivation


@pytest.mark.parametrize(
    ("arguments", "size", "nodes"),
    [
        (["causal_lm", "--tokens", "9"], 8, 8),
        (["multi_token_prediction", "--tokens", "9", "--set", "horizon=3"], 8, 8),
        (["block_two_stream", "--tokens", "12", "--block", "3"], 18, 6),
        (["block_two_stream", "--tokens", "12", "--block", "3", "--set", "predict_first=true"], 21, 7),
        (["butterfly", "--tokens", "7"], 19, 19),
        (["masked_lm", "--tokens", "6", "--set", "masked=1,4"], 6, 1),
        (["permutation_lm", "--tokens", "5", "--set", "permutation=3,1,4,0,2"], 9, 9),
        (["block_diffusion", "--tokens", "12", "--block", "3"], 21, 7),
        (["block_diffusion", "--tokens", "12", "--block", "3", "--set", "masked=0,4,7,11"], 21, 7),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_every_family_merges_to_its_closed_form(run: Callable, arguments: list[str], size: int, nodes: int) -> None:
    code, out, err = run("mask", "merge", *arguments, "--json")
    found = json.loads(out)
    assert (code, err, found["schema"], found["ok"]) == (0, "", "attnflow.mask.merge/1", True)
    assert (len(found["task"]["inputs"]), found["nodes"], found["is_minimal"]) == (size, nodes, True)
    assert (found["equals_closed_form"], found["check"]["ok"]) == (True, True)
    code, out, err = run("mask", "merge", *arguments)
    assert (code, err) == (0, "")
    assert "the least possible" in out
    assert "leaks           none: proved for any number of layers" in out
    assert f"closed form     equal to {found['closed_form']}" in out


def test_the_task_of_the_output_can_be_checked(run: Callable, tmp_path: Path) -> None:
    task = json.loads(run("mask", "merge", "butterfly", "--tokens", "5", "--json").out)["task"]
    file = tmp_path / "task.json"
    file.write_text(json.dumps(task))
    assert run("mask", "check", str(file)).code == 0


def test_a_family_without_a_formula(run: Callable) -> None:
    arguments = ["block_diffusion", "--tokens", "12", "--block", "3", "--set", "masked=0,4"]
    code, out, _ = run("mask", "merge", *arguments, "--json")
    found = json.loads(out)
    assert (code, found["closed_form"], found["equals_closed_form"]) == (0, None, None)
    assert "closed form     none is known" in run("mask", "merge", *arguments).out


def test_a_difference_from_the_formula_is_a_finding(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = ("butterfly as printed", af.tasks.families.butterfly_as_printed(6))
    monkeypatch.setattr(derivation, "_closed_form", lambda *_: printed)
    code, out, _ = run("mask", "merge", "butterfly", "--tokens", "6")
    assert code == 1
    assert "closed form     DIFFERENT from butterfly as printed" in out


def test_output(run: Callable, tmp_path: Path) -> None:
    target = tmp_path / "merged.svg"
    code, out, _ = run("mask", "merge", "butterfly", "--tokens", "5", "-o", str(target))
    assert code == 0
    assert f"written         {target}" in out
    assert target.read_text().startswith("<svg")
