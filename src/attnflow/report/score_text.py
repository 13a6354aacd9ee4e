"""Scores as tables for the terminal."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnflow.geometry.summary import Quartiles, Summary
from attnflow.geometry.table import IGNORED, GeometryScores

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text


def overview(models: Sequence[GeometryScores]) -> Group:
    """One table of medians and quartiles of several models, then what it leaves out and how it compares."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("model", overflow="fold")
    for name in ("matrices", "symmetry", "directionality"):
        table.add_column(name, no_wrap=True)
    remarks: list[str] = []
    for scores in models:
        for index, summary in enumerate(scores.summaries):
            texts = (scores.model if index == 0 else "", _matrices(scores, summary))
            table.add_row(*map(Text, texts), _quartiles(summary.symmetry), _quartiles(summary.directionality))
            if summary.flagged:
                remarks.append(f"{scores.model}: {_flags(scores, summary)}")
        remarks += [f"{scores.model}: {note}" for note in scores.notes]
        remarks += [str(comparison) for comparison in scores.compare()]
    readings = sorted({f"gamma {scores.gamma:g} and mode {scores.mode}" for scores in models})
    legend = f"Median [quartiles]. Directionality has {', '.join(readings)}. Ignored: {IGNORED}."
    return Group(table, Text(legend, style="dim"), *(Text(remark) for remark in remarks))


def details(scores: GeometryScores, *, heads: bool = True) -> Table:
    """Every row of one model; without its heads if they are not wanted."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    several = len({(row.tower, row.kind) for row in scores}) > 1
    table = Table(
        title=Text(scores.model),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        caption="rows, columns: how many have an outstanding norm\n",
        caption_justify="left",
    )
    for name in (*(["attention"] if several else []), "layer", "head"):
        table.add_column(name)
    for name in ("symmetry", "directionality", "norm", "rows", "columns"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("flags")
    for row in scores if heads else (row for row in scores if row.head == "all"):
        where = [", ".join(filter(None, (row.tower, row.kind)))] if several else []
        numbers = (_number(row.symmetry), _number(row.directionality), f"{row.norm:.4g}")
        counts = (str(row.outlier_rows), str(row.outlier_columns))
        table.add_row(*where, str(row.layer), str(row.head), *numbers, *counts, ", ".join(row.flags))
    return table


def text(*parts: Group | Table) -> str:
    """What a terminal of 110 columns would show, without colours and without blanks at the ends of lines."""
    from rich.console import Console

    buffer = io.StringIO()
    Console(file=buffer, width=110, color_system=None, force_terminal=False).print(*parts, sep="\n")
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def _matrices(scores: GeometryScores, summary: Summary) -> str:
    several = len({(other.tower, other.kind) for other in scores.summaries}) > 1
    count = f"{summary.count} {'layers' if summary.matrix == 'all' else 'heads'}"
    return f"{summary.what}: {count}" if several else count


def _flags(scores: GeometryScores, summary: Summary) -> str:
    rows = [
        row
        for row in scores
        if (row.tower, row.kind, "all" if row.head == "all" else "head")
        == (summary.tower, summary.kind, summary.matrix)
    ]
    counts = Counter(flag for row in rows for flag in row.flags)
    listed = ", ".join(f"{count} flagged {flag!r}" for flag, count in counts.items())
    return f"of {_matrices(scores, summary)}, {listed}"


def _quartiles(quartiles: Quartiles) -> Text:
    from rich.text import Text

    return Text("none" if math.isnan(quartiles.median) else str(quartiles))


def _number(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:z.3f}"
