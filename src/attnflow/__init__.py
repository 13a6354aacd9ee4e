"""attnflow: design, prove, train and read the directed information flow of Transformer attention."""

from attnflow import masks, order
from attnflow._core.errors import AttnflowError, LeakFound, UnsupportedArchitecture
from attnflow._core.version import __version__

__all__ = ["AttnflowError", "LeakFound", "UnsupportedArchitecture", "__version__", "masks", "order"]
