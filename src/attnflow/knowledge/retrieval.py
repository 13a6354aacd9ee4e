"""Reading the best entries alone: which, by which search, when all are cheaper; and what that leaves out."""

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

BOUNDED: Final = ("relu", "gelu", "silu")  # activations whose weight the k-th score bounds


@dataclass(frozen=True, eq=False)
class Certificate:
    """How far the output of the entries that a search kept can be from the output of all entries.

    Scores are those that were computed, in float32. An entry whose exact score lies within rounding (about
    entry_dim * 6e-8 * ||query|| * ||entry||) of `last` or of zero may fall on either side; among equal scores the
    search may keep any. Neither weakens a statement about the computed scores: what is left out scores at most `last`.

    Attributes:
        approximate: whether entries that score more may have been missed: then nothing else here is promised.
        k: entries asked for; of a range search those that were found, for each query.
        total: entries searched.
        last: for each query the score that nothing left out exceeds: the k-th, the threshold of a range search, the
            lowest where all entries were kept, -inf without entries.
        active: for each query the number of entries with score > 0; None where the search did not count them.
    """

    approximate: bool
    k: int | Int[Tensor, "*queries"]
    total: int
    last: Float[Tensor, "*queries"]
    active: Int[Tensor, "*queries"] | None = None

    @classmethod
    def joined(cls, certificates: Sequence[Certificate]) -> Certificate:
        """One certificate of several searches for the same number of queries, flattened: query by query.

        Where entries came or went between the searches, it counts the largest number: its bounds hold for each.
        """
        counts = {one.k for one in certificates if isinstance(one.k, int)}
        alike = len(counts) == 1 and all(isinstance(one.k, int) for one in certificates)
        active = [one.active for one in certificates if one.active is not None]
        return cls(
            any(one.approximate for one in certificates),
            counts.pop() if alike else _side_by_side([one._retrieved() for one in certificates]),
            max(one.total for one in certificates),
            _side_by_side([one.last for one in certificates]),
            _side_by_side(active) if len(active) == len(certificates) else None,
        )

    def __getitem__(self, query: int) -> Certificate:
        """The certificate of one query."""
        k = self.k if isinstance(self.k, int) else self.k[query]
        active = None if self.active is None else self.active[query]
        return Certificate(self.approximate, k, self.total, self.last[query], active)

    @property
    def label(self) -> str:
        """ "exact" or "approximate"."""
        return "approximate" if self.approximate else "exact"

    @property
    def left_out(self) -> Int[Tensor, "*queries"]:
        """For each query, how many entries were not kept."""
        return (self.total - self._retrieved()).clamp(min=0)

    @property
    def complete(self) -> Bool[Tensor, "*queries"]:
        """For each query, whether the ReLU output of the kept entries is that of all."""
        if self.approximate:
            return torch.zeros_like(self.last, dtype=torch.bool)
        return self._left_out_active() == 0

    def error_bound(self, value_norm: float | Float[Tensor, ""], activation: str = "relu") -> Float[Tensor, "*queries"]:
        """For each query, a bound on ||sum over left-out entries of act(score) value||.

        With ReLU: (active - k) * last * value_norm, and 0 where last <= 0. GELU and SiLU are not zero below zero:
        the active entries that were left out weigh at most act(last) each, and every other one at most the supremum
        of |act| over scores <= min(last, 0), which is |act(last)| below the minimum of the activation (GELU -0.170
        at -0.752, SiLU -0.278 at -1.278) and the depth of the minimum above it. Where active entries were not counted,
        each that was left out weighs the larger of the two.

        Args:
            value_norm: the largest ||value|| of an entry.
            activation: "relu", "gelu" (the exact one) or "silu".

        Returns:
            Float64; inf from an approximate search.

        Raises:
            ValueError: another activation (sparsemax and gated layers have no such bound), or a norm that is not one.

        >>> found = Certificate(False, k=8, total=100, last=torch.tensor([0.5, -0.1]), active=torch.tensor([12, 3]))
        >>> found.error_bound(2.0)
        tensor([4., 0.], dtype=torch.float64)
        """
        if activation not in BOUNDED:
            raise ValueError(
                f'activation must be "relu", "gelu" or "silu", got {activation!r}: others have no bound from the k-th '
                "score alone (sparsemax normalises over all entries; a gate multiplies the weight)"
            )
        norm = float(value_norm)
        if not (math.isfinite(norm) and norm >= 0):
            raise ValueError(f"value_norm must be the largest norm of a value, finite and not negative, got {norm}")
        last = self.last.double()
        if self.approximate:
            return torch.full_like(last, math.inf)
        above, below = last.clamp(min=0), last.clamp(min=torch.finfo(last.dtype).min, max=0)
        weight = above if activation == "relu" else _SMOOTH[activation](above)
        depth = torch.zeros_like(last) if activation == "relu" else _depth(activation, below)
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
    """The entries with the highest scores, best first; -1 and -inf where there were fewer.

    `neighbours[i]` and iteration give those of one query, without that padding.

    Attributes:
        ids: of the entries.
        scores: query . entry + threshold.
        certificate: what the search promises about the entries that it left out.
        rows: the entries themselves, [entry | thresholds], zero where there is none; None where nobody asked for them.
    """

    ids: Int64[Tensor, "*queries k"]
    scores: Float[Tensor, "*queries k"]
    certificate: Certificate
    rows: Float[Tensor, "*queries k width"] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, query: int) -> Neighbours:
        if self.ids.ndim == 1:
            raise TypeError("these are of one query: read .ids and .scores, or search for queries [n, dim]")
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


def _depth(activation: str, scores: Float[Tensor, "*queries"]) -> Float[Tensor, "*queries"]:
    """sup of |act(s)| over s <= score, for scores <= 0: |act| rises with s up to the minimum of act, then falls."""
    place, depth = _MINIMA[activation]
    return torch.where(scores < place, _SMOOTH[activation](scores).abs(), depth)


def _gelu(scores: Tensor) -> Tensor:
    """GELU by erfc, which keeps its digits far below zero, where 1 + erf loses them."""
    return scores * torch.special.erfc(scores / -math.sqrt(2)) / 2


_SMOOTH: Final = {"gelu": _gelu, "silu": functional.silu}
# Score and depth of the only minimum of each, where its slope is zero: of gelu, Phi(s) + s phi(s) = 0; of silu
# s + 1 + exp(s) = 0, and its depth is -(s + 1).
_MINIMA: Final = {
    "gelu": (-0.7517915246935644, 0.16997120747990369),
    "silu": (-1.2784645427610737, 0.2784645427610737),
}


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
