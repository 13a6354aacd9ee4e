"""`attnflow explain`: what it prints, writes and refuses."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from attnflow.explain.explanation import Explanation

TEXT = "the rest of my life"


def test_it_prints_who_told_the_answer(run: Callable, tiny_model: str) -> None:
    code, out, err = run("explain", tiny_model, TEXT)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 80
    assert "carried, effect, removed" in out
    assert "L0H" in out or "L1H" in out
    assert "may reach the answer" in out


def test_json_is_the_result_with_its_removals(run: Callable, tiny_model: str) -> None:
    found = Explanation.from_json(run("explain", tiny_model, TEXT, "--json").out)
    assert found.model == tiny_model
    assert all(edge.removed is not None for edge in found.causes[:5])
    assert all(entry.removed is not None for entry in found.entries[:5])


def test_an_answer_is_compared_with_others(run: Callable, tiny_model: str) -> None:
    told = ("--answer", "my", "--against", "the", "--against", "of", "--position", "1")
    found = Explanation.from_json(run("explain", tiny_model, TEXT, *told, "--json").out)
    assert (found.answer.strip(), found.position) == ("my", 1)
    assert [text.strip() for text in found.against] == ["the", "of"]
    ids = run("explain", tiny_model, "--ids", "5,6,7", "--answer", "3", "--json").out
    assert Explanation.from_json(ids).answer_id == 3


def test_the_text_may_come_from_a_pipe(run: Callable, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{TEXT}\n"))
    piped = json.loads(run("explain", tiny_model, "-", "--json").out)
    assert piped["value"] == json.loads(run("explain", tiny_model, TEXT, "--json").out)["value"]


@pytest.mark.parametrize("suffix", [".html", ".svg", ".csv", ".json"])
def test_it_writes_files(run: Callable, tiny_model: str, tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"flow{suffix}"
    code, out, _ = run("explain", tiny_model, TEXT, "-o", str(target))
    assert code == 0
    assert f"written: {target}" in out
    assert 0 < target.stat().st_size < 500_000


def test_a_flow_against_the_order_is_a_finding(run: Callable, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Explanation, "ok", property(lambda self: False))
    assert run("explain", tiny_model, TEXT).code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt9", "hi"], "gpt9"),
        (["MODEL"], "give either a TEXT or --ids"),
        (["MODEL", ""], "the text is empty"),
        (["MODEL", TEXT, "-o", "x.png"], "must end in .html or .svg"),
        (["MODEL", TEXT, "--position", "99"], "position"),
        (["MODEL", TEXT, "--answer", "my", "--against", "my"], "compared with itself"),
        (["MODEL", "--ids", "5,6", "--answer", "life"], "--answer must be integers"),
        (["MODEL", "--ids", "5,6", "--answer", "7,8"], "--answer takes one token, got 2: 7,8"),
    ],
)
def test_wrong_usage(run: Callable, tiny_model: str, arguments: list[str], message: str) -> None:
    code, _, err = run("explain", *(tiny_model if word == "MODEL" else word for word in arguments))
    assert code == 2
    assert message in err
