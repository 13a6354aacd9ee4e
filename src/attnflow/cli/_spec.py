"""JSON files that describe a mask or a task; each mistake is named with the place where it stands."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, cast

from attnflow.cli._catalogue import Parameter, call, close_to, entries, find, make_mask, settings_from
from attnflow.cli._output import BadUsage

if TYPE_CHECKING:
    from attnflow.masks import Mask
    from attnflow.tasks import Task

_FORMS: Final = ("name", "intervals", "dense", "edges", "and", "or", "not")


def read_json(path: str) -> dict[str, object]:
    """The JSON object in the file `path`; "-" reads stdin.

    Raises:
        BadUsage: no such file, not UTF-8, not JSON, a name that stands twice, NaN, or no object at the top.
    """
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8-sig")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except OSError as error:
        raise BadUsage(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BadUsage(f"{path} is not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise BadUsage(f"{path} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise BadUsage(f"{path} is nested too deeply") from error
    return as_object(value, path)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadUsage(f"the name {twice[0]!r} stands twice in one JSON object")
    return dict(pairs)


def _no_constant(name: str) -> NoReturn:
    raise BadUsage(f"{name} is no number that a spec may hold")


def as_object(value: object, where: str) -> dict[str, object]:
    """`value` if it is a JSON object."""
    if not isinstance(value, dict):
        raise BadUsage(f"{where}: expected a JSON object, got {_kind(value)}")
    return cast(dict[str, object], value)


def as_list(value: object, where: str) -> list[object]:
    """`value` if it is a JSON list."""
    if not isinstance(value, list):
        raise BadUsage(f"{where}: expected a list, got {_kind(value)}")
    return cast(list[object], value)


def as_integer(value: object, where: str) -> int:
    """`value` if it is a whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadUsage(f"{where}: expected an integer, got {_kind(value)}")
    return value


def only_keys(spec: Mapping[str, object], known: Sequence[str], where: str) -> None:
    """Refuse names that mean nothing: a misspelt one would be ignored silently."""
    for name in spec:
        if name not in known:
            raise BadUsage(f"{where}: unknown name {name!r}{close_to(name, known)} (known: {', '.join(known)})")


def _kind(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return f"the text {value!r:.40}" if isinstance(value, str) else json.dumps(value)


def mask_from(spec: object, where: str) -> Mask:
    """The mask of a JSON mask spec.

    One of `{"name": "sliding_window", "parameters": {"n": 8, "window": 3}}`, `{"intervals": [[[0, 2]], ...]}`
    (per query, half-open), `{"dense": [[1, 0], [1, 1]]}` (or rows of text, "10"), `{"edges": [[q, k], ...],
    "num_queries": n}`; combined by `{"and": [...]}`, `{"or": [...]}`, `{"not": ...}`.
    """
    given = as_object(spec, where)
    forms = [form for form in _FORMS if form in given]
    if len(forms) != 1:
        found = f"got {' and '.join(forms)}" if forms else f"got {', '.join(given) or 'nothing'}"
        raise BadUsage(f"{where}: a mask has one of {', '.join(_FORMS)}; {found}")
    builders: dict[str, Callable[[dict[str, object], str], Mask]] = {
        "name": _named,
        "intervals": _intervals,
        "dense": _dense,
        "edges": _edges,
        "and": _combined,
        "or": _combined,
        "not": _combined,
    }
    return builders[forms[0]](given, where)


def _named(spec: dict[str, object], where: str) -> Mask:
    only_keys(spec, ("name", "parameters"), where)
    if not isinstance(spec["name"], str):
        raise BadUsage(f"{where}: name must be text, got {_kind(spec['name'])}")
    entry = find(spec["name"], entries(), f"{where}: mask", "`attnflow mask list` shows all")
    values = as_object(spec.get("parameters", {}), f"{where}.parameters")
    only_keys(values, [p.name for p in entry.parameters], f"{where}: {entry.signature}")
    missing = [p.name for p in entry.parameters if p.required and p.name not in values]
    if missing:
        raise BadUsage(f"{where}: {entry.signature} needs {' and '.join(missing)}")
    typed = {p.name: _typed(p, values[p.name], f"{where}: {p.name}") for p in entry.parameters if p.name in values}
    return _call(where, entry.function, typed)


def _typed(parameter: Parameter, value: object, where: str) -> object:
    if value is None and not parameter.required and parameter.default is None:
        return None
    if parameter.kind == "int":
        return parameter.bounded(as_integer(value, where))
    if parameter.kind == "ints":
        return [as_integer(item, where) for item in as_list(value, where)]
    if not isinstance(value, bool if parameter.kind == "bool" else str):
        raise BadUsage(
            f"{where}: expected {'true or false' if parameter.kind == 'bool' else 'text'}, got {_kind(value)}"
        )
    return value


def _intervals(spec: dict[str, object], where: str) -> Mask:
    from attnflow.masks import from_intervals

    only_keys(spec, ("intervals", "num_keys"), where)
    rows = [
        [_pair(pair, f"{where}.intervals[{q}]") for pair in as_list(row, f"{where}.intervals[{q}]")]
        for q, row in enumerate(as_list(spec["intervals"], f"{where}.intervals"))
    ]
    return _call(where, from_intervals, {"rows": rows, **_sizes(spec, where, "num_keys")})


def _edges(spec: dict[str, object], where: str) -> Mask:
    from attnflow.masks import from_edges

    only_keys(spec, ("edges", "num_queries", "num_keys"), where)
    if "num_queries" not in spec:
        raise BadUsage(f"{where}: edges need num_queries")
    pairs = [_pair(pair, f"{where}.edges[{i}]") for i, pair in enumerate(as_list(spec["edges"], f"{where}.edges"))]
    return _call(where, from_edges, {"edges": pairs, **_sizes(spec, where, "num_queries", "num_keys")})


def _dense(spec: dict[str, object], where: str) -> Mask:
    import torch

    from attnflow.masks import from_dense

    only_keys(spec, ("dense",), where)
    rows = [_bits(row, f"{where}.dense[{q}]") for q, row in enumerate(as_list(spec["dense"], f"{where}.dense"))]
    for q, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise BadUsage(f"{where}.dense[{q}]: expected {len(rows[0])} entries like row 0, got {len(row)}")
    table = torch.tensor(rows, dtype=torch.bool).reshape(len(rows), len(rows[0]) if rows else 0)
    return _call(where, from_dense, {"allow": table})


def _bits(row: object, where: str) -> list[bool]:
    entries = list(row) if isinstance(row, str) else as_list(row, where)
    values = {"0": False, "1": True}
    for k, entry in enumerate(entries):
        if str(entry) not in values and not isinstance(entry, bool):
            raise BadUsage(f"{where}[{k}]: expected 0, 1, true or false, got {_kind(entry)}")
    return [entry if isinstance(entry, bool) else values[str(entry)] for entry in entries]


def _combined(spec: dict[str, object], where: str) -> Mask:
    sign = next(iter(spec))
    only_keys(spec, (sign,), where)
    if sign == "not":
        return ~mask_from(spec[sign], f"{where}.not")
    parts = [mask_from(part, f"{where}.{sign}[{i}]") for i, part in enumerate(as_list(spec[sign], f"{where}.{sign}"))]
    if not parts:
        raise BadUsage(f"{where}.{sign}: expected at least one mask")
    result = parts[0]
    for part in parts[1:]:
        if part.shape != result.shape:
            raise BadUsage(f"{where}.{sign}: masks of different shapes: {result.shape} and {part.shape}")
        result = result & part if sign == "and" else result | part
    return result


def _pair(value: object, where: str) -> tuple[int, int]:
    items = as_list(value, where)
    if len(items) != 2:
        raise BadUsage(f"{where}: expected a pair of integers, got {len(items)} entries")
    return as_integer(items[0], where), as_integer(items[1], where)


def _sizes(spec: Mapping[str, object], where: str, *names: str) -> dict[str, object]:
    return {name: as_integer(spec[name], f"{where}.{name}") for name in names if name in spec}


def _call(where: str, function: Callable[..., Mask], values: Mapping[str, object]) -> Mask:
    try:
        return call(function, values)
    except BadUsage as error:
        raise BadUsage(f"{where}: {error}") from error


def mask_argument(name: str, n: int | None, settings: Sequence[str]) -> Mask:
    """The mask that a command names: one of the catalogue, or a file (`.json`, or "-" for stdin).

    A file may hold a mask spec or a task spec, whose mask is then taken.
    """
    if name != "-" and not name.endswith(".json"):
        return make_mask(name, n, settings_from(settings))
    if n is not None or settings:
        raise BadUsage(f"--n and --set belong to masks of the catalogue; {name} is a file that says it all")
    spec = read_json(name)
    return mask_from(spec.get("mask", spec), name)


def task_argument(path: str) -> Task:
    """The task in a JSON file, or on stdin for "-"."""
    return task_from(read_json(path), path)


def task_from(spec: dict[str, object], where: str) -> Task:
    """The task of a JSON spec: the format of `attnflow.tasks.spec`, with every form of mask that `mask_from` knows."""
    from attnflow.tasks import Task

    given = {**spec, "mask": mask_from(spec["mask"], f"{where}: mask")} if "mask" in spec else spec
    try:
        return Task.from_dict(given)
    except (ValueError, TypeError) as error:
        raise BadUsage(f"{where}: {error}") from error
