"""From a uri to an engine and what searches it; packages of engines are imported here, on use."""

from __future__ import annotations

from typing import Literal

from attnflow.knowledge.store.engine import Engine, Searcher
from attnflow.knowledge.store.hot_index import HotIndex
from attnflow.knowledge.store.memory import MemoryEngine

SearchMode = Literal["auto", "exact", "approximate"]


def open_backend(
    uri: str, dim: int | None, num_thresholds: int | None, read_only: bool, search: SearchMode, target_recall: float
) -> tuple[str, Engine, Searcher]:
    """The backend's name, its engine and its searcher."""
    if uri == "memory":
        if dim is None:
            raise ValueError("give dim, the width of an embedding, to make a store in memory")
        engine = MemoryEngine(dim, num_thresholds or 0)
        return "memory", engine, HotIndex(engine, search, target_recall)
    raise NotImplementedError(uri)
