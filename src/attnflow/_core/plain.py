"""Checks JSON written by hand; each message names the place of the mistake."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from attnflow._core.files import to_read


def read_json(path: str | os.PathLike[str]) -> dict[str, object]:
    """Read the JSON object in a file, or for "-" in standard input; refuse repeated names and NaN."""
    try:
        text = sys.stdin.read() if path == "-" else to_read(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start})") from error
    return parse_json(text, str(path))


def parse_json(text: str, where: str) -> dict[str, object]:
    """Parse a JSON object like `read_json`; `where` names the text in messages."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except ValueError as error:  # a name that stands twice, or an integer of more than 4,300 digits
        raise ValueError(f"{where}: {str(error).split(';')[0]}") from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply") from error
    return as_object(value, where)


def expect(value: object, where: str, kinds: type | tuple[type, ...], what: str) -> Any:
    """Return `value` if it has one of the types `kinds`; True and False count as bool only, not as int."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise ValueError(f"{where}: expected {what}, got {kind_of(value)}")
    return value


def as_object(value: object, where: str) -> dict[str, object]:
    return dict(expect(value, where, Mapping, "a JSON object"))


def as_list(value: object, where: str) -> list[object]:
    return list(expect(value, where, (list, tuple), "a list"))


def as_integer(value: object, where: str) -> int:
    return expect(value, where, int, "an integer")


def as_number(value: object, where: str) -> float:
    return float(expect(value, where, (int, float), "a number"))


def as_text(value: object, where: str) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"{where} must be text, got {kind_of(value)}")


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
    if isinstance(value, Mapping | list | tuple):
        return "an object" if isinstance(value, Mapping) else "a list"
    return f"the text {value!r:.40}" if isinstance(value, str) else json.dumps(value, default=repr)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"the name {twice[0]!r} appears twice in one JSON object")
    return dict(pairs)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed in JSON: write a finite number")
