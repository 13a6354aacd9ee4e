"""One index over the augmented rows [E | thresholds] of a knowledge base: exact or approximate search for all layers.

entry_index.py is what users see; exact.py and partition.py search; rows.py holds the rows;
readers_writer.py keeps threads apart.
"""

from attnflow.knowledge.index.entry_index import EntryIndex, Mode, SearchMode
from attnflow.knowledge.index.neighbours import Neighbours

__all__ = ["EntryIndex", "Mode", "Neighbours", "SearchMode"]
