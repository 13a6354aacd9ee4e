"""The entries that a search gives, whatever was searched: an index, a store, or what a layer reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxtyping import Float, Int64
from torch import Tensor

from attnflow._core.markup import plural
from attnflow.knowledge.certificate import Certificate

_SHOWN = 5


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The entries with the highest scores, best first; -1 and -inf where there were fewer.

    `neighbours[i]` and iteration give those of one query, without that padding.

    Attributes:
        ids: of the entries (rows of an `EntryIndex`).
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
        about = f"of {self.certificate.total:,}, {self.certificate.label}"
        if self.ids.ndim > 1:
            shape = " x ".join(map(str, self.ids.shape[:-1]))
            return f"Neighbours({shape} queries: {self.ids.shape[-1]} each {about})"
        pairs = zip(self.ids[:_SHOWN].tolist(), self.scores[:_SHOWN].tolist(), strict=True)
        listed = ", ".join(f"{key} ({score:.3g})" for key, score in pairs)
        more = ", ..." if len(self) > _SHOWN else ""
        return f"Neighbours({plural(len(self), 'entry', 'entries')} {about}: {listed}{more})"
