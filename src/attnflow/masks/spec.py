"""Masks as plain data: the one reader of JSON, and the catalogue by name.

One of `{"name": "sliding_window", "parameters": {"n": 8, "window": 3}}` (a mask of the catalogue),
`{"intervals": [[[0, 2]], ...]}` (per query, half-open), `{"dense": [[1, 0], [1, 1]]}` (or rows of text, "10"),
`{"edges": [[q, k], ...], "num_queries": n}`; combined by `{"and": [...]}`, `{"or": [...]}`, `{"not": ...}`; or what
`masks.export` made, such as `{"attnflow": "FlashMask", ...}`. Intervals may have positions numbered by `query_rank`
and `key_rank`: query q is row query_rank[q], and key k lies in it where the interval holds key_rank[k].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch

from attnflow._core.checks import sizes_up_to
from attnflow._core.parameters import LARGEST_NAMED, find
from attnflow._core.plain import as_integer, as_list, as_object, kind_of, only_keys, parse_json
from attnflow.masks import export
from attnflow.masks.build import from_dense, from_edges, from_intervals
from attnflow.masks.mask import Mask
from attnflow.masks.registry import named_masks

_FORMS: Final = ("name", "intervals", "dense", "edges", "and", "or", "not", "attnflow")
_DEEPEST: Final = 100  # expressions that people write have a handful


def from_json(text: str) -> Mask:
    """Read a mask from JSON: from `mask.to_json`, from a result of `masks.export`, or written by hand.

    The command line reads the same formats from its JSON files.

    Raises:
        ValueError: the text is not JSON or not a mask; the message names the place.

    >>> from_json('{"dense": ["10", "11"]}').row_counts().tolist()
    [1, 2]
    """
    return mask_from_dict(parse_json(text, "the JSON of a mask"))


def mask_from_dict(spec: object, where: str = "mask", depth: int = 0) -> Mask:
    """Makes a mask from plain data in any of the forms above; `where` names the place in errors."""
    if isinstance(spec, Mask):
        return spec
    if depth > _DEEPEST:
        raise ValueError(f"{where:.60}...: masks are nested more than {_DEEPEST} deep")
    values = as_object(spec, where)
    forms = [form for form in _FORMS if form in values]
    if len(forms) != 1:
        present = " and ".join(forms) or ", ".join(values) or "nothing"
        raise ValueError(f"{where}: a mask has one of {', '.join(_FORMS)}; got {present}")
    builders = {"name": _named, "intervals": _intervals, "dense": _dense, "edges": _edges, "attnflow": _exported}
    return builders[forms[0]](values, where) if forms[0] in builders else _combined(values, where, depth + 1)


def _named(spec: dict[str, object], where: str) -> Mask:
    only_keys(spec, where, ("name",), ("parameters",))
    if not isinstance(spec["name"], str):
        raise ValueError(f"{where}: name must be text, got {kind_of(spec['name'])}")
    try:
        entry = find(spec["name"], named_masks(), "mask")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return _call(where, entry.function, entry.check(spec.get("parameters", {}), where))


def _exported(spec: dict[str, object], where: str) -> Mask:
    kinds = {kind.__name__: kind for kind in export.FORMS}
    if not isinstance(spec["attnflow"], str):
        raise ValueError(f"{where}: attnflow must be text, got {kind_of(spec['attnflow'])}")
    try:
        mask = find(spec["attnflow"], kinds, "form of a mask").from_dict(spec).to_mask()
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{where}: {error}") from error
    if not isinstance(mask, Mask):
        raise ValueError(f"{where}: expected one mask, got {mask!r}")
    return mask


def _intervals(spec: dict[str, object], where: str) -> Mask:
    only_keys(spec, where, ("intervals",), ("num_keys", "query_rank", "key_rank"))
    rows = [
        [_pair(pair, f"{where}.intervals[{q}]") for pair in as_list(row, f"{where}.intervals[{q}]")]
        for q, row in enumerate(as_list(spec["intervals"], f"{where}.intervals"))
    ]
    mask = _call(where, from_intervals, {"rows": rows, **_sizes(spec, where, "num_keys")})
    if not {"query_rank", "key_rank"} & set(spec):
        return mask
    # Position i of the mask is number rank[i] of the rows: what `permute` does with its order.
    ranks = [
        [as_integer(number, f"{where}.{name}") for number in as_list(spec[name], f"{where}.{name}")]
        if name in spec
        else list(range(size))
        for name, size in zip(("query_rank", "key_rank"), mask.shape, strict=True)
    ]
    return _call(where, mask.permute, {"order": ranks[0], "keys": ranks[1]})


def _edges(spec: dict[str, object], where: str) -> Mask:
    only_keys(spec, where, ("edges",), ("num_queries", "num_keys"))
    if "num_queries" not in spec:
        raise ValueError(f"{where}: edges need num_queries")
    pairs = [_pair(pair, f"{where}.edges[{i}]") for i, pair in enumerate(as_list(spec["edges"], f"{where}.edges"))]
    return _call(where, from_edges, {"edges": pairs, **_sizes(spec, where, "num_queries", "num_keys")})


def _dense(spec: dict[str, object], where: str) -> Mask:
    only_keys(spec, where, ("dense",))
    rows = [_bits(row, f"{where}.dense[{q}]") for q, row in enumerate(as_list(spec["dense"], f"{where}.dense"))]
    for q, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise ValueError(f"{where}.dense[{q}]: expected {len(rows[0])} entries like row 0, got {len(row)}")
    table = torch.tensor(rows, dtype=torch.bool).reshape(len(rows), len(rows[0]) if rows else 0)
    return _call(where, from_dense, {"allow": table})


def _bits(row: object, where: str) -> list[bool]:
    entries = list(row) if isinstance(row, str) else as_list(row, where)
    for k, entry in enumerate(entries):
        if str(entry) not in ("0", "1") and not isinstance(entry, bool):
            raise ValueError(f"{where}[{k}]: expected 0, 1, true or false, got {kind_of(entry)}")
    return [entry if isinstance(entry, bool) else str(entry) == "1" for entry in entries]


def _combined(spec: dict[str, object], where: str, depth: int) -> Mask:
    [sign] = [form for form in ("and", "or", "not") if form in spec]
    only_keys(spec, where, (sign,))
    if sign == "not":
        return ~mask_from_dict(spec[sign], f"{where}.not", depth)
    parts = as_list(spec[sign], f"{where}.{sign}")
    masks = [mask_from_dict(part, f"{where}.{sign}[{i}]", depth) for i, part in enumerate(parts)]
    if not masks:
        raise ValueError(f"{where}.{sign}: expected at least one mask")
    result = masks[0]
    for mask in masks[1:]:
        if mask.shape != result.shape:
            raise ValueError(f"{where}.{sign}: masks of different shapes: {result.shape} and {mask.shape}")
        result = result & mask if sign == "and" else result | mask
    return result


def _pair(value: object, where: str) -> tuple[int, int]:
    items = as_list(value, where)
    if len(items) != 2:
        raise ValueError(f"{where}: expected a pair of integers, got {len(items)} entries")
    return as_integer(items[0], where), as_integer(items[1], where)


def _sizes(spec: Mapping[str, object], where: str, *names: str) -> dict[str, object]:
    return {name: as_integer(spec[name], f"{where}.{name}") for name in names if name in spec}


def _call(where: str, function: Callable[..., Mask], values: Mapping[str, object]) -> Mask:
    try:
        with sizes_up_to(LARGEST_NAMED):
            return function(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error
