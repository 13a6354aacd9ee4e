"""`attnflow knowledge reembed STORE`: embed anew what another encoder version made."""

from __future__ import annotations

import warnings
from typing import Annotated

import typer

from attnflow.cli._output import JsonFlag, console, print_result, say, working


def knowledge_reembed(
    store: Annotated[str, typer.Argument(metavar="STORE", help="A store of texts.")],
    encoder: Annotated[
        str | None, typer.Option("--encoder", metavar="MODEL", help="Default: the one that made the entries, as it is.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Embed entries anew.

    Those that another encoder version made, from their texts, batch by batch. If it is interrupted, the same command
    goes on where it was.
    """
    from attnflow.cli._knowledge import opened, shown
    from attnflow.knowledge import TextEncoder, reembed

    with (
        working(f"opening {store}") as spinner,
        opened(store, read_only=False, search="exact") as held,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # texts that are too long were reported when they were written
        now = TextEncoder.of(held, encoder, current=True)
        done = reembed(held, now, progress=shown(spinner, "embedding"))
    if json_output:
        print_result(done)
        return
    say(console(), f"{store}: {done}")
