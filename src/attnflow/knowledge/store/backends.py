"""What keeps rows durably and searches them, from a uri; `Store` does the rest.

Every writing method of a backend is one step: when it raises, or the process dies, nothing changed. One that was cut
short after its step may leave what is searched behind what is kept, until `refresh`. Its `next_id` is above every id
that the store has held, and survives deletes, restores and reopening. Packages are imported when a backend is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from attnflow._core.checks import integer
from attnflow.knowledge.store.lance import LanceBackend
from attnflow.knowledge.store.memory import MemoryBackend
from attnflow.knowledge.store.metadata import Metadata, Wanted
from attnflow.knowledge.store.milvus_search import MilvusBackend

Backend = LanceBackend | MemoryBackend | MilvusBackend

_FILES: Final = (".jsonl", ".ndjson", ".json", ".txt", ".md", ".csv", ".tsv", ".db")


def check_uri(uri: str) -> None:
    """Refuse what cannot name a store, before anything is read or made.

    Raises:
        ValueError: an unknown scheme, or a folder that is named like a file of texts.
    """
    if not uri or ("://" in uri and not uri.startswith("milvus:")):
        raise ValueError(
            f'uri must be a directory, "memory", "milvus:FILE.db" or "milvus:http://HOST:19530", got {uri!r}'
        )
    path = Path(uri)
    if not uri.startswith("milvus:") and path.suffix.lower() in _FILES and not path.is_dir():
        raise ValueError(
            f"a store is a folder, and {uri} is named like a file: name a folder (of a file of texts, the folder comes "
            f"first and the file second{'; a file of Milvus is milvus:' + uri if path.suffix == '.db' else ''})"
        )


def open_backend(uri: str, wanted: Wanted) -> tuple[str, Backend]:
    """The backend's name, and it; raises before anything is made."""
    check_uri(uri)
    for name, least in (("dim", 1), ("num_thresholds", 0)):
        if (value := getattr(wanted, name)) is not None:
            wanted = wanted._replace(**{name: integer(name, value, minimum=least)})
    if wanted.search not in ("auto", "exact", "approximate"):
        raise ValueError(f'search must be "auto", "exact" or "approximate", got {wanted.search!r}')
    if uri == "memory":
        if wanted.dim is None:
            raise ValueError("give dim, the width of an embedding, to make a store in memory")
        return "memory", MemoryBackend(Metadata(wanted.dim, wanted.num_thresholds or 0), wanted)
    if uri.startswith("milvus:"):
        return "milvus", MilvusBackend(uri.removeprefix("milvus:"), wanted)
    return "lancedb", LanceBackend(Path(uri).absolute(), wanted)
