"""Scores of several models as the command makes them: it goes on past a model that cannot be scored."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnflow._core.errors import AttnflowError, MissingExtra
from attnflow.cli._output import BadUsage, output_path

if TYPE_CHECKING:
    from attnflow.cli._output import Spinner
    from attnflow.geometry import GeometryScores
    from attnflow.geometry.score import Attention
    from attnflow.geometry.scores import Mode
    from attnflow.report.score_figures import Picture

SUFFIXES: Final = (".svg", ".png", ".html", ".csv")


@dataclass(frozen=True)
class Found:
    """The models that could be scored, and the reasons why others could not, by the name that was typed."""

    models: tuple[GeometryScores, ...]
    unscored: dict[str, str]


def run(
    names: Sequence[str], gamma: float, mode: Mode, per_head: bool, attention: Attention, spinner: Spinner
) -> Found:
    """Score each model once, in the order of their names."""
    from attnflow.geometry.score import score

    models: list[GeometryScores] = []
    unscored: dict[str, str] = {}
    distinct = list(dict.fromkeys(names))
    for number, name in enumerate(distinct, 1):
        which = f"{name} (model {number} of {len(distinct)})" if len(distinct) > 1 else name
        spinner(f"opening {which}")

        def progress(done: int, total: int, layer: str, which: str = which) -> None:
            spinner(f"scoring {which}: {done}/{total} {layer}")

        try:
            scores = score(name, gamma, mode, per_head, attention, progress=progress)
        except (AttnflowError, OSError, ValueError, MemoryError) as error:
            unscored[name] = str(error) or type(error).__name__
        except Exception as error:  # a defect of ours must not lose the models before and after it
            if os.environ.get("ATTNFLOW_TRACEBACK"):
                raise
            unscored[name] = f"unexpected {type(error).__name__}: {error}; ATTNFLOW_TRACEBACK=1 shows where"
        else:
            models.append(replace(scores, model=name))
    return Found(tuple(models), unscored)


def target(path: Path, picture: Picture, names: Sequence[str]) -> Path:
    """Where the result goes, if it can be written there: checked before the work.

    Raises:
        BadUsage: another suffix, no such folder, or a heat map of several models.
        MissingExtra: matplotlib is not installed.
    """
    found = output_path(path, SUFFIXES)
    if found.suffix.lower() in (".svg", ".png"):
        if find_spec("matplotlib") is None:
            raise MissingExtra("matplotlib", "report", "scores as a figure")
        if picture == "heads" and len(set(names)) > 1:
            raise BadUsage(f"--picture heads shows one model, got {len(set(names))}; an .html report shows them all")
    return found


def write(found: Found, path: Path, picture: Picture) -> None:
    """Write the figure, report or table that the suffix of `path` asks for; whole or not at all."""
    from attnflow._core.files import write_atomically
    from attnflow.report import figure, geometry_report

    suffix = path.suffix.lower()
    if suffix == ".html":
        geometry_report(found.models, unscored=found.unscored).save(path)
        return
    first, *others = found.models
    with write_atomically(path) as file:
        if suffix == ".csv":
            tables = [model.to_csv() for model in found.models]
            file.write(tables[0].encode())
            file.writelines(table.partition("\n")[2].encode() for table in tables[1:])
        else:
            figure(first, *others, picture=picture).savefig(file, format=suffix[1:], dpi=200)
