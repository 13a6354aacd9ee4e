"""`attnflow knowledge trace MODEL TEXT`: which entries fire for a text, and what they do to the next token."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from attnflow.cli._output import BadUsage, JsonFlag, console, output_path, print_result, say, working


def knowledge_trace(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Any model: its feed-forward layers are opened as entries.")
    ],
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="The text to read.")] = None,
    ids: Annotated[
        str | None, typer.Option("--ids", metavar="LIST", help="Token ids such as 5,6,7, in place of TEXT.")
    ] = None,
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
    count: Annotated[int, typer.Option("--count", metavar="N", min=1, help="Entries listed.")] = 12,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help=".svg .png figure, .html, .csv, .json.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Show which entries fire.

    Lists, of all entries, those with the largest direct effects on the logit of the next token: what they add to it,
    less what they add to all tokens alike. Their words are their texts, or the tokens that they promote (+) or
    suppress (-).
    """
    from attnflow._core.errors import MissingExtra
    from attnflow.cli._knowledge import opened
    from attnflow.knowledge import attach, from_ffn, trace
    from attnflow.knowledge.hf.readers import reads_entries
    from attnflow.models import load_model

    inputs = _inputs(text, ids)
    path = None if output is None else output_path(output, (".svg", ".png", ".html", ".csv", ".json"))
    if path is not None and path.suffix.lower() in (".svg", ".png"):
        try:
            import matplotlib  # noqa: F401  (said before the work)
        except ImportError as error:
            raise MissingExtra("matplotlib", "report", "a trace as a figure") from error
    with ExitStack() as stack:
        held = None if store is None else stack.enter_context(opened(store, search="exact"))
        spinner = stack.enter_context(working(f"loading {model}"))
        loaded = load_model(model, tokenizer=ids is None)
        if not reads_entries(loaded.model):
            spinner("opening its feed-forward layers")
            loaded = loaded._replace(model=from_ffn(loaded))
        if held is not None:
            attach(loaded, held)
        spinner("tracing")
        layers = None if layer is None else [layer]
        result = trace(loaded, inputs, layers=layers, top=max(16, count), targets=_target(target))
        result = replace(result, model=model)
        row = result.row(position)
        if path is not None:
            spinner(f"writing {output}")
            result.save(path)
    if json_output:
        print_result(result)
        return
    screen = console()
    say(screen, model if store is None else f"{model} on {store}", "bold")
    say(screen, result.summary(row))
    say(screen, "")
    say(screen, result.table(position, count=count))
    if output is not None:
        say(screen, f"written: {output}")


def _inputs(text: str | None, ids: str | None) -> str | list[int]:
    """The text, or the token ids."""
    if (text is None) == (ids is None):
        raise BadUsage("give a TEXT or --ids, one of them")
    if ids is None:
        if not text:
            raise BadUsage("the text is empty: nothing can fire")
        return str(text)
    try:
        return [int(part) for part in ids.split(",")]
    except ValueError:
        raise BadUsage(f"--ids takes token ids with commas between them, such as 5,6,7, got {ids!r}") from None


def _target(word: str | None) -> str | int | None:
    """A token by its text, or by its id."""
    return int(word) if word is not None and word.isdecimal() else word
