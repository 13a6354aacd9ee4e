"""Families of tasks, interactively: the subtasks beside the merged task they become, and the proof in steps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from attnflow._core.parameters import Named, find
from attnflow._core.plain import as_integer, as_list, as_object, as_text
from attnflow.masks.build import from_edges
from attnflow.report.hasse_svg import diagram
from attnflow.report.live.design import Design, MaskLayer
from attnflow.report.live.entries import fields
from attnflow.report.live.operations import Message, Reply, typed
from attnflow.report.live.tiles import tile
from attnflow.tasks.derivation import derive, named_families, with_mask
from attnflow.tasks.families import Family
from attnflow.tasks.leaks import LeakReport, check
from attnflow.tasks.merging import MergedTask
from attnflow.tasks.task import Task
from attnflow.tasks.tokens import Token

MAX_WORDS: Final = 32
MAX_CHARACTERS: Final = 2000
_MAX_PAIRS: Final = 64  # that are added to the merged mask
_MAX_SETTING: Final = 400  # characters
_MAX_LEAKS: Final = 100
_MAX_CELLS: Final = 6000  # positions of all subtasks together: more are no picture
_TEXT: Final = "the cat sat on the mat and slept"


def families() -> Reply:
    listed = [
        {
            "name": entry.name,
            "summary": re.split(r":| \(", entry.summary, maxsplit=1)[0],
            "parameters": [
                {**asdict(parameter), "choices": ()} for parameter in entry.parameters if parameter.name != "mask_token"
            ],
            "example": typed(_example(entry, len(_TEXT.split()))),
        }
        for entry in named_families().values()
    ]
    return {"families": listed, "text": _TEXT, "max_words": MAX_WORDS, "max_characters": MAX_CHARACTERS}


def family(message: Message) -> Reply:
    """Applies the family "name" to the words of "text", with typed "settings" and more "pairs" that the mask allows."""
    entry = find(as_text(message.get("name"), "name"), named_families(), "family")
    words = _words(as_text(message.get("text"), "text"))
    values = _values(entry, message, len(words))
    derived = derive(entry, len(words), values)
    if derived.subtask_positions > _MAX_CELLS:
        raise ValueError(
            f"the subtasks have {derived.subtask_positions:,} positions together; up to {_MAX_CELLS:,} are drawn: take "
            "fewer words"
        )
    subtasks = entry.function(tokens=list(range(1, len(words) + 1)), **with_mask(entry, values))
    merged = derived.merged
    allowed = merged.task.mask.dense()
    pairs = [pair for pair in _pairs(message.get("pairs", []), merged.task.size) if not allowed[pair]]
    task, report = merged.task, derived.report
    if pairs:
        task = Task(task.sequence, task.targets, task.mask | from_edges(pairs, task.size))
        report = check(task)
    cells = _merged_cells(merged, words)
    return {
        "name": entry.name,
        "call": derived.call,
        "settings": typed(values),
        "words": words,
        "facts": [list(line) for line in derived.lines()[:4]],
        "merged": cells,
        "lanes": 1 + max(cell["lane"] for cell in cells),
        "subtasks": _subtasks(subtasks, merged, words),
        "nodes": _nodes(task, merged, report),
        "labels": report.num_labels,
        "pairs": [list(pair) for pair in pairs],
        "leaks": [_leak(report, i, words) for i in range(min(len(report.leaks), _MAX_LEAKS))],
        "total": len(report.leaks),
        "dead": list(report.dead),
        "tile": tile(task.mask, merged.task.mask if pairs else None, 0, 0, task.size, task.size),
        "diagram": diagram(task.flow.hasse, [cell["short"] for cell in cells]),
        "code": _code(entry.name, len(words), {**values, **with_mask(entry, values)}, pairs),
        "design": _design(task, cells).to_dict(),
    }


def _code(name: str, size: int, values: Mapping[str, object], pairs: Sequence[tuple[int, int]]) -> str:
    settings = "".join(f", {key}={value!r}" for key, value in values.items())
    lines = [
        "import attnflow as af",
        "",
        f"tokens = list(range(1, {size + 1}))  # the ids of your text",
        f"merged = af.tasks.merge(af.tasks.{name}(tokens{settings}))",
        "print(merged)",
        "print(af.tasks.check(merged))",
    ]
    if pairs:
        lines += [
            "",
            f"mask = merged.task.mask | af.masks.from_edges({list(pairs)}, merged.task.size)",
            "print(af.tasks.check(af.tasks.Task(merged.task.inputs, merged.task.labels, mask)))",
        ]
    return "\n".join(lines) + "\n"


def _design(task: Task, cells: Sequence[Mapping[str, Any]]) -> Design:
    sources = {i: tuple(cell["made"]) for i, cell in enumerate(cells) if cell["made"] != [i]}
    labels = [(each.position, each.data_index) for each in task.labels if each.data_index is not None]
    inside = tuple(dict.fromkeys(pair for pair in labels if pair[1] < task.size))
    tokens = tuple(str(cell["short"]) for cell in cells)
    return Design((MaskLayer.of(task.mask.to_dict()),), tokens=tokens, sources=sources, labels=inside)


def _words(text: str) -> list[str]:
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"a text has at most {MAX_CHARACTERS:,} characters here, got {len(text):,}")
    words = text.split()
    if not 1 <= len(words) <= MAX_WORDS:
        raise ValueError(f"a text has 1 to {MAX_WORDS} words here, got {len(words)}")
    return words


def _values(entry: Named[Family], message: Message, size: int) -> dict[str, object]:
    settings = as_object(message.get("settings", {}), "settings")
    texts = {key: as_text(value, key) for key, value in settings.items()}
    for key, text in texts.items():
        if len(text) > _MAX_SETTING:
            raise ValueError(f"a setting has at most {_MAX_SETTING} characters, got {len(text):,} for {key[:40]}")
    values = entry.read({key: text for key, text in texts.items() if text.strip()})
    values = {**_example(entry, size), **values}
    entry.require(values)
    return values


def _example(entry: Named[Family], size: int) -> dict[str, object]:
    some: Mapping[str, object] = {
        "block": 2 if size % 2 == 0 else 1,
        "horizon": 2,
        "masked": [place for place in range(size) if place % 3 == 1] or [0],
        "permutation": [*range(1, size, 2), *range(0, size, 2)],
    }
    return {p.name: some[p.name] for p in entry.parameters if p.required}


def _pairs(values: object, size: int) -> list[tuple[int, int]]:
    listed = as_list(values, "pairs")
    if len(listed) > _MAX_PAIRS:
        raise ValueError(f"at most {_MAX_PAIRS} pairs are added, got {len(listed)}")
    pairs: list[tuple[int, int]] = []
    for i, each in enumerate(listed):
        pair = [as_integer(place, f"pairs[{i}]") for place in as_list(each, f"pairs[{i}]")]
        if len(pair) != 2 or not all(0 <= place < size for place in pair):
            raise ValueError(f"pairs[{i}]: expected [query, key] within {size} positions, got {pair}")
        pairs.append((pair[0], pair[1]))
    return pairs


def _cell(token: Token, words: Sequence[str]) -> dict[str, Any]:
    made = sorted(token.provenance)
    named = [words[index] for index in made]
    kind = "data" if made == [token.position] else "mean" if made else "mask"
    short = {"data": words[token.position], "mask": "[M]", "mean": "+".join(named)}[kind]
    return {"column": token.position, "kind": kind, "short": short, "made": made}


def _merged_cells(merged: MergedTask, words: Sequence[str]) -> list[dict[str, Any]]:
    """A lane, a row of the picture, holds one kind of input and each position id once; cells stay in it if they can."""
    cells, kinds, taken, lane = list[dict[str, Any]](), list[str](), list[set[int]](), -1
    for token, node in zip(merged.task.inputs, merged.node.tolist(), strict=True):
        cell = _cell(token, words)
        free = [i for i, kind in enumerate(kinds) if kind == cell["kind"] and cell["column"] not in taken[i]]
        if lane not in free:
            lane = free[-1] if free else len(kinds)
        if lane == len(kinds):
            kinds.append(cell["kind"])
            taken.append(set())
        taken[lane].add(cell["column"])
        cells.append({**cell, "lane": lane, "node": node})
    return cells


def _subtasks(tasks: Iterable[Task], merged: MergedTask, words: Sequence[str]) -> list[Reply]:
    rows: list[Reply] = []
    for number, task in enumerate(tasks):
        at = merged.positions[number]
        places = zip(task.inputs, merged.node[at].tolist(), at.tolist(), strict=True)
        cells = [{**_cell(token, words), "node": node, "position": position} for token, node, position in places]
        labels = [[label.position, label.data_index] for label in task.labels]
        rows.append({"cells": cells, "labels": labels, "tile": tile(task.mask, None, 0, 0, task.size, task.size)})
    return rows


def _nodes(task: Task, merged: MergedTask, report: LeakReport) -> list[Reply]:
    members: list[list[list[int]]] = [[] for _ in range(merged.num_nodes)]
    for number, places in enumerate(merged.positions):
        for position, node in enumerate(merged.node[places].tolist()):
            members[node].append([number, position])
    reads = [row.nonzero().flatten().tolist() for row in task.flow.reachability()]
    made = [token.provenance for token in task.inputs]
    labels = [[label.position, label.data_index, label.task] for label in task.labels]
    below = [sorted({position for place in places for position in reads[place]}) for places in merged.nodes]
    return [
        {
            "positions": list(positions),
            "members": members[number],
            "reads": below[number],
            "data": sorted(frozenset[int]().union(*(made[position] for position in below[number]))),
            "labels": [label for label in labels if label[0] in positions],
            "leaks": [i for i, leak in enumerate(report.leaks[:_MAX_LEAKS]) if leak.position in positions],
        }
        for number, positions in enumerate(merged.nodes)
    ]


def _leak(report: LeakReport, number: int, words: Sequence[str]) -> Reply:
    leak = report.leaks[number]
    token = leak.label.data_index
    assert token is not None
    return {"token": token, "word": words[token], **fields(leak, "position", "carrier", "witness", "route")}
