"""`attnflow bias show MODEL`: what a learned bias does on one text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnflow.cli._output import JsonFlag, console, print_json, say, working


def bias_show(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The base model; or a saved bias, which names its base model.")
    ],
    bias: Annotated[
        Path | None,
        typer.Option("--bias", metavar="DIR", help="The bias, a folder that af.bias.save_pretrained wrote."),
    ] = None,
    text: Annotated[str | None, typer.Option("--text", help="The text to read (default: the paper's sum).")] = None,
    generate: Annotated[
        int | None, typer.Option("--generate", metavar="N", min=1, help="Generate N tokens, and look at those steps.")
    ] = None,
    layer: Annotated[int | None, typer.Option("--layer", metavar="N", min=0, help="One layer (default: all).")] = None,
    query: Annotated[
        int | None, typer.Option("--query", metavar="N", help="Position of a query (default: the last one, -1).")
    ] = None,
    head: Annotated[
        int | None, typer.Option("--head", metavar="N", min=0, help="One head (default: the mean).")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", metavar="N", min=1, help="Graph: the N strongest keys of each query.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option("--threshold", metavar="B", help="Graph: keys with a bias of at least B.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help=".svg .png figure, .html, .csv, .json, .dot.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Show what a bias does.

    Runs a model with and without its bias on one text, and shows which keys each layer draws a query to (+) and turns
    it away from (-): the row-centred bias, which is all that softmax sees. With --top-k or --threshold, a graph.
    """
    from attnflow.cli import _bias

    view = _bias.View(layer, query, head, top_k, threshold)
    target = None if output is None else _bias.target(output, view)
    with working(f"loading {model}") as spinner:
        found, name = _bias.look(model, bias, text, generate, view, spinner)
        if target is not None:
            spinner(f"writing {output}")
            _bias.write(found, view, target, name)
    if json_output:
        written = None if output is None else str(output)
        about = {"model": model, "bias": name, **_bias.facts(found, view), "written": written}
        print_json("attnflow.bias.show/1", about)
        return
    screen = console()
    say(screen, f"{model} with the bias {name}", "bold")
    for line in _bias.lines(found, view):
        say(screen, line)
    if output is not None:
        say(screen, f"written: {output}")
