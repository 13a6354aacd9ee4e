"""The store of entries: durable, searchable and editable while a model runs. A thin layer on LanceDB.

`store.py` is what users call. `table.py` is the LanceDB table that it keeps, `index.py` the vectors in memory
and their search, and `entry.py` what a store gives and takes.
"""

from attnflow.knowledge.store.entry import Entry, StoreStats
from attnflow.knowledge.store.store import Store
from attnflow.knowledge.store.table import StoreError

__all__ = ["Entry", "Store", "StoreError", "StoreStats"]
