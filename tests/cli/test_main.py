import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attnflow.cli import _main, mask


def attnflow_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "attnflow", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )


def commands() -> list[list[str]]:
    tree = [[command.name] for command in _main.app.registered_commands]
    return tree + [
        [name, command.name] for name, group in _main.GROUPS.items() for command in group.registered_commands
    ]


@pytest.mark.parametrize("command", [[], ["mask"], ["bias"], *commands()], ids=" ".join)
def test_help(run: Callable, command: list[str]) -> None:
    code, out, err = run(*command, "--help")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert not any(line.rstrip().endswith("...") for line in out.splitlines()[1:]), "a summary was cut"


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_has_json_and_few_flags(run: Callable, command: list[str]) -> None:
    out = run(*command, "--help").out
    flags = [line for line in out.splitlines() if line.startswith("  -") and "--help" not in line]
    assert any("--json" in line for line in flags)
    assert len(flags) <= 10


def test_an_unexpected_error_is_no_finding(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(mask, "print_json", explode)
    code, out, err = run("mask", "list", "--json")
    assert (code, out) == (2, "")
    assert "unexpected KeyError: 'planted'" in err
    assert "defect of attnflow" in err
    assert "Traceback" not in err
    monkeypatch.setenv("ATTNFLOW_TRACEBACK", "1")
    assert "Traceback" in run("mask", "list", "--json").err


def test_too_little_memory_is_no_finding(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise MemoryError("Unable to allocate 728. TiB")

    monkeypatch.setattr(mask, "print_json", explode)
    expected = (2, "", "attnflow: not enough memory: Unable to allocate 728. TiB\n")
    assert run("mask", "list", "--json") == expected


def test_interruption(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mask, "print_json", interrupt)
    code, _, err = run("mask", "list", "--json")
    assert code == 130
    assert "Traceback" not in err


def test_help_is_cheap() -> None:
    probe = (
        "import sys; from attnflow.cli import main; code = main(['mask', 'show', '--help']);"
        "heavy = {'torch', 'numpy', 'transformers', 'matplotlib', 'accelerate'} & set(sys.modules);"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_terminals_without_unicode(encoding: str) -> None:
    done = attnflow_process("mask", "show", "causal", "--n", "3", PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1  # # ." in done.stdout
    assert "6 of 9 (66.7 %)" in done.stdout


def test_progress_goes_to_a_terminal_only_and_not_into_the_output(tmp_path: Path) -> None:
    script = shutil.which("script")
    if script is None:
        pytest.skip("needs script(1) for a terminal")
    command = f"{sys.executable} -m attnflow mask merge butterfly --tokens 3 --json > {tmp_path}/out.json"
    done = subprocess.run(
        [script, "-qec", command, "/dev/null"], capture_output=True, text=True, timeout=120, check=False
    )
    assert "merging butterfly of 3 tokens" in done.stdout
    assert json.loads((tmp_path / "out.json").read_text())["equals_closed_form"]


def test_as_a_process() -> None:
    done = attnflow_process("mask", "list", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["schema"] == "attnflow.mask.list/1"
    failed = attnflow_process("mask", "show", "nothing_like_it")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith("attnflow: unknown mask 'nothing_like_it'")


def test_a_closed_pipe_is_no_finding() -> None:
    command = f"{sys.executable} -m attnflow mask list | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 141
    assert done.stderr == ""
