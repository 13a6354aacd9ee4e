"""The flow of one answer: who told the last token, how much, why the head looked there, and from which entries."""

from attnflow.explain.reading import answer, reading, weights

__all__ = ["answer", "reading", "weights"]


def __dir__() -> list[str]:
    return __all__
