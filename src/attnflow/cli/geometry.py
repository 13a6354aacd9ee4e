"""`attnflow geometry MODEL...`: score the symmetry and directionality of the attention of checkpoints."""

from __future__ import annotations

import math
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from attnflow._core.markup import aligned
from attnflow.cli._arguments import OutputOption, require, settings_from
from attnflow.cli._output import BadUsage, JsonFlag, console, output_path, print_result, say, working, write

if TYPE_CHECKING:
    from attnflow.geometry.published import Summary
    from attnflow.geometry.table import GeometryScores

_SUFFIXES: Final = (".svg", ".png", ".html", ".csv", ".json")
_WIDTH: Final = 110


def geometry(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="One or more: smollm2-135m, minilm, folders, files, hub ids.")
    ],
    per_head: Annotated[bool, typer.Option("--per-head", help="Also score and list each head.")] = False,
    attention: Annotated[
        Literal["self", "cross", "all"], typer.Option("--attention", help="Which attention to score.")
    ] = "self",
    gamma: Annotated[
        float, typer.Option("--gamma", help="A norm counts when this many standard deviations above the mean.")
    ] = 2.0,
    mode: Annotated[
        Literal["excess", "norm"],
        typer.Option("--mode", help="What is summed: the excess over the threshold, or the whole norm."),
    ] = "excess",
    config: Annotated[
        list[str] | None,
        typer.Option("--config", metavar="NAME=N", help="Supply what config.json lacks: num_attention_heads=12."),
    ] = None,
    output: OutputOption = None,
    picture: Annotated[
        Literal["plane", "layers", "heads"], typer.Option("--picture", help="What to draw in an .svg or .png.")
    ] = "plane",
    json_output: JsonFlag = False,
) -> None:
    """Score symmetry and directionality of attention.

    Scores W_q^T W_k in every layer and prints medians and quartiles. It reads only query and key weights, one layer at
    a time. -o writes .svg, .png, .html, .csv or .json. A model that cannot be scored is skipped with a message; the
    exit code is then 1, or 2 if no model could be scored.
    """
    target = None if output is None else output_path(output, _SUFFIXES, "scores as a figure")
    drawn = target is not None and target.suffix.lower() in (".svg", ".png")
    if drawn and picture == "heads" and len(set(models)) > 1:
        raise BadUsage(f"--picture heads shows one model, got {len(set(models))}: write .html to see them all")
    heads = per_head or picture == "heads" or (target is not None and target.suffix.lower() == ".html")
    if len(set(models)) == 1:
        require(models[0])
    overrides: dict[str, int] = {}
    for name, text in settings_from(config or [], "--config").items():
        try:
            overrides[name] = int(text)
        except ValueError:
            raise BadUsage(f"--config {name}=... must be a whole number, got {text!r}") from None
    with working(f"opening {models[0]}") as spinner:
        from attnflow.geometry.score import survey

        result = survey(models, gamma, mode, heads, attention, config=overrides, progress=spinner)
        if target is not None and result.models:
            spinner.stage(f"writing {output}")
            write(result, target, picture=picture)
    if json_output and result.models:
        print_result(result)
    elif result.models:
        screen = console()
        listed = result.models if per_head or len(result.models) == 1 else ()
        parts = [*(_details(model, heads=per_head) for model in listed), _overview(result.models)]
        say(screen, "\n\n".join(parts) + ("" if output is None else f"\nwritten: {output}"))
    for name, reason in result.unscored.items():
        print(f"attnflow: {name}: {reason}", file=sys.stderr)
    raise typer.Exit(0 if result.ok else 1 if result.models else 2)


def _overview(models: Sequence[GeometryScores]) -> str:
    """Describes several models: medians, quartiles, what was left out, and the published numbers."""
    from attnflow.geometry.table import IGNORED
    from attnflow.report.geometry import rows_of

    rows: list[list[str]] = []
    for scores in models:
        for index, one in enumerate(scores.summaries):
            quartiles = ("none" if math.isnan(q.median) else str(q) for q in (one.symmetry, one.directionality))
            rows.append(["" if index else scores.model, _matrices(scores, one), *quartiles])
    head = ["model", "matrices", "symmetry", "directionality"]
    readings = sorted({f"gamma {scores.gamma:g} and mode {scores.mode}" for scores in models})
    remarks = [f"Median [quartiles]. Directionality uses {', '.join(readings)}. Ignored: {IGNORED}."]
    for scores in models:
        for one in (each for each in scores.summaries if each.flagged):
            counts = Counter(flag for row in rows_of(scores, one) for flag in row.flags)
            listed = ", ".join(f"{count} flagged {flag!r}" for flag, count in counts.items())
            remarks.append(f"{scores.model}: of {_matrices(scores, one)}, {listed}")
        remarks += [f"{scores.model}: {note}" for note in scores.notes]
        remarks += [str(comparison) for comparison in scores.compare()]
    wrapped = [textwrap.fill(line, _WIDTH, break_long_words=False, break_on_hyphens=False) for line in remarks]
    return "\n".join([aligned([head, *rows], left=range(4)), "", *wrapped])


def _details(scores: GeometryScores, *, heads: bool) -> str:
    from attnflow.report.geometry import has_several

    several = has_several(scores)
    head = [*(["attention"] if several else []), "layer", "head", "symmetry", "directionality", "norm"]
    table = [[*head, "rows", "columns", "flags"]]
    for row in scores if heads else (row for row in scores if row.head == "all"):
        where = [", ".join(filter(None, (row.tower, row.kind)))] if several else []
        numbers = (_number(row.symmetry), _number(row.directionality), f"{row.norm:.4g}")
        counts = [str(row.outlier_rows), str(row.outlier_columns)]
        table.append([*where, str(row.layer), str(row.head), *numbers, *counts, ", ".join(row.flags)])
    lines = aligned(table, left=[*range(len(table[0]) - 6), len(table[0]) - 1])
    legend = f"rows, columns: how many have a norm more than {scores.gamma:g} standard deviations above the mean"
    return "\n".join([scores.model, "", lines, "", legend])


def _matrices(scores: GeometryScores, summary: Summary) -> str:
    from attnflow.report.geometry import has_several

    count = f"{summary.count} {'layers' if summary.matrix == 'all' else 'heads'}"
    return f"{summary.what}: {count}" if has_several(scores) else count


def _number(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:z.3f}"
