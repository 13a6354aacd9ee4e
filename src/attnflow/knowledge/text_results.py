"""What the verbs on a store of texts return: entries written, matches of a search, the store in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from attnflow._core.checks import preview
from attnflow._core.markup import aligned, plural, shorten
from attnflow._core.results import Result
from attnflow.knowledge.certificate import Neighbours
from attnflow.knowledge.duplication import Duplicates
from attnflow.knowledge.records import readable
from attnflow.knowledge.store import Store, StoreStats


@dataclass(frozen=True)
class Written(Result):
    """Entries that were written to a store.

    Attributes:
        store: where it is.
        backend: "lancedb", or "memory".
        entries: that it holds now.
        dim: width of an embedding.
        ids: of the entries that were written; fewer than it holds where a build went on after an interruption.
        encoder: version of what made the embeddings.
        truncated: sources of the texts that are longer than the encoder reads, whose ends are not embedded.
        seconds: that it took.
    """

    store: str
    backend: str
    entries: int
    dim: int
    ids: tuple[int, ...]
    encoder: str
    truncated: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        before = self.entries - len(self.ids)
        again = f" ({before:,} were there already)" if before else ""
        return (
            f"{self.store}: {plural(self.entries, 'entry', 'entries')} of width {self.dim} by {self.encoder}{again}, "
            f"in {self.seconds:.1f} s"
        )


@dataclass(frozen=True)
class Match:
    """An entry that a search of texts gives, with its score."""

    id: int
    score: float
    text: str | None
    source: str | None
    version: int
    encoder: str | None

    @classmethod
    def of(cls, store: Store, near: Neighbours, k: int) -> tuple[Match, ...]:
        """The k best entries, at most, that a search for one query gave, best first."""
        scored = zip(near.ids.tolist(), near.scores.tolist(), strict=True)
        pairs = [(key, score) for key, score in scored if key >= 0][:k]
        return tuple(
            cls(entry.id, score, entry.text, entry.source, entry.version, entry.encoder)
            for entry, (_, score) in zip(store.get([key for key, _ in pairs]), pairs, strict=True)
        )


@dataclass(frozen=True)
class Matches(Result):
    """The entries of a store that are nearest to a text, best first.

    Attributes:
        store: where it is.
        query: the text.
        encoder: what embedded it.
        label: "exact", or "approximate": others may score more.
        total: entries that were searched.
        other_encoders: how many of them another encoder made: their scores do not compare.
        seconds: of the search alone.
        matches: the entries.
    """

    store: str
    query: str
    encoder: str
    label: str
    total: int
    other_encoders: int
    seconds: float
    matches: tuple[Match, ...]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each entry."""
        return [asdict(one) for one in self.matches]

    def __str__(self) -> str:
        about = f"{plural(len(self.matches), 'entry', 'entries')} of {self.total:,}, {self.label} search"
        lines = [f"{about} in {1000 * self.seconds:.1f} ms, scores by {self.encoder}"]
        rows = [
            [str(one.id), f"{one.score:.3f}", shorten(readable(one.text), 100), shorten(one.source or "", 40)]
            for one in self.matches
        ]
        return "\n".join(
            [*lines, *([aligned([["id", "score", "text", "source"], *rows], left=[2, 3])] if rows else [])]
        )


@dataclass(frozen=True)
class Inspection(Result):
    """A store in numbers, with what was asked for besides.

    Attributes:
        store: the numbers.
        duplicates: groups of entries that say the same, or None.
        texts: of the first entry of each of the first groups.
    """

    store: StoreStats
    duplicates: Duplicates | None
    texts: tuple[str | None, ...]

    @property
    def ok(self) -> bool:
        """Whether no entries say the same, where that was asked for."""
        return self.duplicates is None or self.duplicates.ok

    def rows(self) -> Sequence[Mapping[str, object]]:
        """One row: the numbers of the store, and how many entries could go."""
        surplus = None if self.duplicates is None else self.duplicates.surplus
        return [{**row, "surplus": surplus} for row in self.store.rows()]

    def __str__(self) -> str:
        said = [str(self.store)]
        if self.duplicates is not None:
            said += ["", f"duplicates {self.duplicates.summary}"]
            rows = [
                [str(len(group)), preview(group, 6), shorten(readable(text), 60)]
                for group, text in zip(self.duplicates.groups, self.texts, strict=False)
            ]
            more = len(self.duplicates.groups) - len(rows)
            said += [aligned([["entries", "ids", "text of the first"], *rows], left=[1, 2])] if rows else []
            said += [f"and {plural(more, 'more group')}"] if more else []
        return "\n".join(said)
