"""Scores as tables for the terminal."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Sequence

from attnflow._core.markup import aligned
from attnflow.geometry.summary import Quartiles, Summary
from attnflow.geometry.table import IGNORED, GeometryScores


def overview(models: Sequence[GeometryScores], width: int = 110) -> str:
    """Medians and quartiles of several models as one table for a terminal, what it leaves out, how it compares.

    Args:
        models: what to list.
        width: of the terminal; a table that is wider becomes a list.
    """
    rows = [
        [
            scores.model if index == 0 else "",
            _matrices(scores, one),
            _quartiles(one.symmetry),
            _quartiles(one.directionality),
        ]
        for scores in models
        for index, one in enumerate(scores.summaries)
    ]
    head = ["model", "matrices", "symmetry", "directionality"]
    table = aligned([head, *rows], left=range(4))
    if max(map(len, table.splitlines())) > width:
        lines: list[str] = []
        for model, matrices, symmetry, directionality in rows:
            lines += [model] if model else []
            lines += [
                f"  {matrices}",
                f"    symmetry        {symmetry}",
                f"    directionality  {directionality}",
            ]
        table = "\n".join(lines)
    readings = sorted({f"gamma {scores.gamma:g} and mode {scores.mode}" for scores in models})
    remarks = [f"Median [quartiles]. Directionality has {', '.join(readings)}. Ignored: {IGNORED}."]
    for scores in models:
        remarks += [f"{scores.model}: {_flags(scores, one)}" for one in scores.summaries if one.flagged]
        remarks += [f"{scores.model}: {note}" for note in scores.notes]
        remarks += [str(comparison) for comparison in scores.compare()]
    wrapped = [textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in remarks]
    return "\n".join([table, "", *wrapped])


def details(scores: GeometryScores, *, heads: bool = True, width: int = 110) -> str:
    """Every row of one model as a table for a terminal; without its heads if they are not wanted.

    A terminal of less than 80 columns has no room for the counts of outstanding rows and columns.
    """
    counted = width >= 80
    several = len({(row.tower, row.kind) for row in scores}) > 1
    head = [*(["attention"] if several else []), "layer", "head", "symmetry", "directionality", "norm"]
    table = [[*head, *(["rows", "columns"] if counted else []), "flags"]]
    for row in scores if heads else (row for row in scores if row.head == "all"):
        where = [", ".join(filter(None, (row.tower, row.kind)))] if several else []
        numbers = (_three(row.symmetry), _three(row.directionality), f"{row.norm:.4g}")
        counts = [str(row.outlier_rows), str(row.outlier_columns)] if counted else []
        table.append([*where, str(row.layer), str(row.head), *numbers, *counts, ", ".join(row.flags)])
    words = len(table[0]) - (6 if counted else 4)
    lines = aligned(table, left=[*range(words), len(table[0]) - 1])
    return "\n".join([scores.model, "", lines, *(["", "rows, columns: how many have an outstanding norm"] * counted)])


def _matrices(scores: GeometryScores, summary: Summary) -> str:
    several = len({(other.tower, other.kind) for other in scores.summaries}) > 1
    count = f"{summary.count} {'layers' if summary.matrix == 'all' else 'heads'}"
    return f"{summary.what}: {count}" if several else count


def _flags(scores: GeometryScores, summary: Summary) -> str:
    group = (summary.tower, summary.kind, summary.matrix == "all")
    rows = [row for row in scores if (row.tower, row.kind, row.head == "all") == group]
    counts = Counter(flag for row in rows for flag in row.flags)
    listed = ", ".join(f"{count} flagged {flag!r}" for flag, count in counts.items())
    return f"of {_matrices(scores, summary)}, {listed}"


def _three(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:z.3f}"


def _quartiles(quartiles: Quartiles) -> str:
    return "none" if math.isnan(quartiles.median) else str(quartiles)
