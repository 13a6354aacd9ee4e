"""Reading the best entries alone: how many or above which score, by which search, and when all of them are cheaper."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, SupportsFloat, cast, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from attnflow._core.checks import integer
from attnflow.knowledge.certificate import Certificate

Search = Literal["auto", "dense", "exact", "approximate"]
SEARCHES: Final = get_args(Search)

# Reading k of `total` entries takes as long as reading all at total / k of these: for one query, up to _FEW, and more.
# One thread, d = 512 and 576, 1,536 to 65,536 entries. In place: one query gains at any k up to a quarter, 8 cross at 3
# to 8, 128 at 8 to 26. A source hands out copies of rows: 65,536 entries, 8 queries cross at about 64, 128 at 256.
_FEW: Final = 8
_SHARES: Final = (4, 4, 16)
_SHARES_COPIED: Final = (4, 64, 256)


@dataclass(frozen=True)
class Retrieval:
    """Which entries a layer reads for each token and head: the k best, or all above a score.

    In training (of a module in training mode, with gradients on) the output is that of the entries asked for, and
    gradients are straight-through: those of scores and of what they are computed from are as if all entries had been
    read; those of values are of the entries that were. In evaluation mode gradients are of the function itself.

    Attributes:
        k: how many entries with the highest scores (of gated layers: the highest gate scores), or None.
        threshold: read all entries whose score is above this, or None; 0 is exact for ReLU.
        search: "dense" reads all entries; "exact" finds precisely those asked for; "approximate" asks an index for the
            k best, which certifies nothing; "auto" leaves the choice to the source, and reads all entries where that
            is no slower and nothing is trained. A model that was trained with the k best is a function of them: use
            "exact" for it.

    Raises:
        ValueError: neither or both of k and threshold, an unknown search, or an approximate one for a threshold.

    >>> Retrieval(k=32)
    Retrieval(k=32, threshold=None, search='auto')
    """

    k: int | None = None
    threshold: float | None = None
    search: Search = "auto"

    def __post_init__(self) -> None:
        if (self.k is None) == (self.threshold is None):
            raise ValueError(f"give k or threshold, one of them; got k={self.k}, threshold={self.threshold}")
        if self.k is not None:
            integer("k", self.k, minimum=1)
        elif not isinstance(self.threshold, SupportsFloat) or math.isnan(self.threshold):
            raise ValueError(f"threshold must be a number, not NaN, got {self.threshold!r}")
        if self.search not in SEARCHES:
            raise ValueError(f"search must be one of {', '.join(map(repr, SEARCHES))}, got {self.search!r}")
        if self.search == "approximate" and self.k is None:
            raise ValueError("an approximate search finds the k best: give k, or another search for a threshold")

    def reads_all(self, total: int, queries: int = 1, training: bool = False, copied: bool = False) -> bool:
        """Whether all of `total` entries are read, as was asked for, or because it is no slower.

        `queries` tokens and heads read at once, `training` or not; entries are `copied` where a source hands them out.
        """
        if self.search == "dense" or (self.k is not None and self.k >= total):
            return True
        if self.search != "auto" or self.k is None or training:
            return False
        return self.k * (_SHARES_COPIED if copied else _SHARES)[(queries > 1) + (queries > _FEW)] >= total


def best(scores: Float[Tensor, "*queries entries"], retrieval: Retrieval) -> Int[Tensor, "*queries read"]:
    """Return the entries that a `Retrieval` selects from all scores, best first, padded with -1."""
    if retrieval.k is not None:
        return scores.topk(min(retrieval.k, scores.shape[-1]), dim=-1).indices
    counts = (scores > cast(float, retrieval.threshold)).sum(dim=-1)
    values, rows = scores.topk(int(counts.amax()) if counts.numel() else 0, dim=-1)
    return rows.masked_fill(values <= cast(float, retrieval.threshold), -1)


def certify(
    scores: Float[Tensor, "*queries entries"], rows: Int[Tensor, "*queries read"], retrieval: Retrieval
) -> Certificate:
    """Certify the result of `best`, query by query, flattened."""
    flat = scores.detach().flatten(0, -2)
    if retrieval.k is not None:
        retrieved, last = rows.shape[-1], flat.gather(-1, rows.flatten(0, -2)[:, -1:])[:, 0]
    else:
        retrieved = (rows >= 0).sum(dim=-1).flatten()
        last = torch.full_like(flat[:, 0], cast(float, retrieval.threshold))
    return Certificate(False, retrieved, scores.shape[-1], last, (flat > 0).sum(dim=-1))


def sum_of_rows(
    weights: Float[Tensor, "*queries read"], rows: Int[Tensor, "*queries read"], table: Float[Tensor, "total width"]
) -> Float[Tensor, "*queries width"]:
    """Sum weight x table[row] for each query without copying rows; a row of -1 must have weight 0."""
    if not weights.numel():
        return weights.new_zeros(*weights.shape[:-1], table.shape[1])
    values = weights.flatten(0, -2).to(table.dtype)
    sums = functional.embedding_bag(rows.clamp(min=0).flatten(0, -2), table, per_sample_weights=values, mode="sum")
    return sums.view(*weights.shape[:-1], table.shape[1]).to(weights.dtype)
