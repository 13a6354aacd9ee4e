"""`attnflow geometry MODEL...`: symmetry and directionality of the attention of checkpoints."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attnflow.cli._output import JsonFlag, console, print_json, say, working


class Mode(StrEnum):
    """What directionality sums up."""

    excess = "excess"
    norm = "norm"


class Attention(StrEnum):
    """Which attention is scored."""

    self = "self"
    cross = "cross"
    all = "all"


class Picture(StrEnum):
    """What a figure shows."""

    plane = "plane"
    layers = "layers"
    heads = "heads"


def geometry(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="smollm2-135m, minilm, folders, files or hub ids.")
    ],
    per_head: Annotated[bool, typer.Option("--per-head", help="Score each head, too, and list them.")] = False,
    attention: Annotated[Attention, typer.Option("--attention", help="Which attention.")] = Attention.self,
    gamma: Annotated[
        float, typer.Option("--gamma", help="Standard deviations above the mean from which a norm is outstanding.")
    ] = 2.0,
    mode: Annotated[
        Mode, typer.Option("--mode", help="Sum by how much norms exceed the threshold, or the norms.")
    ] = Mode.excess,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Also write .svg, .png, .html or .csv.")
    ] = None,
    picture: Annotated[Picture, typer.Option("--picture", help="What an .svg or .png shows.")] = Picture.plane,
    json_output: JsonFlag = False,
) -> None:
    """Score the geometry of models.

    Symmetry and directionality of W_q^T W_k in every layer, with medians and quartiles; only queries and keys are read,
    one layer at a time. Goes on past a model that cannot be scored, and then exits with 1, or 2 if none could.
    """
    from attnflow.cli import _scores

    target = None if output is None else _scores.target(output, picture.value, models)
    heads = per_head or picture is Picture.heads or (target is not None and target.suffix.lower() == ".html")
    with working(f"opening {models[0]}") as spinner:
        found = _scores.run(models, gamma, mode.value, heads, attention.value, spinner)
        if target is not None and found.models:
            spinner(f"writing {output}")
            _scores.write(found, target, picture.value)
    written = None if target is None or not found.models else str(output)
    if json_output and found.models:
        scored = [model.to_dict() for model in found.models]
        print_json("attnflow.geometry/1", {"models": scored, "unscored": found.unscored, "written": written})
    elif found.models:
        from attnflow.report.score_text import details, overview

        screen = console()
        width = screen.width if screen.is_terminal else 110  # with room for the names of models
        listed = found.models if per_head or len(found.models) == 1 else ()
        parts = [*(details(model, heads=per_head, width=width) for model in listed), overview(found.models, width)]
        print("\n\n".join(parts))
        if written:
            say(screen, f"written: {written}")
    for name, reason in found.unscored.items():
        print(f"attnflow: {name}: {reason}", file=sys.stderr)
    raise typer.Exit(0 if not found.unscored else 1 if found.models else 2)
