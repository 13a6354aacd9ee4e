"""Each help page ends with an example that runs: here with a tiny model, and with the one that it names."""

import io
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from attnflow import studio
from attnflow.cli import _main
from tests.cli.test_main import commands

PAGES = ["", *_main.GROUPS, *(" ".join(command) for command in commands() if "MODEL" not in command)]
TINY = {  # what the tiny model has words for
    "When Mary and John went to the store, John gave a drink to": "I the of thy my",
    "The capital of France is": "I the of thy",
    '--answer " Mary" --against " John"': "--answer my --against thy",
    '--answer " Rome" --subject France': "--answer my --subject of",
    "--layer 24 --head 4": "--layer 1 --head 1",
}
FINDINGS = {"knowledge edit"}  # of random weights, an edit need not hold


def example(run: Callable, page: str) -> str:
    """The command that a reader of the page copies, after the shell has joined its lines."""
    before, sign, lines = run.ok(*page.split(), "--help").rpartition("Example:\n\n")
    assert sign, f"the help of {page!r} has no example"
    assert before.rstrip().endswith(("message and exit.", "command.")) or "Commands:" in before, "it ends the page"
    return re.sub(r" \\\n +", " ", lines.strip())


def in_shell(run: Callable, line: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """What a shell does of the forms that examples use: `&&`, `> FILE`, `echo ... |` and `python -c`."""
    code = 0
    for part in line.split(" && "):
        words = shlex.split(part)
        if words[:2] == ["python", "-c"]:
            exec(compile(words[2], "example", "exec"), {})
            continue
        if "|" in words:
            assert words[0] == "echo"
            monkeypatch.setattr("sys.stdin", io.StringIO(words[1]))
            words = words[words.index("|") + 1 :]
        out = f"{words[1]}\n" if words[0] == "echo" else ""
        target = words[words.index(">") + 1] if ">" in words else None
        words = words[: words.index(">")] if target else words
        if words[0] != "echo":
            assert words[0] == "attnflow"
            code, out, err = run(*words[1:])
            assert code < 2, err
        if target:
            Path(target).write_text(out)
    return code


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def serve(*_: object, **__: object) -> None:
        """The studio would serve until Ctrl-C."""

    monkeypatch.setattr(studio, "serve", serve)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_with_a_tiny_model(
    run: Callable, folder: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    line = example(run, page).replace("smollm2-135m", tiny_model)
    for words, others in TINY.items():
        line = line.replace(words, others)
    assert in_shell(run, line, monkeypatch) <= (page in FINDINGS)


def test_in_one_folder_and_again(run: Callable, folder: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader copies examples one after the other; only a store is not built twice, and the message says so."""
    pages = [page for page in PAGES if page.startswith(("bias", "knowledge ")) and page != "knowledge trace"]
    lines = {page: example(run, page).replace("smollm2-135m", tiny_model) for page in pages}
    for again in (False, True):
        for page, line in lines.items():
            for words, others in TINY.items():
                line = line.replace(words, others)
            if again and "knowledge build" in line:
                with pytest.raises(AssertionError, match=r"already holds \d+ entries: name a new store"):
                    in_shell(run, line, monkeypatch)
            else:
                assert in_shell(run, line, monkeypatch) <= (page in FINDINGS)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_as_it_stands(run: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    line = example(run, page)
    if "smollm2-135m" in line:
        assert in_shell(run, line, monkeypatch) <= (page in FINDINGS)
