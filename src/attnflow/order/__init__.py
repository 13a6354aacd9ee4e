"""The order that a mask generates: closure, classes, Hasse diagram, depth, receptive fields and witness paths."""

from attnflow.order.flow import Flow, analyze

__all__ = ["Flow", "analyze"]


def __dir__() -> list[str]:
    return __all__
