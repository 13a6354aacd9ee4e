"""What a search of an index found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from attnflow.knowledge.certificate import Certificate


@dataclass(frozen=True, eq=False)
class Hits:
    """Slots of the rows found and their scores in falling order; -1 and -inf where there were fewer.

    `hits[i]` and iteration give what one query found, without that padding.

    Attributes:
        slots: of the rows.
        scores: query . entry + threshold.
        certificate: what the search promises.
    """

    slots: Int[Tensor, "*queries found"]
    scores: Float[Tensor, "*queries found"]
    certificate: Certificate

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, query: int) -> Hits:
        found = self.slots[query] >= 0
        return Hits(self.slots[query][found], self.scores[query][found], self.certificate[query])

    def __iter__(self) -> Iterator[Hits]:
        return (self[query] for query in range(len(self)))
