"""How a family decodes, for texts of any length, in a small JSON file beside a checkpoint; and how two such differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from attnflow._core.checks import IntArray
from attnflow._core.files import write_atomically
from attnflow.tasks.writing import BoolArray, Facts

FILE: Final = "attnflow_decoder.json"
_HEADER: Final = {"attnflow": "decoder description", "version": 1}
_INPUTS: Final = "[MASK]", "token", "mean"
_SIDES: Final = "before", "within", "after"
_ORDERS: Final = "earlier block", "earlier in its block", "its own place", "later in its block", "later block"
_LARGEST: Final = 1024  # positions of a group that are looked at: those nearest to what is written
_NEVER: Final = 1 << 62
_Kind = tuple[int, bool, str, tuple[int, ...]]
"""Tokens written at once, are these all, what predicts them from how far ahead, ids of [MASK]."""


def write_description(facts: Facts, folder: Path) -> Path:
    kinds = [
        {"writes": writes, "all": every, "from": source, "mask_tokens": masks, "reads": reads}
        for (writes, every, source, masks), reads in describe(facts).items()
    ]
    with write_atomically(folder / FILE) as file:
        file.write((json.dumps({**_HEADER, "kinds": kinds}, indent=1) + "\n").encode())
    return folder / FILE


def require_trained(facts: Facts, folder: str | Path | None) -> None:
    """Raise `ValueError` if a file in the folder of a checkpoint says that its family decodes otherwise."""
    file = Path(folder or "") / FILE
    if not folder or not file.is_file():
        return
    try:
        saved = cast("dict[str, Any]", json.loads(file.read_text()))
        trained: list[tuple[_Kind, dict[str, object]]] = [
            ((each["writes"], each["all"], each["from"], tuple(each["mask_tokens"])), dict(each["reads"]))
            for each in saved["kinds"]
            if {name: saved[name] for name in _HEADER} == _HEADER
        ]
    except (ValueError, KeyError, TypeError, AttributeError):  # damaged, or of something else
        trained = []
    if not trained:
        raise ValueError(f"{file} describes no decoder that this release reads: save it anew by decoder.save")
    advice = f"({FILE} in the model's folder). Decode it as it was trained, or save the decoder of its family there"
    for kind, reads in describe(facts).items():
        alike = [
            held for other, held in trained if other[2:] == kind[2:] and (other[0] == kind[0] or (other[1] and kind[1]))
        ]
        if not alike:
            known = "; ".join(_in_words(other) for other, _ in trained)
            raise ValueError(f"the decoder writes {_in_words(kind)}; the model was trained on {known} {advice}")
        for name, value in reads.items():
            if alike[0].get(name) != value:
                raise ValueError(
                    f"{name}: {_held(value)} in the decoder, {_held(alike[0].get(name))} in training {advice}"
                )


def describe(facts: Facts) -> dict[_Kind, dict[str, bool | int]]:
    """Who reads whom, for each kind of group of tokens that are written at once.

    Each relation is True, False, or the largest distance of two places at which it holds.
    """
    bounds: dict[tuple[_Kind, str], tuple[int, int]] = {}  # the largest distance allowed, the smallest refused
    for kind, name, allowed, distance in _relations(facts):
        most, least = bounds.get((kind, name), (-1, _NEVER))
        most = max(most, int(distance[allowed].max(initial=-1)))
        least = min(least, int(distance[~allowed].min(initial=_NEVER)))
        bounds[kind, name] = most, least
        if most >= least:
            raise ValueError(
                f"how this family decodes has no short description: {name!r} depends on more than distance (it holds "
                f"at {most} and not at {least}). Store the plan as a file: decoder.save('plan.json')"
            )
    kinds: dict[_Kind, dict[str, bool | int]] = {}
    for (kind, name), (most, least) in bounds.items():
        kinds.setdefault(kind, {})[name] = False if most < 0 else True if least == _NEVER else most
    return kinds


def _relations(facts: Facts) -> Iterator[tuple[_Kind, str, BoolArray, IntArray]]:
    """(kind, relation, which of its pairs are allowed, their distances) for some groups of each kind."""
    kinds: dict[_Kind, list[tuple[IntArray, int, int]]] = {}
    held = np.where(facts.source[:, 0] < 0, 0, np.minimum((facts.source >= 0).sum(axis=1), 2))
    place = facts.task.sequence.position
    for predictors in _groups(facts, held):
        written = facts.place[facts.data[predictors]]
        rows = np.flatnonzero(facts.below(facts.row[predictors]))
        ahead = written - place[facts.row[predictors]]
        source = f"{_INPUTS[held[facts.row[predictors[0]]]]} {', '.join(map(str, np.unique(ahead)))} ahead"
        masks = tuple(np.unique(facts.ids[rows[held[rows] == 0], 0]).tolist())
        count = len(np.unique(written))
        every = 1 < count == len(np.unique(facts.data))
        kinds.setdefault((count, every, source, masks), []).append((rows, int(written.min()), count))
    for kind, groups in kinds.items():
        groups.sort(key=lambda group: len(group[0]))
        for index in np.unique(np.linspace(0, len(groups) - 1, 7).round().astype(int)).tolist():
            rows, first, writes = groups[index]
            rows = rows[np.argsort(abs(place[rows] - first), kind="stable")[:_LARGEST]]
            block = (place[rows] - first) // writes
            part = held[rows] * 3 + 1 + np.sign(block)
            apart = place[rows][None, :] - place[rows][:, None]
            order = 2 + np.sign(apart) * np.where(block[None, :] == block[:, None], 1, 2)
            code = (part[:, None] * 9 + part[None, :]) * 5 + order
            allowed = facts.allow(rows, rows)
            for value in np.unique(code).tolist():
                query, key = (f"{_INPUTS[each // 3]} {_SIDES[each % 3]} the block" for each in divmod(value // 5, 9))
                pairs = code == value
                yield kind, f"{query} reads {key}, {_ORDERS[value % 5]}", allowed[pairs], abs(apart[pairs])


def _groups(facts: Facts, held: IntArray) -> list[IntArray]:
    """The predictors of tokens that are written at once: equal inputs of the same task, which read the same tokens."""
    groups: dict[tuple[object, ...], list[int]] = {}
    task = dict(zip(*(facts.task.targets.table[name].tolist() for name in ("position", "task")), strict=True))
    for number, row in enumerate(facts.row.tolist()):
        key = task[row], int(held[row]), facts.needs[:, row].tobytes()
        groups.setdefault(key, []).append(number)
    return [np.array(group) for group in groups.values()]


def _in_words(kind: _Kind) -> str:
    writes, _, source, masks = kind
    return f"{writes} tokens at once, predicted by {source}" + f" with [MASK] = {list(masks)}" * bool(masks)


def _held(value: object) -> str:
    words = {None: "unknown", True: "always", False: "never"}
    return words[value] if value is None or isinstance(value, bool) else f"up to a distance of {value}"
