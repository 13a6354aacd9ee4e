import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attnflow._core import version
from attnflow._core.errors import AttnflowError
from attnflow.cli import _main, mask, single
from tests.models.saved import save_tiny


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


@pytest.mark.parametrize("command", [[], ["mask"], ["bias"], ["geometry"], *commands()], ids=" ".join)
def test_help(run: Callable, command: list[str]) -> None:
    out = run.ok(*command, "--help")
    assert max(map(len, out.splitlines())) <= 80
    assert not any(line.rstrip().endswith("...") for line in out.splitlines()[1:]), "a summary was cut"


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_has_json_and_few_flags(run: Callable, command: list[str]) -> None:
    out = run(*command, "--help").out.partition("Example: ")[0]
    flags = [line for line in out.splitlines() if line.startswith("  -") and "--help" not in line]
    assert any("--json" in line for line in flags)
    assert len(flags) <= 10


def test_an_unexpected_error_is_no_finding(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(mask, "print_json", explode)
    err = run.refused("mask", "list", "--json")
    assert "unexpected KeyError: 'planted'" in err
    assert "defect of attnflow" in err
    assert "Traceback" not in err
    monkeypatch.setenv("ATTNFLOW_TRACEBACK", "1")
    assert "Traceback" in run("mask", "list", "--json").err


def turned(error: Exception, first: BaseException, hidden: bool = False) -> Exception:
    """An error raised while another one was handled, as by an import; `hidden` as by `raise ... from None`."""
    try:
        try:
            raise first
        except BaseException as caught:
            raise error from (None if hidden else caught)
    except Exception as raised:
        return raised


INTERRUPTED = "attnflow: interrupted\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (MemoryError("728. TiB"), 2, "attnflow: not enough memory: 728. TiB\n"),
        (KeyboardInterrupt(), 130, ""),
        (turned(ImportError("numpy._core failed"), KeyboardInterrupt()), 130, INTERRUPTED),
        (turned(SystemError("returned a result"), KeyboardInterrupt(), hidden=True), 130, INTERRUPTED),
        (turned(AttnflowError("x"), turned(ImportError("y"), KeyboardInterrupt())), 130, INTERRUPTED),
        (turned(AttnflowError("no torch"), ImportError("y")), 2, "attnflow: no torch\n"),
        (PermissionError(13, "Permission denied", "x.json"), 2, "attnflow: x.json: Permission denied\n"),
    ],
    ids=str,
)
def test_what_stops_a_command_is_no_finding(
    run: Callable, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    def explode(*_: object) -> None:
        raise error

    monkeypatch.setattr(mask, "print_json", explode)
    assert run("mask", "list", "--json") == (code, "", said)


def test_help_is_cheap() -> None:
    probe = (
        "import sys; from attnflow.cli import main; code = main(['mask', 'show', '--help']);"
        "heavy = {'torch', 'numpy', 'transformers', 'matplotlib', 'accelerate'} & set(sys.modules);"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_terminals_without_unicode() -> None:
    done = attnflow_process("mask", "show", "causal", "--n", "3", PYTHONIOENCODING="ascii")
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


def test_a_closed_pipe_is_no_finding() -> None:
    command = f"{sys.executable} -m attnflow mask list | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 141
    assert done.stderr == ""


def test_doctor(run: Callable) -> None:
    out = run.ok("doctor")
    assert out.startswith("everything needed is installed")
    assert "transformers" in out
    assert "PyTorch version" not in out
    assert "PyTorch version" in run("doctor", "--verbose").out
    code, out, _ = run("doctor", "--json")
    said = json.loads(out)
    assert (code, said["ok"], said["untried"], said["schema"]) == (0, True, {}, "attnflow.doctor/1")
    assert any(each["name"] == "torch" and each["version"] for each in said["packages"])


def test_doctor_names_packages_that_are_newer_than_any_tried(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "NEWEST_TRIED", {"transformers": "4.57", "peft": "0.1", "torch": "99.0"})
    monkeypatch.setattr(single, "NEWEST_TRIED", version.NEWEST_TRIED)
    out = run.ok("doctor")
    verdict, *newer = out.split("\n\n")[0].splitlines()
    assert verdict == "everything needed is installed"
    assert [line.split()[0] for line in newer if "newest" in line] == ["transformers", "peft"]
    assert "'transformers==4.57.*'" in " ".join(newer)
    assert set(json.loads(run("doctor", "--json").out)["untried"]) == {"transformers", "peft"}


def test_a_package_that_is_missing_is_a_finding(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "_requirements", lambda: {"scipy": (None, None), "typer": (None, "1.0")})
    code, out, _ = run("doctor")
    assert code == 1
    assert re.search(r"^scipy +not installed +pip install scipy", out, re.MULTILINE)
    assert out.startswith("missing: scipy\n")


def test_the_studio_names_the_tokens_of_both_halves(run: Callable, tmp_path: Path, monkeypatch) -> None:
    shown: list[dict] = []
    monkeypatch.setattr("attnflow.studio.serve", lambda design, *_, **__: shown.append(design))
    run.ok("studio", save_tiny(tmp_path, "T5", decoder_start_token_id=0), "--no-open")
    (design,) = shown
    assert len(design["tokens"]) == 2 * 32 - 1, "those of the decoder, one less, after those of the encoder"
    assert design["tokens"][32:] == design["tokens"][:31]
