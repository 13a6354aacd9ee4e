"""Checks JSON that people write; each message names the place of the mistake."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, cast


def read_json(path: str | os.PathLike[str]) -> dict[str, object]:
    """Read the JSON object in a file, or in standard input for "-".

    Refuses, with `ValueError`, an unreadable file, repeated names, NaN, and anything but an object at the top.
    """
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start})") from error
    return parse_json(text, str(path))


def parse_json(text: str, where: str) -> dict[str, object]:
    """Parse a JSON object as `read_json` does; `where` names the text in messages."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply") from error
    return as_object(value, where)


def as_object(value: object, where: str) -> dict[str, object]:
    """Return `value` if it is a JSON object."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected a JSON object, got {kind_of(value)}")
    return dict(cast(Mapping[str, object], value))


def as_list(value: object, where: str) -> list[object]:
    """`value` if it is a JSON list."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where}: expected a list, got {kind_of(value)}")
    return list(cast(Sequence[object], value))


def as_integer(value: object, where: str) -> int:
    """`value` if it is a whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{where}: expected an integer, got {kind_of(value)}")
    return value


def as_number(value: object, where: str) -> float:
    """`value` if it is a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}: expected a number, got {kind_of(value)}")
    return float(value)


def as_text(value: object, where: str) -> str:
    """`value` if it is text."""
    if not isinstance(value, str):
        raise ValueError(f"{where} must be text, got {kind_of(value)}")
    return value


def only_keys(
    values: Mapping[str, object], where: str, required: Sequence[str] = (), optional: Sequence[str] = ()
) -> None:
    """Refuse missing and unknown names; a misspelt one would be ignored silently."""
    names = (*required, *optional)
    for name in values:
        if name not in names:
            raise ValueError(f"{where}: unknown name {name!r}{close_to(name, names)} (known: {', '.join(names)})")
    missing = [name for name in required if name not in values]
    if missing:
        raise ValueError(f"{where} lacks {' and '.join(missing)}; it has {', '.join(names)}")


def close_to(name: str, names: Iterable[str]) -> str:
    """End a message about an unknown name with ": did you mean ...?", or with nothing."""
    near = difflib.get_close_matches(name.lower().replace("-", "_"), list(names), n=2, cutoff=0.5)
    return f": did you mean {' or '.join(near)}?" if near else ""


def kind_of(value: object) -> str:
    """Describe a JSON value for a message."""
    if isinstance(value, Mapping | list | tuple):
        return "an object" if isinstance(value, Mapping) else "a list"
    return f"the text {value!r:.40}" if isinstance(value, str) else json.dumps(value, default=repr)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"the name {twice[0]!r} stands twice in one JSON object")
    return dict(pairs)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number that a spec may hold")
