"""One index over the augmented rows [E | thresholds] of a knowledge base: exact or approximate search for all layers.

entry_index.py is what users see; exact.py holds the rows and searches them all; partition.py searches the lists that
promise most (lists.py, around centroids.py), calibration.py measures how many that takes, and upkeep.py decides which
search it is, and follows changes; readers_writer.py keeps threads apart; arguments.py checks.
"""

from attnflow.knowledge.certificate import Neighbours
from attnflow.knowledge.index.entry_index import EntryIndex, Mode
from attnflow.knowledge.index.upkeep import SearchMode

__all__ = ["EntryIndex", "Mode", "Neighbours", "SearchMode"]
