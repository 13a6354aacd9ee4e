"""The studio: a page on this machine's loopback on which masks are drawn, and what flows under them is seen."""

from attnflow.studio.serving import serve

__all__ = ["serve"]


def __dir__() -> list[str]:
    return __all__
