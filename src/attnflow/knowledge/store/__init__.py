"""The store of entries: durable, searchable and editable while a model runs.

`store.py` is what users call; `engine.py` says what a backend must do; `lance.py`, `memory.py` and `milvus.py` are the
backends; `hot_index.py` is the index in memory that serves the first two.
"""

from attnflow.knowledge.store.entry import Entry, Found, StoreStats
from attnflow.knowledge.store.errors import NewerFormat, NotAStore, ReadOnly, StoreError, StoreLocked
from attnflow.knowledge.store.store import Store

__all__ = [
    "Entry",
    "Found",
    "NewerFormat",
    "NotAStore",
    "ReadOnly",
    "Store",
    "StoreError",
    "StoreLocked",
    "StoreStats",
]
