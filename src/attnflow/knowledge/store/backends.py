"""From a uri to an engine and what searches it; engines import their packages when they are made."""

from __future__ import annotations

from pathlib import Path

from attnflow.knowledge.store.cached_index import HotIndex
from attnflow.knowledge.store.engine import Engine, Searcher, SearchMode
from attnflow.knowledge.store.lance import LanceEngine
from attnflow.knowledge.store.memory import MemoryEngine
from attnflow.knowledge.store.milvus import MilvusEngine
from attnflow.knowledge.store.milvus_search import MilvusSearch


def open_backend(
    uri: str, dim: int | None, num_thresholds: int | None, read_only: bool, search: SearchMode, target_recall: float
) -> tuple[str, Engine, Searcher]:
    """The backend's name, its engine and its searcher."""
    if not uri or ("://" in uri and not uri.startswith("milvus:")):
        raise ValueError(
            f'uri must be a directory, "memory", "milvus:FILE.db" or "milvus:http://HOST:19530", got {uri!r}'
        )
    if uri == "memory":
        if dim is None:
            raise ValueError("give dim, the width of an embedding, to make a store in memory")
        engine = MemoryEngine(dim, num_thresholds or 0)
        return "memory", engine, HotIndex(engine, search, target_recall)
    if uri.startswith("milvus:"):
        milvus = MilvusEngine(uri.removeprefix("milvus:"), dim, num_thresholds, read_only)
        return "milvus", milvus, MilvusSearch(milvus, search, target_recall, read_only)
    engine = LanceEngine(Path(uri).absolute(), dim, num_thresholds, read_only)
    return "lancedb", engine, HotIndex(engine, search, target_recall)
