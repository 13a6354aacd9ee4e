"""Texts that become entries: lines or paragraphs of a file, or keys with values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final, Literal, cast

Split = Literal["line", "paragraph"]

SEPARATOR: Final = "\t"  # between the key of an entry, which is embedded, and its value


@dataclass(frozen=True)
class Record:
    """A text that becomes an entry."""

    text: str  # what it says; with a value, "key<tab>value", of which the key is embedded
    source: str | None = None  # where it comes from

    @property
    def place(self) -> str:
        """The source, or else the first characters of the text."""
        return self.source or repr(self.text[:20])


def records(texts: Sequence[str], values: Sequence[str] | None = None, source: str | None = None) -> list[Record]:
    """Turn texts into records; with `values`, the texts are keys."""
    if values and len(values) != len(texts):
        raise ValueError(f"give one value for each text: got {len(values)} and {len(texts)}")
    if not all(text.strip() for text in texts):
        raise ValueError("a text is empty")
    return [Record(_keyed(*pair), source) for pair in zip(texts, values or [None] * len(texts), strict=True)]


def read_records(path: str | Path, split: Split = "line", source: str | None = None) -> list[Record]:
    """Read lines or paragraphs of a text file, or JSON lines; a ValueError for an empty or malformed file."""
    file = Path(path).expanduser()
    try:
        content = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    json_lines = file.suffix.lower() in (".jsonl", ".ndjson")
    parts = _parts(content, joined=split == "paragraph" and not json_lines)
    if json_lines:
        read = [_from_json(f"{file.name}:{i}", line, source) for i, line in parts]
    else:
        read = [Record(text, source or f"{file.name}:{i}") for i, text in parts]
    if not read:
        raise ValueError(f"{path} holds no text")
    return read


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


def _parts(content: str, joined: bool) -> Iterator[tuple[int, str]]:
    """Yield the non-empty lines, or the paragraphs if `joined`, each with its first line number."""
    numbered = [(i, line.strip()) for i, line in enumerate(content.splitlines(), 1)]
    if not joined:
        yield from (pair for pair in numbered if pair[1])
        return
    for filled, group in groupby(numbered, lambda pair: bool(pair[1])):
        if filled:
            numbers, lines = zip(*group, strict=True)
            yield numbers[0], " ".join(lines)
