"""`attnflow knowledge trace MODEL TEXT`: which entries fire for a text, and what they do to the next token."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnflow.cli._output import JsonFlag, console, print_json, say, working


def knowledge_trace(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Any model: its feed-forward layers are opened as entries.")
    ],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text to read.")],
    store: Annotated[
        str | None, typer.Option("--store", metavar="STORE", help="Read the entries, and their texts, from a store.")
    ] = None,
    layer: Annotated[int | None, typer.Option("--layer", metavar="N", min=0, help="One layer (default: all).")] = None,
    position: Annotated[
        int, typer.Option("--position", metavar="N", help="The token whose entries are listed (default: the last).")
    ] = -1,
    target: Annotated[
        str | None, typer.Option("--target", metavar="TOKEN", help="Effects on this token (default: the next one).")
    ] = None,
    top: Annotated[
        int | None,
        typer.Option("--top", metavar="N", min=1, help="Entries kept for each token and layer (default: 16 or more)."),
    ] = None,
    count: Annotated[int, typer.Option("--count", metavar="N", min=1, help="Entries listed.")] = 12,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help=".svg .png figure, .html, .csv, .json.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Show which entries fire.

    Lists the entries with the largest direct effects on the logit of the next token: what they add to it, less what
    they add to all tokens alike. Their words are their texts, or the tokens that they promote (+) or suppress (-).
    """
    from attnflow.cli import _traces

    view = _traces.View(layer, position, max(16, count) if top is None else top, count, target)
    path = None if output is None else _traces.target_path(output)
    with working(f"loading {model}") as spinner:
        found = _traces.look(model, text, store, view, spinner)
        if path is not None:
            spinner(f"writing {output}")
            _traces.write(found, view, path, store)
    if json_output:
        written = None if output is None else str(output)
        about = {"model": model, "store": store, **_traces.facts(found, view), "written": written}
        print_json("attnflow.knowledge.trace.show/1", about)
        return
    screen = console()
    say(screen, model if store is None else f"{model} on {store}", "bold")
    for line in _traces.lines(found, view):
        say(screen, line)
    if output is not None:
        say(screen, f"written: {output}")
