"""attnflow: design, prove, train and read the directed information flow of Transformer attention."""

from attnflow import masks
from attnflow._core.version import __version__

__all__ = ["__version__", "masks"]
