"""`attnflow knowledge build STORE FILE`: a new store of texts, or of a model's feed-forward entries."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attnflow.cli._models import require
from attnflow.cli._output import BadUsage, JsonFlag, console, print_result, say, working


class Split(StrEnum):
    """What of a text file is one entry."""

    line = "line"
    paragraph = "paragraph"


def knowledge_build(
    store: Annotated[str, typer.Argument(metavar="STORE", help="A new folder, milvus:FILE.db or milvus:http://HOST.")],
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A text file, or .jsonl with text, or key and value; source.")
    ] = None,
    from_model: Annotated[
        str | None, typer.Option("--from-model", metavar="MODEL", help="Its feed-forward entries, in place of FILE.")
    ] = None,
    encoder: Annotated[
        str, typer.Option("--encoder", metavar="MODEL", help="What embeds texts: minilm, a folder or a hub id.")
    ] = "minilm",
    split: Annotated[Split, typer.Option("--split", help="What of a text file is one entry.")] = Split.line,
    json_output: JsonFlag = False,
) -> None:
    """Build a store.

    Each line of a text file becomes an entry with its embedding; in "key<tab>value" only the key is embedded. If it is
    interrupted, the same command goes on where it was.
    """
    if (file is None) == (from_model is None):
        raise BadUsage("give a FILE or --from-model, one of them")
    require(encoder if from_model is None else from_model)
    from attnflow.cli._knowledge import durable, note_truncated, shown
    from attnflow.knowledge import texts
    from attnflow.knowledge.store.backends import check_uri

    durable(store)
    check_uri(store)
    with working(f"reading {file or from_model}") as spinner:
        if file is not None:
            written = texts.build(store, file, encoder, split=split.value, progress=shown(spinner, "embedding"))
        else:
            written = texts.build_from_model(store, str(from_model), progress=shown(spinner, "writing"))
    note_truncated(written.truncated, written.entries)
    if json_output:
        print_result(written)
        return
    say(console(), str(written))
