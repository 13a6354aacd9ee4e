"""Tasks as plain data: what `attnflow mask check SPEC.json` reads and `Task.to_dict` writes.

    {"version": 1,
     "inputs": [5, {"id": 7, "position": 1, "provenance": [1]}, {"id": [5, 9], "position": 1, "provenance": [0, 2]}],
     "labels": [{"position": 0, "target": {"id": 7, "position": 1, "provenance": [1]}, "task": 0, "weight": 1.0}],
     "mask": {"name": "causal", "parameters": {"n": 3}}}

An input that is a bare number stands for the data token at that place. `provenance` is by default the token's own
position; `task` and `weight` are by default 0 and 1. The mask is one of `{"name", "parameters"}` (a catalogue mask),
`{"intervals": [[[start, end], ...], ...]}` (half-open, per query), `{"dense": [[0, 1], ...]}`, or a `Mask`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar, cast

import torch

from attnflow import masks
from attnflow._core.checks import integer
from attnflow.masks import Mask
from attnflow.tasks.task import Label, Task, Token

_Built = TypeVar("_Built")
VERSION: Final = 1
_CATALOGUE: Final = frozenset(
    name for name in masks.__all__ if name not in ("IntervalRows", "Mask") and not name.startswith("from_")
)


def task_to_dict(task: Task) -> dict[str, object]:
    """The task as plain data."""
    return {
        "version": VERSION,
        "inputs": [token_to_dict(token) for token in task.inputs],
        "labels": [
            {"position": e.position, "target": token_to_dict(e.target), "task": e.task, "weight": e.weight}
            for e in task.labels
        ],
        "mask": mask_to_dict(task.mask),
    }


def token_to_dict(token: Token) -> dict[str, object]:
    """The token as plain data."""
    identity = list(token.id) if isinstance(token.id, tuple) else token.id
    return {"id": identity, "position": token.position, "provenance": sorted(token.provenance)}


def mask_to_dict(mask: Mask) -> dict[str, object]:
    """The mask by its catalogue name where that gives it back, by row intervals otherwise."""
    if mask.name in _CATALOGUE:
        parameters = {k: list(v) if isinstance(v, tuple) else v for k, v in mask.parameters.items()}
        if _catalogue_mask(mask.name, parameters) == mask:
            return {"name": mask.name, "parameters": parameters}
    rows = mask.intervals()
    return {"intervals": [[list(pair) for pair in rows.row(query)] for query in range(mask.num_queries)]}


def task_from_dict(spec: Mapping[str, object]) -> Task:
    """The task of plain data.

    Raises:
        ValueError: a part is missing, unknown or malformed; the message says where it stands.
        TypeError: a part is of the wrong kind.
    """
    values = _keys(spec, "task", required=("inputs", "labels", "mask"), optional=("version",))
    version = values.get("version", VERSION)
    if version != VERSION:
        raise ValueError(f"task: this release reads version {VERSION}, got version {version!r}")
    inputs = [_at(f"inputs[{i}]", _input, item, i) for i, item in enumerate(_list(values["inputs"], "inputs"))]
    labels = [_at(f"labels[{i}]", _label, item) for i, item in enumerate(_list(values["labels"], "labels"))]
    return Task(inputs, labels, _at("mask", _mask, values["mask"], len(inputs)))


def _input(item: object, index: int) -> Token:
    return _token(item) if isinstance(item, Mapping) else Token(integer("id", item), position=index)


def _token(item: object) -> Token:
    values = _keys(item, "token", required=("id", "position"), optional=("provenance",))
    identity, provenance = values["id"], values.get("provenance")
    return Token(
        cast(list[int], identity) if isinstance(identity, list | tuple) else integer("id", identity),
        integer("position", values["position"]),
        None if provenance is None else cast(Iterable[int], _list(provenance, "provenance")),
    )


def _label(item: object) -> Label:
    values = _keys(item, "label", required=("position", "target"), optional=("task", "weight"))
    weight = values.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise TypeError(f"weight must be a number, got {weight!r}")
    task, position = integer("task", values.get("task", 0)), integer("position", values["position"])
    return Label(position, _token(values["target"]), task, float(weight))


def _mask(item: object, size: int) -> Mask:
    if isinstance(item, Mask):
        return item
    values = _keys(item, "mask", optional=("name", "parameters", "intervals", "dense"))
    if "name" in values:
        parameters = cast(Mapping[str, object], values.get("parameters", {}))
        return _catalogue_mask(str(values["name"]), parameters)
    if "intervals" in values:
        rows = [[_pair(pair) for pair in _list(row, "a row")] for row in _list(values["intervals"], "intervals")]
        return masks.from_intervals(rows, size)
    if "dense" in values:
        rows = [
            [bool(integer("entry", int(cast(int, e)), 0, 1)) for e in _list(r, "a row")]
            for r in _list(values["dense"], "dense")
        ]
        return masks.from_dense(torch.tensor(rows, dtype=torch.bool).reshape(len(rows), size))
    raise ValueError("expected one of name, intervals, dense")


def _catalogue_mask(name: str, parameters: Mapping[str, object]) -> Mask:
    if name not in _CATALOGUE:
        raise ValueError(f"expected a mask of the catalogue, got {name!r}; known: {', '.join(sorted(_CATALOGUE))}")
    function = cast(Callable[..., Mask], getattr(masks, name))
    return function(**parameters)


def _keys(
    item: object, kind: str, required: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> Mapping[str, object]:
    """`item` if it is a mapping with all required and no unknown names: a misspelt one would be ignored silently."""
    if not isinstance(item, Mapping):
        raise TypeError(f"a {kind} must be a mapping, got {type(item).__name__}")
    values = cast(Mapping[str, object], item)
    missing, unknown = [k for k in required if k not in values], [k for k in values if k not in required + optional]
    if missing or unknown:
        problem = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(map(repr, unknown))}"
        raise ValueError(f"the {kind} {problem}; it has {', '.join(required + optional)}")
    return values


def _list(value: object, name: str) -> list[object]:
    if isinstance(value, list | tuple):
        return list(cast(list[object], value))
    raise TypeError(f"{name} must be a list, got {type(value).__name__}")


def _pair(value: object) -> tuple[int, int]:
    start, end = _list(value, "an interval")
    return integer("start", start), integer("end", end)


def _at(place: str, build: Callable[..., _Built], *values: object) -> _Built:
    try:
        return build(*values)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{place}: {error}") from error
