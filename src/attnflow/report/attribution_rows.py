"""One head's row of an attribution as numbers: the key that is explained, and the terms that lead."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from attnflow._core import checks
from attnflow._core.markup import part_name, shorten, token_label, visible
from attnflow.geometry.attribution import ScoreAttribution, telling
from attnflow.models.passes.recording import ComponentName
from attnflow.report.charts import Array

_MOST: Final = 0.9  # of the weight of a row: of a key with more, centred terms say little


@dataclass(frozen=True)
class HeadRow:
    """In logits, above `level` (the row's mean, or another key): `terms` [keys, query components, key components]."""

    head: int | None
    index: int
    centred: bool
    terms: Array
    constants: Mapping[str, Array]
    scores: Array
    weights: Array
    level: str = "the row’s mean"

    @property
    def constant(self) -> Array:
        return np.sum(list(self.constants.values()), axis=0) if self.constants else np.zeros(len(self.scores))

    @property
    def totals(self) -> Array:
        """What the terms and constants of each key sum to: its score, or its score above the row's mean."""
        return self.terms.sum((1, 2)) + self.constant


@dataclass(frozen=True)
class Leading:
    terms: Sequence[tuple[ComponentName, ComponentName, float]]
    constants: Mapping[str, float]
    count: int  # of the other terms
    others: float
    total: float

    def names(self, *, brief: bool = False) -> list[str]:
        named = short if brief else visible
        terms = [f"{named(query)} × {named(key)}" for query, key, _ in self.terms]
        return terms + [f"constant: {name}" for name in self.constants]

    @property
    def values(self) -> list[float]:
        return [value for *_, value in self.terms] + [*self.constants.values()]


def row_of(result: ScoreAttribution, head: int | None = None, key: int | None = None, raw: bool = False) -> HeadRow:
    """Takes by default the head with the most weight on a token but the first and the query, and its largest key."""
    heads = list(result.heads)
    contrasts = result.against is not None and not raw
    raw = raw or contrasts
    constants = result.constants if raw else result.centred_constants
    everything = [result.weights, result.scores, result.raw if raw else result.centred, *constants.values()]
    if result.head is not None:
        everything = [values[None] for values in everything]
    weights, scores, terms, *parts = (np.asarray(values, dtype=np.float64) for values in everything)
    if head is not None and head not in heads:
        raise ValueError(f"head must be one of the attributed {heads}, got {head}")
    if key is not None and key not in result.keys:
        all_between = len(result.keys) == max(result.keys) - min(result.keys) + 1
        keys = f"{min(result.keys)} to {max(result.keys)}" if all_between else str(list(result.keys))
        raise ValueError(f"key must be a position that query {result.query} may attend to, {keys}, got {key}")
    if head is None:
        others = telling(result) or slice(None)
        head = heads[int(weights[:, others].max(axis=1).argmax())]
    place = heads.index(head)
    row = weights[place]
    first = 0 if result.against is not None else int(row.argmax())
    index = first if key is None else result.keys.index(key)
    chosen = {name: values[place] for name, values in zip(constants, parts, strict=True)}
    if contrasts:
        less = {name: values - values[::-1] for name, values in chosen.items()}
        other = key_name(result, 1 - index)
        return HeadRow(head, index, True, terms[place] - terms[place][::-1], less, scores[place], row, other)
    return HeadRow(head, index, not raw, terms[place], chosen, scores[place], row)


def leading(result: ScoreAttribution, row: HeadRow, count: int) -> Leading:
    checks.integer("count", count, 1)
    table = row.terms[row.index]
    order = np.argsort(-np.abs(table), axis=None, kind="stable")[:count]
    places = [(int(place) // table.shape[1], int(place) % table.shape[1]) for place in order]
    terms = [(result.components[q], result.key_components[k], float(table[q, k])) for q, k in places]
    constants = {name: float(values[row.index]) for name, values in row.constants.items() if values.any()}
    others = math.fsum(table.ravel().tolist()) - math.fsum(value for *_, value in terms)
    return Leading(terms, constants, table.size - len(terms), others, float(row.totals[row.index]))


def remark(result: ScoreAttribution, row: HeadRow) -> str:
    """Warns of a key with nearly all of the weight, whose centred terms say little; otherwise returns ""."""
    if not row.centred or result.against is not None or row.weights[row.index] < _MOST:
        return ""
    if len(result.keys) == 1 and row.weights[0] == 1:
        return "The query can attend to no other token, so that this weight is 1 whatever the score."
    return (
        "This key has nearly all of the weight, so the row’s mean is nearly its own score and centred terms are small. "
        "Those of another key say why it got less, and raw terms what the score is made of."
    )


def short(name: ComponentName) -> str:
    return shorten(name.brief, 34)


def query_name(result: ScoreAttribution) -> str:
    return f"“{token_label(result.query_token)}” ({result.query})"


def key_name(result: ScoreAttribution, index: int) -> str:
    return f"“{token_label(result.tokens[index])}” ({result.keys[index]})"


def head_name(result: ScoreAttribution, head: int | None) -> str:
    kind = "" if result.attention == "self" else f" of its {result.attention}-attention"
    return f"{part_name(result.layer, 'head', head)}{kind}"
