"""A store of texts: built from a file, searched, added to and corrected by words, with the encoder that made it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from attnflow._core.checks import preview
from attnflow._core.markup import aligned, plural, shorten
from attnflow._core.progress import Progress
from attnflow._core.results import Result
from attnflow.knowledge.hf.convert import from_ffn
from attnflow.knowledge.hf.encoder import TextEncoder
from attnflow.knowledge.hf.stored_layers import MADE_BY, save_entries
from attnflow.knowledge.store import Store
from attnflow.models.loader import load_model


@dataclass(frozen=True)
class Written(Result):
    """Entries that were written to a store."""

    store: str  # where it is
    entries: int  # that it holds now
    dim: int  # width of an embedding
    ids: tuple[int, ...]  # of what was written
    encoder: str  # version of what made the embeddings
    truncated: tuple[str, ...]  # sources of texts that are longer than the encoder reads: their ends are not embedded

    def __str__(self) -> str:
        return f"{self.store}: {plural(self.entries, 'entry', 'entries')} of width {self.dim} by {self.encoder}"


@dataclass(frozen=True)
class Match:
    """An entry that a search of texts gives, with its score."""

    id: int
    score: float
    text: str | None
    source: str | None
    version: int
    encoder: str | None


@dataclass(frozen=True)
class Matches(Result):
    """The entries of a store that are nearest to a text, best first."""

    store: str  # where it is
    query: str  # the text
    encoder: str  # what embedded it
    label: str  # "exact", or "approximate": others may score more
    total: int  # entries that were searched
    other_encoders: int  # how many of them another encoder made: their scores do not compare
    matches: tuple[Match, ...]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each entry."""
        return [asdict(one) for one in self.matches]

    def __str__(self) -> str:
        found = plural(len(self.matches), "entry", "entries")
        said = [f"{found} of {self.total:,}, {self.label} search, scores by {self.encoder}"]
        rows = [
            [str(one.id), f"{one.score:.3f}", shorten(one.text or "(no text)", 100), shorten(one.source or "", 40)]
            for one in self.matches
        ]
        if rows:
            said.append(aligned([["id", "score", "text", "source"], *rows], left=[2, 3]))
        return "\n".join(said)


def read_texts(path: str | Path, source: str | None = None) -> tuple[list[str], list[str | None]]:
    """Read texts and their sources from the lines of a text file, or from JSON lines.

    `source` names the source of texts that do not name one; by default it is file and line. A ValueError reports an
    empty or malformed file.
    """
    file = Path(path).expanduser()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    numbered = {f"{file.name}:{number}": line.strip() for number, line in enumerate(lines, 1) if line.strip()}
    if not numbered:
        raise ValueError(f"{path} holds no text")
    if file.suffix.lower() not in (".jsonl", ".ndjson"):
        return list(numbered.values()), [source or place for place in numbered]
    texts, sources = list[str](), list[str | None]()
    for place, line in numbered.items():
        try:
            parsed = cast(object, json.loads(line))
        except ValueError as error:
            raise ValueError(f"{place} is no JSON: {error}") from error
        fields = cast("dict[str, object]", parsed) if isinstance(parsed, dict) else {}
        text, where = fields.get("text"), fields.get("source", source or place)
        if not (isinstance(text, str) and text.strip() and isinstance(where, str | None)):
            raise ValueError(f'{place} must be an object with "text" and maybe "source", both strings')
        texts.append(text)
        sources.append(where)
    return texts, sources


def build(uri: str, file: str | Path, encoder: str = "minilm", *, progress: Progress | None = None) -> Written:
    """A new store of texts, all of them written in one step.

    Raises:
        FileNotFoundError: no such file or encoder.
        ValueError: no text, a model that is no encoder, or a store that holds entries already.
    """
    texts, sources = read_texts(file)
    maker = TextEncoder(encoder)
    with Store.open(uri, dim=maker.dim) as store:
        _check_empty(store)
        return insert(store, texts, sources, encoder=maker, progress=progress)


def build_from_model(uri: str, model: str, *, progress: Progress | None = None) -> Written:
    """A new store of the feed-forward entries of a model: a short name, a folder, a GGUF file or a hub id.

    Raises:
        FileNotFoundError: no such model.
        ValueError: a store that holds entries already.
    """
    converted: Any = from_ffn(load_model(model, tokenizer=False))
    base = converted.knowledge
    with Store.open(uri, dim=base.entry_dim, num_thresholds=base.num_thresholds) as store:
        _check_empty(store)
        save_entries(converted, store, name=model, progress=progress)
        return Written(uri, len(store), store.dim, tuple(store.ids().tolist()), f"{MADE_BY}:{model}", ())


def insert(
    store: Store,
    texts: Sequence[str],
    sources: Sequence[str | None],
    ids: Sequence[int] | None = None,
    *,
    encoder: str | TextEncoder | None = None,
    progress: Progress | None = None,
) -> Written:
    """Add texts to a store, embedded as its entries are; or correct the entries with these ids, one for each text.

    `encoder` names another one than that which made the entries.

    Raises:
        ValueError: an empty text, ids that do not exist, or as `TextEncoder.of`. Nothing is written.
    """
    if not all(text.strip() for text in texts):
        raise ValueError("a text is empty")
    if ids is not None:
        if len(ids) != len(texts):
            raise ValueError(f"give one id for each text: got {len(ids)} and {plural(len(texts), 'text')}")
        if unknown := [key for key in ids if key not in store]:
            raise ValueError(
                f"{store.uri} has no entries with ids {preview(unknown)} to correct; a new entry gets its id by itself"
            )
    maker = encoder if isinstance(encoder, TextEncoder) else TextEncoder.of(store, encoder)
    embeddings, truncated = maker.encode(texts, progress)
    made: dict[str, Any] = {"embeddings": embeddings, "texts": texts, "sources": sources, "encoder": maker.version}
    if ids is None:
        ids = store.insert(**made).tolist()
    else:
        store.upsert(ids=ids, **made)
    cut = tuple(sources[place] or repr(texts[place][:20]) for place in truncated)
    return Written(store.uri, len(store), store.dim, tuple(ids), made["encoder"], cut)


def search(store: Store, query: str, k: int = 10, *, encoder: str | None = None) -> Matches:
    """The k entries of a store that are nearest to a text.

    Raises:
        ValueError: an empty query, or as `TextEncoder.of`.
    """
    if not query.strip():
        raise ValueError("the query is empty")
    maker = TextEncoder.of(store, encoder)
    near, version = store.search(maker([query])[0], k), maker.version
    found = near.ids >= 0
    matches = tuple(
        Match(entry.id, score, entry.text, entry.source, entry.version, entry.encoder)
        for entry, score in zip(store.get(near.ids[found]), near.scores[found].tolist(), strict=True)
    )
    others = sum(count for name, count in store.stats().encoders.items() if name != version)
    return Matches(store.uri, query, version, near.certificate.label, len(store), others, matches)


def _check_empty(store: Store) -> None:
    if len(store):
        held = plural(len(store), "entry", "entries")
        raise ValueError(
            f"{store.uri} holds {held} already: `attnflow knowledge insert` adds to it; build makes a new one"
        )
