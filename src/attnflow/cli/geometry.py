"""`attnflow geometry MODEL...`: symmetry and directionality of the attention of checkpoints."""

from __future__ import annotations

import sys
from typing import Annotated, Final, Literal

import typer

from attnflow.cli._arguments import OutputOption, settings_from
from attnflow.cli._models import require
from attnflow.cli._output import BadUsage, JsonFlag, console, output_path, print_result, save_picture, say, working

_SUFFIXES: Final = (".svg", ".png", ".html", ".csv", ".json")


def geometry(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="smollm2-135m, minilm, folders, files or hub ids.")
    ],
    per_head: Annotated[bool, typer.Option("--per-head", help="Score each head, too, and list them.")] = False,
    attention: Annotated[
        Literal["self", "cross", "all"], typer.Option("--attention", help="Which attention.")
    ] = "self",
    gamma: Annotated[
        float, typer.Option("--gamma", help="Standard deviations above the mean from which a norm is outstanding.")
    ] = 2.0,
    mode: Annotated[
        Literal["excess", "norm"],
        typer.Option("--mode", help="Sum by how much norms exceed the threshold, or the norms."),
    ] = "excess",
    config: Annotated[
        list[str] | None,
        typer.Option("--config", metavar="NAME=N", help="What config.json lacks, as in num_attention_heads=12."),
    ] = None,
    output: OutputOption = None,
    picture: Annotated[
        Literal["plane", "layers", "heads"], typer.Option("--picture", help="What an .svg or .png shows.")
    ] = "plane",
    json_output: JsonFlag = False,
) -> None:
    """Score the geometry of models.

    Symmetry and directionality of W_q^T W_k in every layer, with medians and quartiles; only queries and keys are read,
    one layer at a time. -o writes .svg or .png, .html, .csv or .json. Goes on past a model that cannot be scored, and
    then exits with 1, or 2 if none could.
    """
    target = None if output is None else output_path(output, _SUFFIXES, "scores as a figure")
    drawn = target is not None and target.suffix.lower() in (".svg", ".png")
    if drawn and picture == "heads" and len(set(models)) > 1:
        raise BadUsage(f"--picture heads shows one model, got {len(set(models))}; an .html report shows them all")
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
        from attnflow.report import figure

        result = survey(models, gamma, mode, heads, attention, config=overrides, progress=spinner)
        if target is not None and result.models:
            spinner.stage(f"writing {output}")
            if drawn:
                save_picture(figure(result, picture=picture), target)
            else:
                result.save(target)
    if json_output and result.models:
        print_result(result)
    elif result.models:
        from attnflow.report.geometry import details, overview

        screen = console()
        width = screen.width if screen.is_terminal else 110  # with room for the names of models
        listed = result.models if per_head or len(result.models) == 1 else ()
        parts = [*(details(model, heads=per_head, width=width) for model in listed), overview(result.models, width)]
        say(screen, "\n\n".join(parts) + ("" if output is None else f"\nwritten: {output}"))
    for name, reason in result.unscored.items():
        print(f"attnflow: {name}: {reason}", file=sys.stderr)
    raise typer.Exit(0 if result.ok else 1 if result.models else 2)
