"""Texts that become entries: lines of a file, or keys with values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

SEPARATOR: Final = "\t"  # between the key of an entry, which is embedded, and its value


@dataclass(frozen=True)
class Record:
    """A text that becomes an entry."""

    text: str  # what it says; with a value, "key<tab>value", of which the key is embedded
    source: str | None = None  # where it comes from


def records(texts: Sequence[str], values: Sequence[str] | None = None, source: str | None = None) -> list[Record]:
    """Turn texts into records; with `values`, the texts are keys."""
    if values and len(values) != len(texts):
        raise ValueError(f"give one value for each text: got {len(values)} and {len(texts)}")
    if not all(text.strip() for text in texts):
        raise ValueError("a text is empty")
    return [Record(_keyed(*pair), source) for pair in zip(texts, values or [None] * len(texts), strict=True)]


def read_records(path: str | Path, source: str | None = None) -> list[Record]:
    """Read the lines of a text file, or JSON lines; a ValueError for an empty or malformed file."""
    file = Path(path).expanduser()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    numbered = [(f"{file.name}:{number}", line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError(f"{path} holds no text")
    if file.suffix.lower() in (".jsonl", ".ndjson"):
        return [_from_json(place, line, source) for place, line in numbered]
    return [Record(line, source or place) for place, line in numbered]


def readable(text: str | None) -> str:
    """Format an entry's text for people to read."""
    return (text or "(no text)").replace(SEPARATOR, " -> ")


def _keyed(key: str, value: str | None, place: str = "") -> str:
    if value is None:
        return key
    if SEPARATOR in key:
        raise ValueError(f"{place}{': ' if place else ''}a key cannot hold a tab, got {key!r}")
    return f"{key}{SEPARATOR}{value}"


def _from_json(place: str, line: str, source: str | None) -> Record:
    try:
        parsed = cast(object, json.loads(line))
    except ValueError as error:
        raise ValueError(f"{place} is no JSON: {error}") from error
    fields = cast("dict[str, object]", parsed) if isinstance(parsed, dict) else {}
    key = fields.get("key", fields.get("text"))
    value = fields.get("value", fields.get("text") if "key" in fields else None)
    where = fields.get("source", source or place)
    if not (isinstance(key, str) and key.strip() and isinstance(value, str | None) and isinstance(where, str | None)):
        raise ValueError(
            f'{place} must be an object with "text", or "key" and "value", and maybe "source", all strings'
        )
    return Record(_keyed(key, value, place), where)
