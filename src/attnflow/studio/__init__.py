"""The studio: a local web page for drawing masks and seeing the information flow under them."""

from attnflow.studio.serving import serve

__all__ = ["serve"]


def __dir__() -> list[str]:
    return __all__
