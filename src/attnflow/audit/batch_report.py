"""`BatchReport`: what a lint of one batch says, what it looked at, and what it could not look at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from attnflow._core.markup import plural
from attnflow._core.results import Result

Kind = Literal["readable", "shift", "documents", "padding", "unsupervised", "prompt", "mask", "positions", "vocabulary"]


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong with a batch.

    Attributes:
        kind: "readable" (a label can be read by the position that predicts it), "shift" (labels stand at another place
            than the loss takes them from), "documents" (a label is predicted from another document, or what says where
            documents begin disagrees), "padding" (labels on padding), "unsupervised" (an answer without labels),
            "mask" (the mask lets through what positions or lengths keep apart, or padding), "positions" (positions and
            mask disagree), "vocabulary" (ids that no vocabulary has).
        sequence: row of the batch where it is first.
        position: column there.
        count: in how many places of the batch.
        message: what is wrong there, and what to do.
    """

    kind: Kind
    sequence: int
    position: int
    count: int
    message: str

    def __str__(self) -> str:
        more = f" ({plural(self.count, 'place')} in all)" if self.count > 1 else ""
        return f"{self.kind}: sequence {self.sequence}, position {self.position}: {self.message}{more}"


@dataclass
class Findings:
    """What the checks of a batch have to say; the parts of a `BatchReport`."""

    mistakes: list[Mistake] = field(default_factory=list[Mistake])
    checked: list[str] = field(default_factory=list[str])
    unchecked: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    notes: list[str] = field(default_factory=list[str])

    def add(self, kind: Kind, where: Tensor, message: str) -> None:
        """A mistake at the places of `where`, bool [batch, n]; none if there is no such place."""
        places = where.nonzero()
        if len(places):
            row, column = places[0].tolist()
            self.mistakes.append(Mistake(kind, row, column, len(places), message))


@dataclass(frozen=True, repr=False)
class BatchReport(Result):
    """Whether labels, documents, masks and positions of one batch fit together.

    Attributes:
        mistakes: what is wrong.
        family: how labels are taken, in words, and whether that was read or assumed.
        order: what may flow in the batch, in words.
        checked: what was looked at, in words.
        unchecked: what could not be, each with the reason.
        notes: remarks that are no mistakes.
        sequences: rows of the batch.
        positions: columns of the batch.
        labels: labels that count.
        documents: documents in all rows together; as many as rows where nothing is packed.
    """

    mistakes: tuple[Mistake, ...]
    family: str
    order: str
    checked: tuple[str, ...]
    unchecked: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    sequences: int
    positions: int
    labels: int
    documents: int

    @property
    def ok(self) -> bool:
        """Whether something was checked and nothing is wrong with it; read `unchecked`, too."""
        return bool(self.checked) and not self.mistakes

    def rows(self) -> list[dict[str, object]]:
        """One row for each mistake."""
        return [vars(mistake).copy() for mistake in self.mistakes]

    def __repr__(self) -> str:
        lines = [f"<BatchReport {self._verdict()}; {self.sequences} x {self.positions}", *map(str, self.mistakes[:2])]
        if len(self.mistakes) > 2:
            lines.append(f"and {len(self.mistakes) - 2} more; print(report)")
        return "\n".join(lines) + ">"

    def __str__(self) -> str:
        size = f"{self.sequences} x {self.positions} positions"
        packed = f"{plural(self.documents, 'document')}, {plural(self.labels, 'label')}"
        lines = [f"{self._verdict()}: {size}, {packed}; {self.family}; {self.order}", *map(str, self.mistakes)]
        lines += [f"checked: {what}" for what in self.checked]
        lines += [f"not checked: {what}: {why}" for what, why in self.unchecked]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _verdict(self) -> str:
        if self.mistakes:
            return f"{len(self.mistakes)} MISTAKE{'S' if len(self.mistakes) > 1 else ''}"
        return "no mistake" if self.checked else "NOTHING CHECKED"
