"""The store of entries: durable, searchable and editable while a model runs.

`store.py` is what users call; `backend.py` says what a backend does; `lance.py`, `memory.py` and `milvus_search.py` are
the backends; `cached_index.py` is the index in memory of the first two.
"""

from attnflow.knowledge.store.entry import Entry, StoreStats
from attnflow.knowledge.store.errors import NewerFormat, NotAStore, ReadOnly, StoreError, StoreLocked
from attnflow.knowledge.store.store import Store

__all__ = ["Entry", "NewerFormat", "NotAStore", "ReadOnly", "Store", "StoreError", "StoreLocked", "StoreStats"]
