"""The store of entries: durable, searchable and editable while a model runs. It is a thin layer on LanceDB.

Users call `store.py`. `table.py` is its LanceDB table and index, which `approximate.py` asks, and `writer.py` lets one
process write. `rows.py` holds and searches the vectors in memory; `source.py` hands them to models. `entry.py` checks
what a store takes and returns, and `export.py` writes it to files for other programs.
"""

from attnflow.knowledge.store.entry import StoredEntry, StoreStats
from attnflow.knowledge.store.store import Store
from attnflow.knowledge.store.writer import StoreError

__all__ = ["Store", "StoreError", "StoreStats", "StoredEntry"]
