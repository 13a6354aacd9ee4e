"""Symmetry and directionality of attention's bilinear form W_q^T W_k."""

from attnflow.geometry.monitor import monitor
from attnflow.geometry.pairs import pairs
from attnflow.geometry.reading import attribute, reading
from attnflow.geometry.score import score
from attnflow.geometry.scores import directionality, symmetry
from attnflow.geometry.training import init_skew_, init_symmetric_, penalty

__all__ = [
    "attribute",
    "directionality",
    "init_skew_",
    "init_symmetric_",
    "monitor",
    "pairs",
    "penalty",
    "reading",
    "score",
    "symmetry",
]


def __dir__() -> list[str]:
    return __all__
