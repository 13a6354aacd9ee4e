"""`Retrieval`: reads only the best entries of a base; `Certificate` bounds the error of leaving out the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, SupportsFloat, cast, get_args

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor
from torch.nn import functional

from attnflow._core.checks import integer
from attnflow._core.markup import plural


def _gelu(scores: Tensor) -> Tensor:
    """GELU by erfc, which keeps its digits far below zero, where 1 + erf loses them."""
    return scores * torch.special.erfc(scores / -math.sqrt(2)) / 2


# Activations whose weight the k-th score bounds, with score and depth of their only minimum, where the slope is zero:
# of gelu, Phi(s) + s phi(s) = 0; of silu, s + 1 + exp(s) = 0, and its depth is -(s + 1).
BOUNDED: Final = {
    "relu": (functional.relu, 0.0, 0.0),
    "gelu": (_gelu, -0.7517915246935644, 0.16997120747990369),
    "silu": (functional.silu, -1.2784645427610737, 0.2784645427610737),
}


@dataclass(frozen=True, eq=False)
class Certificate:
    """A bound on the difference between reading the entries that a search kept and reading all entries.

    It refers to the scores as computed in float32: no entry left out scores more than `last`. An entry whose exact
    score lies within rounding (about entry_dim * 6e-8 * ||query|| * ||entry||) of `last` or of zero may fall on either
    side, and among equal scores the search may keep any.

    Attributes:
        approximate: whether the search may have missed higher scores; then no other field is guaranteed.
        k: the number of entries requested; for a range search, the number found for each query.
        total: the number of entries searched.
        last: for each query a score that no entry left out exceeds: the k-th score, or the threshold of a range search.
            It is the lowest score if all entries were kept, and -inf without entries.
        active: for each query the number of entries with score > 0; None if the search did not count them.
    """

    approximate: bool
    k: int | Int[Tensor, "*queries"]
    total: int
    last: Float[Tensor, "*queries"]
    active: Int[Tensor, "*queries"] | None = None

    @classmethod
    def joined(cls, certificates: Sequence[Certificate]) -> Certificate:
        """Join certificates of equally many queries, query by query; the largest total keeps the bounds after edits."""
        k = certificates[0].k
        alike = isinstance(k, int) and all(isinstance(other.k, int) and other.k == k for other in certificates)
        active = [part.active for part in certificates if part.active is not None]
        return cls(
            any(part.approximate for part in certificates),
            k if alike else _side_by_side([part._retrieved() for part in certificates]),
            max(part.total for part in certificates),
            _side_by_side([part.last for part in certificates]),
            _side_by_side(active) if len(active) == len(certificates) else None,
        )

    def __getitem__(self, query: int) -> Certificate:
        k = self.k if isinstance(self.k, int) else self.k[query]
        active = None if self.active is None else self.active[query]
        return Certificate(self.approximate, k, self.total, self.last[query], active)

    @property
    def label(self) -> str:
        return "approximate" if self.approximate else "exact"

    @property
    def left_out(self) -> Int[Tensor, "*queries"]:
        return (self.total - self._retrieved()).clamp(min=0)

    @property
    def complete(self) -> Bool[Tensor, "*queries"]:
        if self.approximate:
            return torch.zeros_like(self.last, dtype=torch.bool)
        return self._left_out_active() == 0

    def error_bound(self, value_norm: float | Float[Tensor, ""], activation: str = "relu") -> Float[Tensor, "*queries"]:
        """Bound ||sum over left-out entries of act(score) value|| for each query.

        With ReLU: (active - k) * last * value_norm, and 0 where last <= 0. GELU and SiLU are not zero below zero.
        There, active entries that were left out weigh at most act(last) each. All others weigh at most the supremum of
        |act| over scores <= min(last, 0): |act(last)| below the activation's minimum (GELU -0.170 at -0.752, SiLU
        -0.278 at -1.278), and the depth of the minimum above it. If active entries were not counted, each entry left
        out weighs at most the larger of the two.

        Args:
            value_norm: the largest ||value|| of an entry.
            activation: "relu", "gelu" (the exact one) or "silu".

        Returns:
            The bounds in float64; inf after an approximate search.

        Raises:
            ValueError: another activation (sparsemax and gated layers have no such bound), or an invalid value_norm.

        >>> found = Certificate(False, k=8, total=100, last=torch.tensor([0.5, -0.1]), active=torch.tensor([12, 3]))
        >>> found.error_bound(2.0)
        tensor([4., 0.], dtype=torch.float64)
        """
        if activation not in BOUNDED:
            raise ValueError(
                f'activation must be "relu", "gelu" or "silu", got {activation!r}: for others the k-th score gives no '
                "bound (sparsemax normalises over all entries; a gate multiplies the weight)"
            )
        norm = float(value_norm)
        if not (math.isfinite(norm) and norm >= 0):
            raise ValueError(f"value_norm must be the largest norm of a value, finite and not negative, got {norm}")
        last = self.last.double()
        if self.approximate:
            return torch.full_like(last, math.inf)
        function, place, deepest = BOUNDED[activation]
        below = last.clamp(min=torch.finfo(last.dtype).min, max=0)
        weight = function(last.clamp(min=0))
        depth = torch.where(below < place, function(below).abs(), deepest)  # |act| rises up to the minimum, then falls
        if self.active is None:
            return self.left_out * torch.maximum(weight, depth) * norm
        active = self._left_out_active()
        return (active * weight + (self.left_out - active) * depth) * norm

    def _retrieved(self) -> Int[Tensor, "*queries"]:
        return torch.as_tensor(self.k, device=self.last.device).expand(self.last.shape)

    def _left_out_active(self) -> Int[Tensor, "*queries"]:
        most = self.left_out
        if self.active is not None:
            most = torch.minimum(most, (self.active - self._retrieved()).clamp(min=0))
        return torch.where(self.last > 0, most, 0)


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The entries with the highest scores for each query, best first, padded with id -1 and score -inf.

    `neighbours[i]` and iteration give the result of one query without padding.

    Attributes:
        ids: the ids of the entries.
        scores: query . entry + threshold.
        certificate: what the search guarantees about the entries that it left out.
        rows: the entries themselves, [entry | thresholds], zero for padding; None if not requested.
    """

    ids: Int64[Tensor, "*queries k"]
    scores: Float[Tensor, "*queries k"]
    certificate: Certificate
    rows: Float[Tensor, "*queries k width"] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, query: int) -> Neighbours:
        if self.ids.ndim == 1:
            raise TypeError("this result is of one query: read .ids and .scores, or search with queries [n, dim]")
        there = self.ids[query] >= 0
        rows = None if self.rows is None else self.rows[query][there]
        return Neighbours(self.ids[query][there], self.scores[query][there], self.certificate[query], rows)

    def __iter__(self) -> Iterator[Neighbours]:
        return (self[query] for query in range(len(self)))

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.ids.shape))
        return f"Neighbours({shape} of {plural(self.certificate.total, 'entry', 'entries')}, {self.certificate.label})"


def _side_by_side(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values), dim=-1).flatten()


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
    """Chooses the entries that a layer reads for each token and head: the k best, or all above a score.

    In training (module in training mode, gradients on) the output uses the chosen entries, and gradients are
    straight-through. Scores, and whatever they are computed from, get gradients as if all entries had been read; only
    the values of the chosen entries get gradients. In evaluation mode gradients are those of the function itself.

    Attributes:
        k: how many entries with the highest scores to read (in gated layers, gate scores), or None.
        threshold: read all entries with a score above this, or None; 0 is exact for ReLU.
        search: "dense" reads all entries. "exact" finds precisely the chosen entries. "approximate" asks an index for
            the k best and certifies nothing. "auto" leaves the choice to the source, and reads all entries where that
            is no slower and nothing is trained. Use "exact" for a model that was trained to read the k best.

    Raises:
        ValueError: not exactly one of k and threshold, an unknown search, or an approximate one with a threshold.

    >>> Retrieval(k=32)
    Retrieval(k=32, threshold=None, search='auto')
    """

    k: int | None = None
    threshold: float | None = None
    search: Search = "auto"

    def __post_init__(self) -> None:
        if (self.k is None) == (self.threshold is None):
            raise ValueError(f"pass either k or threshold, got k={self.k}, threshold={self.threshold}")
        if self.k is not None:
            integer("k", self.k, minimum=1)
        elif not isinstance(self.threshold, SupportsFloat) or math.isnan(self.threshold):
            raise ValueError(f"threshold must be a number, not NaN, got {self.threshold!r}")
        if self.search not in SEARCHES:
            raise ValueError(f"search must be one of {', '.join(map(repr, SEARCHES))}, got {self.search!r}")
        if self.search == "approximate" and self.k is None:
            raise ValueError("an approximate search finds the k best: pass k, or use another search with a threshold")

    def reads_all(self, total: int, queries: int = 1, training: bool = False, copied: bool = False) -> bool:
        """Whether to read all `total` entries, either on request or because that is not slower.

        `queries` is how many tokens and heads read at once; `copied` says that a source returns copies of entries.
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
