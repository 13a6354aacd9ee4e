"""One index over the rows [E | thresholds] of a knowledge base: exact or approximate search for all layers.

`entry_index.py` is what users of the index see; `exact.py` computes all scores block by block; `lists.py` reads only
the lists of near entries that promise most; `arguments.py` checks arrays of numbers.
"""

from attnflow.knowledge.certificate import Neighbours
from attnflow.knowledge.index.entry_index import EntryIndex, Mode

__all__ = ["EntryIndex", "Mode", "Neighbours"]
