"""Reading the best entries alone: how many or above which score, by which search, and when all of them are cheaper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnflow._core.checks import integer
from attnflow.knowledge.certificate import Certificate

Search = Literal["auto", "dense", "exact", "approximate"]
SEARCHES: Final = ("auto", "dense", "exact", "approximate")

# A row that is gathered costs about as much as this many rows in a matrix product (measured: docs/log.md).
_GATHER: Final = 16


@dataclass(frozen=True)
class Retrieval:
    """Which entries a layer reads for each token and head: the k best, or all above a score.

    A layer that is being trained computes all scores, keeps the entries asked for, and sends gradients to all of them
    (straight-through); at other times the others' values are never touched.

    Attributes:
        k: how many entries with the highest scores (of gated layers: the highest gate scores), or None.
        threshold: read all entries whose score is above this, or None; 0 is exact for ReLU.
        search: "dense" reads all entries; "exact" finds precisely those asked for; "approximate" asks an index, which
            certifies nothing; "auto" leaves the choice of index to the source, and reads all entries where that is
            no slower and nothing is trained. A model that was trained with the k best is a function of them: use
            "exact" for it.

    Raises:
        ValueError: neither or both of k and threshold, or an unknown search.

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
        if self.search not in SEARCHES:
            raise ValueError(f"search must be one of {', '.join(map(repr, SEARCHES))}, got {self.search!r}")

    def reads_all(self, total: int) -> bool:
        """Whether reading all of `total` entries is what was asked for, or no slower."""
        if self.search == "dense" or (self.k is not None and self.k >= total):
            return True
        return self.search == "auto" and self.k is not None and self.k * _GATHER >= total


def best(
    scores: Float[Tensor, "*queries entries"], retrieval: Retrieval
) -> tuple[Int[Tensor, "*queries read"], Certificate]:
    """Which entries a `Retrieval` keeps of all that were scored, -1 where fewer, and the certificate of that.

    Cost: a partial sort of each query's scores.
    """
    active = (scores > 0).sum(dim=-1)
    total = scores.shape[-1]
    if retrieval.k is not None:
        values, ids = scores.topk(min(retrieval.k, total), dim=-1)
        last = values[..., -1]
        return ids, Certificate(False, values.shape[-1], total, last.flatten(), active.flatten())
    threshold = cast(float, retrieval.threshold)
    above = scores > threshold
    width = max(1, int(above.sum(dim=-1).max()))
    values, ids = scores.topk(width, dim=-1)
    last = torch.full_like(values[..., -1], threshold)
    kept = Certificate(False, above.sum(dim=-1).flatten(), total, last.flatten(), active.flatten())
    return ids.masked_fill(values <= threshold, -1), kept
