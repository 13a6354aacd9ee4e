"""Symmetry and directionality of attention's bilinear form W_q^T W_k."""

from attnflow.geometry.attribute import attribute
from attnflow.geometry.attribution import ScoreAttribution
from attnflow.geometry.monitor import monitor
from attnflow.geometry.score import score
from attnflow.geometry.scores import directionality, symmetry
from attnflow.geometry.table import GeometryScores
from attnflow.geometry.training import init_skew_, init_symmetric_, penalty

__all__ = [
    "GeometryScores",
    "ScoreAttribution",
    "attribute",
    "directionality",
    "init_skew_",
    "init_symmetric_",
    "monitor",
    "penalty",
    "score",
    "symmetry",
]


def __dir__() -> list[str]:
    return __all__
