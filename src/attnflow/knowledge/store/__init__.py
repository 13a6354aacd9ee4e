"""The store of entries: durable, searchable and editable while a model runs.

`store.py` is what users call, on `stored.py`, which reads; `backends.py` says what a backend does; `lance.py`,
`memory.py` and `milvus_search.py` are the backends; `cached_index.py` is the index in memory of the first two. In a
directory `table.py` keeps rows, `checksums.py` tells whether they are whole, `check.py` and `rescue.py` help if not.
"""

from attnflow.knowledge.store.check import StoreCheck
from attnflow.knowledge.store.entry import Entry, StoreStats
from attnflow.knowledge.store.errors import Damaged, NewerFormat, NotAStore, ReadOnly, StoreError, StoreLocked
from attnflow.knowledge.store.store import Store

__all__ = [
    "Damaged",
    "Entry",
    "NewerFormat",
    "NotAStore",
    "ReadOnly",
    "Store",
    "StoreCheck",
    "StoreError",
    "StoreLocked",
    "StoreStats",
]
