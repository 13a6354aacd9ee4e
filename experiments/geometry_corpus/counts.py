"""Proposition S1.10 on a real text: how often each token is context, and how often it is predicted.

A pair (i, j) counts if token i is predicted and token j is shown to what predicts it: once for i and once for j. Pairs
are those of an attention mask and of the labels of an objective, not of the proposition's formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor

from attnflow import masks
from experiments.runner.statistics import ratios

Objective = Literal["causal", "masked"]
Cut = Literal["packed", "beginnings", "shuffled"]
OBJECTIVES: Final[tuple[Objective, ...]] = ("causal", "masked")
CUTS: Final[tuple[Cut, ...]] = ("packed", "beginnings", "shuffled")
PADDING: Final = -1
MASKED: Final = 0.15  # of the tokens are predicted
REPLACED, RANDOM = 0.8, 0.1  # of these: by [MASK], and by any token; the rest is left as it is
SEEN: Final = 100  # times at least that a token is in the rows, to be looked at


@dataclass(frozen=True, eq=False)
class Roles:
    """How often each position of each row is in a role, int64[rows, positions]."""

    context: Tensor  # positions that are predicted with this one in sight, as the proposition counts
    predicted: Tensor  # positions in sight when this one is predicted, likewise
    key: Tensor  # pairs in which the last layer reads this position's own embedding as a key
    query: Tensor  # pairs in which it reads it as the query


def cut_rows(documents: Sequence[Sequence[int]], cut: Cut, length: int, rows: int, end: int) -> Tensor:
    """int64[rows, length] of a text, `PADDING` behind the end of a row.

    "packed": documents end to end, cut anywhere, as in pretraining. "beginnings": the first tokens of each document.
    "shuffled": packed rows, the tokens of each in random order.
    """
    if cut == "beginnings":
        chosen = [document for document in documents if len(document) > 1][:rows]
        found = torch.full((len(chosen), length), PADDING)
        for row, document in zip(found, chosen, strict=True):
            part = torch.tensor(document[:length])
            row[: len(part)] = part
        return found
    flat = torch.tensor([token for document in documents for token in (*document, end)])
    count = min(rows, len(flat) // length)
    found = flat[: count * length].view(count, length)
    if cut == "shuffled":
        order = torch.rand(found.shape, generator=torch.Generator().manual_seed(0)).argsort(dim=1)
        found = found.gather(1, order)
    return found


def roles(rows: Tensor, objective: Objective, vocabulary: int, seed: int = 0) -> Roles:
    """Of every position, from the pairs that mask and labels allow.

    Args:
        rows: int64[rows, positions], `PADDING` at the ends.
        objective: "causal": every token but the first of a row is predicted, by the query before it. "masked": a draw
            of `MASKED` of them, by the query at its own place; what is predicted and not left as it is is not shown.
        vocabulary: for tokens that others are replaced by.
        seed: of the draw.
    """
    real = rows != PADDING
    length = rows.shape[1]
    if objective == "causal":
        labelled, shown = real.clone(), real
        labelled[:, 0] = False
        allow = masks.causal(length).dense().to(torch.float32)
        # The query at i - 1 predicts i: it sees what stands before i, itself included.
        asks = torch.cat([labelled[:, 1:], torch.zeros_like(labelled[:, :1])], dim=1).float()
        pairs = torch.cat([torch.zeros(1, length), allow[:-1]])
    else:
        generator = torch.Generator().manual_seed(seed)
        drawn, kind = (torch.rand(rows.shape, generator=generator) for _ in range(2))
        labelled = real & (drawn < MASKED)
        other = torch.randint(vocabulary, rows.shape, generator=generator)
        same = (kind >= REPLACED) & ((kind < 1 - RANDOM) | (other == rows))
        shown = real & (~labelled | same)
        allow = torch.ones(length, length)
        asks = labelled.float()
        pairs = allow - torch.eye(length)  # a token in its own sight is no context of itself
    target, sight, here = labelled.float(), shown.float(), real.float()
    found = (
        target @ pairs * sight,
        sight @ pairs.T * target,
        asks @ allow * sight,
        here @ allow.T * asks * sight,
    )
    return Roles(*(each.round().long() for each in found))


def by_token(rows: Tensor, counts: Tensor, tokens: Tensor) -> Tensor:
    """Sums of a role by row and token, float64[rows, tokens]."""
    place = torch.full((int(rows.max()) + 1,), -1)
    place[tokens] = torch.arange(len(tokens))
    real = rows != PADDING
    where = torch.where(real, place[rows.clamp(min=0)], -1)
    found = torch.zeros(len(rows), len(tokens) + 1, dtype=torch.float64)
    found.scatter_add_(1, where % (len(tokens) + 1), counts.double())
    return found[:, :-1]


def expected(rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(context, predicted) of each token under the causal objective as eq. S74 and S75 have them, float64[tokens].

    From the chances alone that a token stands at a place: sum over places i of P(token at i) times N - i, or i - 1.
    """
    real = rows != PADDING
    lengths = real.sum(1, keepdim=True)
    place = torch.arange(1, rows.shape[1] + 1)
    after, before = ((lengths - place) * real, (place - 1) * real)
    return by_token(rows, after, tokens).sum(0), by_token(rows, before, tokens).sum(0)


def compare(rows: Tensor, objective: Objective, vocabulary: int, most: int, draws: int) -> dict[str, object]:
    """The `most` frequent tokens of rows: how often each is context for each time that it is predicted.

    Returns what a file of a run holds: ratios of sums over rows with their bootstrap intervals by rows, what the
    formulas of the proposition give, and totals.
    """
    counts = torch.bincount(rows[rows != PADDING])
    tokens = counts.argsort(descending=True, stable=True)[:most]
    tokens = tokens[counts[tokens] >= SEEN]
    seen = roles(rows, objective, vocabulary)
    tables = {name: by_token(rows, getattr(seen, name), tokens).numpy() for name in ("context", "predicted")}
    content: dict[str, object] = {
        "rows": len(rows),
        "tokens": tokens.tolist(),
        "times": counts[tokens].tolist(),
        "ratios": ratios(tables["context"], tables["predicted"], draws).tolist(),
        "totals": {name: int(getattr(seen, name).sum()) for name in vars(seen)},
    }
    if objective == "causal":
        ahead, behind = (each.numpy() for each in expected(rows, tokens))
        wrong = [np.abs(tables[name].sum(0) - by).max() for name, by in (("context", ahead), ("predicted", behind))]
        content["largest difference from the formula"] = float(max(wrong))
    return content


def shares(ratios: Sequence[Sequence[float]]) -> Mapping[str, int]:
    """How many tokens there are, whose interval leaves 1 out, and which lie above 1."""
    return {
        "tokens": len(ratios),
        "apart": sum(low > 1 or high < 1 for _, low, high in ratios),
        "above": sum(mean > 1 for mean, _, _ in ratios),
    }
