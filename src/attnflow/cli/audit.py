"""`attnflow audit MODEL`: does information flow against the order that a model declares?"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from attnflow.cli._output import JsonFlag, console, print_json, say, working


class Mode(StrEnum):
    """How the model is asked."""

    perturb = "perturb"
    vjp = "vjp"


def audit(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="smollm2-135m, minilm, a folder, a GGUF file or a hub id.")
    ],
    text: Annotated[str | None, typer.Option("--text", help="The text to read (default: Shakespeare).")] = None,
    ids: Annotated[str | None, typer.Option("--ids", metavar="5,6,7", help="Token ids in place of a text.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=2, help="Read at most so many tokens.")] = 64,
    order: Annotated[
        str | None,
        typer.Option("--order", metavar="MASK", help="causal, full or a JSON file (default: what the model declares)."),
    ] = None,
    mode: Annotated[Mode, typer.Option("--mode", help="Change inputs, or pull gradients back.")] = Mode.perturb,
    passes: Annotated[int, typer.Option("--passes", metavar="N", min=1, help="Inputs to change.")] = 32,
    cache: Annotated[bool, typer.Option("--cache", help="Also audit decoding with the cache.")] = False,
    double: Annotated[bool, typer.Option("--float64", help="Audit in float64, which sees weaker leaks.")] = False,
    json_output: JsonFlag = False,
) -> None:
    """Audit a model for leaks.

    Changes inputs and watches the output of every module: what moves although the order keeps it apart is a leak,
    shown with the layer and module where it starts. Exits with 1 if there is one.
    """
    from attnflow.cli import _audits, _models

    with working(f"loading {model}") as spinner:
        loaded = _models.load(model, tokenizer=ids is None)
        given = loaded.ids(text, ids, tokens)
        found = _audits.run(loaded, given, order, mode.value, passes, cache, double, spinner)
    if json_output:
        report = {"model": model, "architecture": type(loaded.model).__name__, "token_ids": given, **found.to_dict()}
        print_json("attnflow.audit/1", report)
    else:
        screen = console()
        say(screen, loaded.line, "bold")
        if screen.is_terminal:
            screen.print(found)
        else:  # with room for the names of modules
            print(found)
    raise typer.Exit(0 if found.ok else 1)
