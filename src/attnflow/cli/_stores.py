"""Stores of entries as commands open them, the encoders that belong to them, and the texts that files hold."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from attnflow.cli._output import BadUsage

if TYPE_CHECKING:
    from attnflow.cli._output import Spinner
    from attnflow.knowledge.hf.encoder import TextEncoder
    from attnflow.knowledge.store import Store

DEFAULT: Final = "minilm"
SEPARATOR: Final = "\t"  # between the key of an entry, which is embedded, and its value
_WINDOW: Final = 1024  # entries of one write
_CONVERTED: Final = "from_ffn:"


@dataclass(frozen=True)
class Record:
    """An entry to be: its text, with a key before a tab if it has a value, and where it comes from."""

    text: str
    source: str | None


@contextmanager
def opened(uri: str, **options: Any) -> Generator[Store, None, None]:
    """A store, closed at the end; for reading unless `read_only=False`.

    Raises:
        BadUsage: no such store, or arguments that it refuses, here or inside the block.
    """
    from attnflow.knowledge.store import Store

    if uri == "memory":
        raise BadUsage("a store in memory is gone when the command ends: name a folder")
    settings: dict[str, Any] = {"read_only": True, **options}
    try:
        with Store.open(uri, **settings) as store:
            yield store
    except (ValueError, TypeError) as error:
        raise BadUsage(str(error)) from error
    except KeyError as error:
        raise BadUsage(str(error.args[0])) from error


def exists(uri: str) -> bool:
    """Whether there may be a store already: a folder with something in it, or a server."""
    path = Path(uri.removeprefix("milvus:"))
    return uri.startswith("milvus:http") or (path.is_dir() and any(path.iterdir())) or path.is_file()


def load_encoder(name: str, separator: str | None = None) -> TextEncoder:
    """An encoder by name.

    Raises:
        BadUsage: there is none.
    """
    from attnflow.knowledge.hf.encoder import TextEncoder

    try:
        return TextEncoder(name, separator=separator)
    except (FileNotFoundError, ValueError) as error:
        raise BadUsage(str(error)) from error


def made_by(store: Store) -> str | None:
    """The encoder version that most entries have; None if they say nothing.

    Raises:
        BadUsage: the entries were made by no encoder of texts.
    """
    encoders = store.stats().encoders
    version = max(encoders, key=lambda name: encoders[name], default=None) or None
    if version is not None and version.startswith(_CONVERTED):
        raise BadUsage(
            f"{store.uri} holds feed-forward entries of {version.removeprefix(_CONVERTED)}, not of texts: "
            "see `attnflow knowledge trace` for those that a text activates"
        )
    return version


def encoder_for(store: Store, name: str | None, spinner: Spinner, *, fresh: bool = False) -> TextEncoder:
    """The encoder that made a store's entries, found by the version that is stored with them; or the one named.

    Args:
        store: with entries of texts.
        name: of an encoder, or None.
        spinner: says what is going on.
        fresh: also as it is now, if it has changed since.

    Raises:
        BadUsage: none is recorded or can be found, or it has changed since.
    """
    version = made_by(store)
    if name is None and version is None and len(store):
        raise BadUsage(f"{store.uri} does not say which encoder made its entries: give --encoder NAME")
    recorded = (version or DEFAULT).rpartition("@")[0] or DEFAULT
    chosen = name or recorded
    spinner(f"loading {chosen}")
    found = load_encoder(chosen)
    if found.version != version and version is not None:
        keyed = load_encoder(chosen, SEPARATOR)  # versions do not say it, but there are only these two
        if keyed.version == version or (fresh and _keyed(store)):
            found = keyed
    if found.version != version and version is not None and not fresh and name is None:
        raise BadUsage(
            f"the entries were made by {version}, and {chosen} is now {found.version}: their scores mean nothing. "
            f"`attnflow knowledge reembed {store.uri}` embeds them anew; --encoder {chosen} searches all the same"
        )
    return found


def others(store: Store, version: str) -> int:
    """How many entries another encoder made."""
    return sum(count for name, count in store.stats().encoders.items() if name != version)


def records(path: Path, split: str, source: str | None) -> list[Record]:
    """The entries of a file: lines or paragraphs of text; of a .jsonl file, objects with "text" or "key" and "value".

    Raises:
        BadUsage: no such file, nothing in it, or a line that is no such object.
    """
    try:
        content = path.expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadUsage(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        numbered = ((i, line) for i, line in enumerate(content.splitlines(), 1) if line.strip())
        found = [_from_json(f"{path.name}:{i}", line, source) for i, line in numbered]
    else:
        found = [
            Record(text, source or f"{path.name}:{i}")
            for i, text in (_paragraphs(content) if split == "paragraph" else _lines(content))
        ]
    if not found:
        raise BadUsage(f"{path} holds no text")
    return found


def given(
    texts: Sequence[str] | None, values: Sequence[str] | None, file: Path | None, source: str | None
) -> list[Record]:
    """The entries that a command was given, by name or in a file.

    Raises:
        BadUsage: both or neither, an empty text, or another number of values than of texts.
    """
    if (file is None) == (not texts):
        raise BadUsage("give --text or --file, one of them")
    if file is not None:
        return records(file, "line", source)
    named = texts or []
    if values and len(values) != len(named):
        raise BadUsage(f"give one --value for each --text: got {len(values)} and {len(named)}")
    if not all(text.strip() for text in named):
        raise BadUsage("--text is empty")
    return [Record(keyed(*pair), source) for pair in zip(named, values or [None] * len(named), strict=True)]


def keyed(key: str, value: str | None, place: str = "--text") -> str:
    """The text of an entry with a key and a value.

    Raises:
        BadUsage: a tab in the key, where it would end.
    """
    if value is None:
        return key
    if SEPARATOR in key:
        raise BadUsage(f"{place}: a key cannot hold a tab, got {key!r}")
    return f"{key}{SEPARATOR}{value}"


def shown(text: str | None) -> str:
    """The text of an entry for the terminal."""
    return (text or "(no text)").replace(SEPARATOR, " -> ")


def add(
    store: Store, encoder: TextEncoder, new: Sequence[Record], spinner: Spinner, ids: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """Embed and write entries, batch by batch.

    Returns:
        Their ids, and the positions of those that were too long for the encoder.
    """
    version, written, cut = encoder.version, list[int](), list[int]()
    for start in range(0, len(new), _WINDOW):
        batch = new[start : start + _WINDOW]
        texts = [record.text for record in batch]

        def progress(done: int, _: int, start: int = start) -> None:
            spinner(f"embedding {start + done:,} of {len(new):,}")

        found = encoder.encode(texts, progress)
        cut += [start + place for place in found.truncated]
        given: dict[str, Any] = {
            "embeddings": found.embeddings,
            "texts": texts,
            "sources": [record.source for record in batch],
            "encoder": version,
        }
        if ids is None:
            written += cast("list[int]", store.insert(**given).tolist())
        else:
            chosen = list(ids[start : start + _WINDOW])
            store.upsert(ids=chosen, **given)
            written += chosen
    return written, cut


def note(text: str) -> None:
    """Something that the user should know, on stderr."""
    print(f"attnflow: {text}", file=sys.stderr)


def note_truncated(cut: Sequence[int], new: Sequence[Record], encoder: TextEncoder) -> None:
    """Say which texts were too long."""
    if cut:
        where = ", ".join(new[place].source or repr(new[place].text[:20]) for place in cut[:5])
        more = ", ..." if len(cut) > 5 else ""
        note(
            f"{len(cut):,} of {len(new):,} texts have more than {encoder.max_length} tokens, and their ends are not "
            f"embedded: {where}{more}"
        )


def _keyed(store: Store) -> bool:
    """Whether entries have keys and values."""
    ids = store.ids()[:1]
    return any(SEPARATOR in (entry.text or "") for entry in store.get(ids))


def _from_json(place: str, line: str, source: str | None) -> Record:
    try:
        found = cast(object, json.loads(line))
    except ValueError as error:
        raise BadUsage(f"{place} is no JSON: {error}") from error
    fields = cast("dict[str, object]", found) if isinstance(found, dict) else {}
    key = fields.get("key", fields.get("text"))
    value = fields.get("value", fields.get("text") if "key" in fields else None)
    where = fields.get("source", source or place)
    if not (isinstance(key, str) and key.strip() and isinstance(value, str | None) and isinstance(where, str | None)):
        raise BadUsage(f'{place} must be an object with "text", or "key" and "value", and maybe "source": all strings')
    return Record(keyed(key, value, place), where)


def _lines(content: str) -> Iterator[tuple[int, str]]:
    return ((i, line.strip()) for i, line in enumerate(content.splitlines(), 1) if line.strip())


def _paragraphs(content: str) -> Iterator[tuple[int, str]]:
    start, lines = 0, list[str]()
    for i, line in enumerate([*content.splitlines(), ""], 1):
        if line.strip():
            start = start if lines else i
            lines.append(line.strip())
        elif lines:
            yield start, " ".join(lines)
            lines = []
