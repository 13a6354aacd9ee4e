"""One index over the augmented rows [E | thresholds] of a knowledge base: exact or approximate search for all layers.

entry_index.py is what users see; exact.py holds the rows and searches them all, partition.py searches those that
promise most; readers_writer.py keeps threads apart; arguments.py checks.
"""

from attnflow.knowledge.certificate import Neighbours
from attnflow.knowledge.index.entry_index import EntryIndex, Mode, SearchMode

__all__ = ["EntryIndex", "Mode", "Neighbours", "SearchMode"]
