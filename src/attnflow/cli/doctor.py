"""`attnflow doctor`: check which of the packages, models and texts that attnflow uses are installed."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Annotated, Final

import typer

from attnflow._core.markup import aligned
from attnflow._core.version import NEWEST_TRIED, installed, untried
from attnflow.cli._output import JsonFlag, console, print_json, say, style, working

_EXTRAS: Final = ("hf", "report", "knowledge", "studio", "trl", "test")
Verbose = Annotated[bool, typer.Option("--verbose", help="Add PyTorch's report on this machine.")]


def doctor(verbose: Verbose = False, json_output: JsonFlag = False) -> None:
    """Check the installation.

    Prints whether it is complete, then which packages of attnflow and its extras are installed and which are newer than
    any that attnflow was tried with, and which small models and texts. Exits with 1 if a package that attnflow always
    needs is missing.
    """
    with working("examining the environment"):
        from attnflow.models.names import MODELS, TEXTS

        wanted = _requirements()
        samples = {sample.requirement: sample.find() is not None for sample in (*MODELS.values(), TEXTS)}
        machine = _machine() if verbose else None
    missing = [name for name, (extra, version) in wanted.items() if extra is None and version is None]
    newer = untried()
    if json_output:
        packages = [
            {"name": name, "extra": extra, "version": version, "newest_tried": NEWEST_TRIED.get(name)}
            for name, (extra, version) in wanted.items()
        ]
        about = {"ok": not missing, "untried": newer, "packages": packages, "models_and_texts": samples}
        print_json("attnflow.doctor/1", {**about, "torch": machine})
        raise typer.Exit(1 if missing else 0)
    screen = console()
    verdict = f"missing: {', '.join(missing)}" if missing else "everything needed is installed"
    say(screen, verdict, style(not missing))
    for name, version in newer.items():
        tried = NEWEST_TRIED[name]
        say(
            screen,
            f"{name} {version} is newer than {tried}, the newest tried: if it fails, install '{name}=={tried}.*'",
        )
    rows: list[list[str]] = []
    for name, (extra, version) in wanted.items():
        package = name if extra is None else f"'attnflow[{extra}]'"
        rows.append([name, version or f"not installed  pip install {package}"])
    for name, present in samples.items():
        rows.append([name, "installed" if present else f"not installed  pip install --no-deps {name}"])
    say(screen, f"\n{aligned(rows, left=[0, 1])}")
    if machine is not None:
        say(screen, f"\n{machine}")
    raise typer.Exit(1 if missing else 0)


def _machine() -> str:
    """PyTorch's report: its build, Python, the system and the accelerators."""
    from torch.utils.collect_env import get_pretty_env_info

    return get_pretty_env_info().strip()


def _requirements() -> dict[str, tuple[str | None, str | None]]:
    """Returns (extra or None, installed version or None) of each declared distribution, core first."""
    declared: dict[str, str | None] = {}
    for line in metadata.requires("attnflow") or []:
        match = re.match(r"([A-Za-z0-9._-]+)", line)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", line)
        if match is None or match[1] in {"attnflow", *declared} or (extra is not None and extra[1] not in _EXTRAS):
            continue
        declared[match[1]] = extra[1] if extra else None
    core_first = sorted(declared.items(), key=lambda item: (item[1] is not None, item[1] or ""))
    return {name: (extra, installed(name)) for name, extra in core_first}
