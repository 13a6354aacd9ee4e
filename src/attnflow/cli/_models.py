"""Models that commands name."""

from attnflow.cli._options import load

__all__ = ["load"]
