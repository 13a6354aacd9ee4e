"""What a terminal of 80 columns shows: no line is longer, no word is split, nothing is lost against a pipe."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import attnflow as af
from attnflow._core.markup import columns
from attnflow._core.progress import Reporter
from attnflow.cli._output import wrapped
from attnflow.models import load_model
from tests.cli.test_bad_input import CASES, TASK

COMMANDS = [
    "--help",
    "mask list",
    "mask show packed.json",
    "mask show longformer --n 300 --set window=9",
    "mask check leaks.json",
    "mask merge block_two_stream --tokens 8 --set block=2",
    "mask export sliding_window --n 40 --set window=5 --to flashmask",
    "mask export butterfly --to flashmask",
    "mask debug odd.npy",
    "audit TINY --tokens 16 --save order.json",
    "audit TINY --tokens 16 --order full",
    "audit leaky.py:score",
    "geometry TINY nope",
    "geometry TINY --per-head",
    "geometry TINY --attention cross",
    "geometry attribute TINY 'I the of thy' --layer 1",
    "bias show TINY --bias BIAS --text 'I the of thy'",
    "knowledge build store TINY",
    "knowledge trace TINY 'I the of thy'",
    "knowledge trace TINY 'I the of thy' --ablate 4",
    "knowledge edit TINY -o edited --prompt 'I the of' --answer thy --subject the",
    "report leaks.json -o a-report-with-a-rather-long-name-as-people-give-them-when-they-keep-many-of-them.html",
    "doctor",
]
ERRORS = [command for command, _ in CASES]


@pytest.fixture
def shown(
    run: Callable, tiny_model: str, saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[list[str], str]]:
    """shown(command): the lines on a terminal of 80 columns, and what a pipe gets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(Reporter, "_draw", lambda *_: None)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    chain = [{"name": "document", "parameters": {"lengths": [5, 3]}}]
    chain += [{"name": "sliding_window", "parameters": {"n": 8, "window": 3}}]
    Path("packed.json").write_text(str({"and": chain}).replace("'", '"'))
    leaks = af.tasks.merge(af.tasks.butterfly(range(100, 105))).task.to_dict()
    leaks["mask"] = {"name": "full", "parameters": {"n": 13}}
    Path("leaks.json").write_text(str(leaks).replace("'", '"').replace("None", "null"))
    Path("task.json").write_text(TASK)
    Path("leaky.py").write_text("def score(ids):\n    return ids.double().mean(1, keepdim=True) + ids\n")
    odd = np.tril(np.ones((40, 40), bool))
    odd[3], odd[5, 20] = False, True
    np.save("odd.npy", odd)

    def call(command: str) -> tuple[list[str], str]:
        words = [{"TINY": tiny_model, "BIAS": saved}.get(word, word) for word in shlex.split(command)]
        code, out, err = run(*words)
        for name in ("store", "edited"):
            shutil.rmtree(name, ignore_errors=True)
        with monkeypatch.context() as patch:
            for stream in (sys.stdout, sys.stderr):
                patch.setattr(stream, "isatty", lambda: True)
            again, *texts = run(*words)
        assert (code, bool(out), bool(err)) == (again, *map(bool, texts))
        return "".join(texts).splitlines(), out + err

    return call


def untimed(text: str) -> list[str]:
    return re.sub(r"in [\d.]+ s", "in 1 s", text).split()


@pytest.mark.parametrize("command", [*COMMANDS, *ERRORS])
def test_80_columns(shown: Callable, command: str) -> None:
    lines, whole = shown(command)
    assert [line for line in lines if columns(line) > 80 and len(line.split()) > 1] == []
    assert untimed(" ".join(lines)) == untimed(whole)


def test_a_table_keeps_its_columns() -> None:
    table = "layer  entry  text\n   12  46023  + one two three\n    3      7  a longer text than fits"
    assert wrapped(table, 28) == (
        "layer  entry  text\n   12  46023  + one two\n              three\n"
        "    3      7  a longer text\n              than fits"
    )
    assert wrapped(table, 20) == (
        "layer  entry\n      text\n   12  46023\n      + one two\n      three\n"
        "    3      7\n      a longer text\n      than fits"
    )


def test_a_prompt_is_shown_as_it_was_typed(run: Callable, tiny_model: str) -> None:
    assert "prompt I the of thy\n" in run("knowledge", "trace", tiny_model, "I the of thy").out
    assert "prompt 4 5 6\n" in run("knowledge", "trace", tiny_model, "--ids", "4,5,6").out
    assert (
        "prompt [CLS] the capital is paris [SEP]\n" in run("knowledge", "trace", "minilm", "the capital is Paris").out
    )


def test_progress_bars_of_others_are_for_a_terminal(tiny_model: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "attnflow", "knowledge", "edit", tiny_model, "-o", str(tmp_path / "edited")]
    command += ["--prompt", "I the of", "--answer", "thy"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, 1)
    assert done.stderr == ""


def test_loading_a_bias_announces_nothing(
    tiny_model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_model(tiny_model)
    with af.bias.attach(loaded, af.bias.GuidanceConfig(hidden_dim=8)):
        af.bias.save(loaded.model, tmp_path / "bias")
    capfd.readouterr()
    caplog.set_level("INFO")
    caplog.clear()
    handle = af.bias.load(load_model(tiny_model), tmp_path / "bias")
    print(handle)
    said = "".join([*capfd.readouterr(), caplog.text])
    assert "parameters" in said
    assert "trainable" not in said


def test_counts_agree_with_their_nouns(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("blind.npy", ~np.eye(5, dtype=bool))
    assert "Varlen: 1 document, causal" in run("mask", "export", "causal", "--to", "varlen").out
    export = ("mask", "export", "sliding_window", "--n", "9", "--set", "window=3", "--to", "flashmask")
    assert "FlashMask: 1 bound for each of 9 keys" in run(*export).out
    assert "may attend to other keys but not to themselves" in run("mask", "debug", "blind.npy").out
