"""What all experiments share: one command line, files that are never mixed with those of other settings, tables."""

from __future__ import annotations

import argparse
import csv
import io
import json
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

from attnflow._core.errors import MissingExtra
from attnflow._core.files import write_atomically

Config = TypeVar("Config")


def command(
    module: str,
    about: str | None,
    scales: Mapping[str, Callable[[], Config]],
    run: Callable[[Config, argparse.Namespace], None],
    summarise: Callable[[Path], str],
    arguments: Sequence[str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """`python -m MODULE OUTPUT --scale tiny`: run what is not there yet, then summarise what is.

    Args:
        module: as `python -m` takes it.
        about: what the help says.
        scales: name -> settings.
        run: given the settings and all arguments.
        summarise: given the folder; writes the results there and returns a table.
        arguments: of the command, for tests.
        options: more of them, as `ArgumentParser.add_argument` takes them.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("output", type=Path, help="folder for the runs, the results and the figure")
    parser.add_argument("--scale", choices=scales, default="tiny")
    parser.add_argument("--summary", action="store_true", help="only summarise the runs that are there")
    for name, settings in (options or {}).items():
        parser.add_argument(name, **settings)
    chosen = parser.parse_args(arguments)
    if not chosen.summary:
        (chosen.output / "runs").mkdir(parents=True, exist_ok=True)
        run(scales[chosen.scale](), chosen)
    print(summarise(chosen.output))


def describe(path: Path, about: Mapping[str, object], packages: Sequence[str]) -> None:
    """Write the settings of a study with versions and device; those that are there must be the same.

    Raises:
        ValueError: the folder holds a study with other settings.
    """
    plain: dict[str, Any] = json.loads(json.dumps(about))
    if path.is_file():
        held = read(path)
        if {key: held.get(key) for key in plain} != plain:
            raise ValueError(f"{path.parent} holds a study with other settings: choose another folder")
        return
    plain["versions"] = {name: metadata.version(name) for name in packages} | {"python": platform.python_version()}
    plain["device"] = f"{platform.machine()}, {torch.get_num_threads()} threads a process"
    write(path, plain)


def read(path: Path) -> Any:
    """What a JSON file holds."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_runs(folder: Path) -> list[Any]:
    """What every finished run wrote, by name of its file."""
    return [read(path) for path in sorted((folder / "runs").glob("*.json"))]


def write(path: Path, content: Mapping[str, object]) -> None:
    """As JSON, whole or not at all."""
    _replace(path, json.dumps(content, indent=1) + "\n")


def write_table(path: Path, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """As CSV, whole or not at all."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    _replace(path, text.getvalue())


def canvas(width: float, height: float, rows: int, columns: int) -> tuple[Any, Any]:
    """(a matplotlib figure, its axes as `subplots` returns them), without frames at the top and the right.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "report", "the figure of an experiment") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    panels: Any = figure.subplots(rows, columns)
    for axes in panels.flatten():
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def plot_band(
    axes: Any,
    places: Sequence[float],
    middle: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    **line: Any,
) -> None:
    """A curve with its interval; `line` as `Axes.plot` takes it."""
    axes.fill_between(places, low, high, color=line.get("color"), alpha=0.13, linewidth=0)
    axes.plot(places, middle, **{"markersize": 4.5, "marker": "o", **line})


def _replace(path: Path, text: str) -> None:
    with write_atomically(path) as file:
        file.write(text.encode())
