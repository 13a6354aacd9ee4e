"""`attnflow knowledge build STORE FILE`: a new store of texts, or of a model's feed-forward entries."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attnflow.cli._output import BadUsage, JsonFlag, console, print_json, say, working


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
    from attnflow.cli import _knowledge

    if (file is None) == (from_model is None):
        raise BadUsage("give a FILE or --from-model, one of them")
    with working("reading") as spinner:
        if file is not None:
            done = _knowledge.build(store, file, encoder, split.value, spinner)
        else:
            spinner(f"loading {from_model}")
            done = _knowledge.build_from_model(store, str(from_model), spinner)
    if json_output:
        print_json("attnflow.knowledge.build/1", asdict(done))
        return
    say(console(), done.line)
