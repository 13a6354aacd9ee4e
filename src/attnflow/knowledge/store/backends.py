"""What keeps rows durably and searches them, from a uri; `Store` does the rest.

Every writing method of a backend is one step: when it raises, or the process dies, nothing changed. One that was cut
short after its step may leave what is searched behind what is kept, until `refresh`. Its `next_id` is above every id
that the store has held, and survives deletes, restores and reopening. Packages are imported when a backend is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from attnflow._core.checks import integer
from attnflow.knowledge.index import SearchMode
from attnflow.knowledge.store.lance import LanceBackend
from attnflow.knowledge.store.memory import MemoryBackend
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


def open_backend(
    uri: str, dim: int | None, num_thresholds: int | None, read_only: bool, search: SearchMode, target_recall: float
) -> tuple[str, Backend]:
    """The backend's name, and it; raises before anything is made."""
    check_uri(uri)
    dim = None if dim is None else integer("dim", dim, minimum=1)
    num_thresholds = None if num_thresholds is None else integer("num_thresholds", num_thresholds)
    if search not in ("auto", "exact", "approximate"):
        raise ValueError(f'search must be "auto", "exact" or "approximate", got {search!r}')
    if uri == "memory":
        if dim is None:
            raise ValueError("give dim, the width of an embedding, to make a store in memory")
        return "memory", MemoryBackend(dim, num_thresholds or 0, search, target_recall)
    if uri.startswith("milvus:"):
        address = uri.removeprefix("milvus:")
        return "milvus", MilvusBackend(address, dim, num_thresholds, read_only, search, target_recall)
    return "lancedb", LanceBackend(Path(uri).absolute(), dim, num_thresholds, read_only, search, target_recall)
