"""One entry of the feed-forward layers, for a page: what it pushes, where it fires, what is near it, its removal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy.typing as npt
from torch import Tensor

from attnflow._core.markup import token_label
from attnflow.models import sample_text
from attnflow.report.audit import LISTED
from attnflow.report.knowledge import entry_name
from attnflow.report.live.operations import Reply

if TYPE_CHECKING:
    from attnflow.knowledge.reading.provenance import Fired, Trace
    from attnflow.knowledge.reading.results import EntryRemoval, EntryReport, Near, Pushed

_SONNETS: Final = 12
_TITLE: Final = 40  # characters; shorter parts of the sonnets are their numbers


def sonnets() -> list[str]:
    parts = (part.strip() for part in sample_text("sonnets").split("\n\n"))
    return [part for part in parts if len(part) > _TITLE][:_SONNETS]


def traced(trace: Trace, position: int) -> Reply:
    row = trace.row(position)
    known = {"logit": trace.logits, "chance": trace.probabilities}
    return {
        "position": position,
        "answer": token_label(trace.answers[row]) if trace.answers else "",
        **{name: None if values is None else number(float(values[row])) for name, values in known.items()},
        "entries": [_fired(one) for one in trace.fired(position, count=LISTED)],
    }


def _fired(one: Fired) -> Reply:
    return {
        "name": entry_name(one),
        **fields(one, "entry", "layer", "neuron", "head", "text"),
        "promotes": labels(one.promotes),
        "suppresses": labels(one.suppresses),
        **numbers(score=one.score, weight=one.weight, norm=one.norm),
        **numbers(effect=one.effect, direct=one.direct_effect, ablated=one.ablated_effect, lost=one.probability_effect),
    }


def described(found: EntryReport, trace: Trace, position: int) -> Reply:
    return {
        **fields(found, "name", "entry", "layer", "place", "head", "without"),
        "norm": number(found.norm),
        "tokens": [token_label(text) for text in trace.tokens],
        "position": position,
        "weights": _weights(found, trace),
        "up": _pushed(found.raised),
        "down": _pushed(found.lowered),
        "near": {"value": _near(found.near_by_value), "key": _near(found.near_by_key)},
    }


def fires(found: EntryReport) -> Reply:
    return {
        **fields(found, "entry", "layer", "active"),
        "read": found.tokens_read,
        "examples": [
            {
                "weight": number(one.weight),
                "text": one.text,
                "at": one.position - one.first,
                "tokens": [token_label(text) for text in one.tokens],
                "weights": [number(weight) for weight in one.weights],
            }
            for one in found.examples
        ],
    }


def removed(found: EntryRemoval) -> Reply:
    rows = [
        {"token": token_label(one.token), **numbers(before=one.before, after=one.after, change=one.after - one.before)}
        for one in found.chances
    ]
    return {**fields(found, "entry", "position", "changed"), "kl": number(found.kl), "rows": rows}


def fields(result: object, *names: str) -> Reply:
    return {name: getattr(result, name) for name in names}


def labels(tokens: Iterable[str]) -> str:
    return " ".join(map(token_label, tokens))


def _pushed(tokens: Sequence[Pushed]) -> list[dict[str, Any]]:
    return [{"token": token_label(one.token), "value": number(one.strength)} for one in tokens]


def _near(entries: Sequence[Near]) -> list[dict[str, Any]]:
    return [
        {**fields(one, "name", "entry", "layer"), "cosine": number(one.cosine), "words": labels(one.raised)}
        for one in entries
    ]


def _weights(found: EntryReport, trace: Trace) -> list[float | None]:
    """Returns the entry's weight at each token; 0 where its layer has enough stronger entries."""
    one = next(one for one in trace if one.reader == found.reader)
    mine = (one.ids == found.entry) & (one.heads == found.head)
    return [number(weight) for weight in (one.weights * mine).sum(dim=1).tolist()]


def table(values: Tensor | npt.NDArray[Any]) -> list[list[float | None]]:
    return [[number(value) for value in row] for row in values.tolist()]


def numbers(**values: float | None) -> dict[str, float | None]:
    return {name: number(value) for name, value in values.items()}


def number(value: float | None) -> float | None:
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None
