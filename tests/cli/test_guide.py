"""The command-line guide prints what the commands print."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "cli.md"
TEXT = GUIDE.read_text(encoding="utf-8")
SHELL = re.compile(r"attnflow (?P<arguments>[^|;]*?)( \| (?P<part>head|tail) -(?P<count>\d+))?(?P<code>; echo .*)?$")


def blocks() -> list[str]:
    return re.findall(r"<!-- run -->\n```console\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def outcome(run: Callable, command: str) -> list[str]:
    """What a shell would show of one of the few forms of command that the guide uses."""
    match = SHELL.fullmatch(command)
    assert match, f"the guide uses {command!r}, which this test cannot run"
    code, out, err = run(*shlex.split(match["arguments"]))
    lines = (out + err).splitlines()
    if match["part"]:
        count = int(match["count"])
        lines = lines[:count] if match["part"] == "head" else lines[-count:]
    return [*lines, *([f"exit code {code}"] if match["code"] else [])]


@pytest.mark.parametrize("block", blocks(), ids=lambda block: block.split("\n", 1)[0])
def test_block(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: str) -> None:
    for name, content in re.findall(r"<!-- file: (\S+) -->\n```json\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    shown: list[str] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            shown += [line, *outcome(run, line[2:])]
    assert "\n".join(shown) + "\n" == block


def test_every_command_is_in_the_guide(run: Callable) -> None:
    from attnflow.cli import _main

    commands = [f"attnflow {command.name}" for command in _main.app.registered_commands]
    for group in ("mask", "audit", "bias", "geometry", "knowledge"):
        commands += [f"attnflow {group} {command.name}" for command in _main.GROUPS[group].registered_commands]
    assert [command for command in commands if command not in TEXT] == []


def test_every_schema_is_in_the_guide() -> None:
    package = GUIDE.parents[2] / "src" / "attnflow"
    paths = [*(package / "cli").glob("*.py"), package / "geometry" / "table.py", package / "bias" / "map.py"]
    source = "\n".join(path.read_text() for path in paths)
    schemas = set(re.findall(r'"(attnflow\.[a-z.]+/\d+)"', source))
    assert schemas == set(re.findall(r"`(attnflow\.[a-z.]+/\d+)`", TEXT))
