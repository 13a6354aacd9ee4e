"""The studio: a page on the local loopback for drawing masks and seeing what flows under them."""

from attnflow.studio.serving import serve

__all__ = ["serve"]


def __dir__() -> list[str]:
    return __all__
