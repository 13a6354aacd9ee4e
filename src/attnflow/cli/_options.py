"""Arguments and options that several commands share, and what their texts mean."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from attnflow.cli._output import BadUsage

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="smollm2-135m, minilm, a folder, a GGUF file or a hub id.")
]
TextOption = Annotated[str | None, typer.Option("--text", help="The text to read (default: Shakespeare).")]
OutputOption = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Also write a file.")]


def integers(text: str, option: str) -> list[int]:
    """The integers of `5,6,7`."""
    try:
        return [int(item) for item in text.strip().removeprefix("[").removesuffix("]").split(",")]
    except ValueError:
        raise BadUsage(
            f"{option} must be integers with commas between them, such as {option} 0,2,5, got {text}"
        ) from None


def settings_from(texts: Iterable[str], option: str = "--set") -> dict[str, str]:
    """`["window=4", "causal=false"]` as a dict; every name once."""
    values: dict[str, str] = {}
    for text in texts:
        name, sign, value = (part.strip() for part in text.partition("="))
        if not sign or not name:
            raise BadUsage(f"{option} takes NAME=VALUE, such as {option} window=4, got {text!r}")
        if name in values:
            raise BadUsage(f"{option} {name}=... is given twice")
        values[name] = value
    return values
