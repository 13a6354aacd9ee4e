"""One index over the rows [E | thresholds] of a knowledge base: exact or approximate search for all layers.

`entry_index.py` is the interface, `exact.py` scores all entries, `lists.py` searches approximately with faiss, and
`arguments.py` checks arrays.
"""

from attnflow.knowledge.certificate import Neighbours
from attnflow.knowledge.index.entry_index import EntryIndex, Mode

__all__ = ["EntryIndex", "Mode", "Neighbours"]
