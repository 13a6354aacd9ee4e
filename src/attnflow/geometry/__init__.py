"""In which geometry a model attends: symmetry and directionality of the bilinear form W_q^T W_k."""

from attnflow.geometry.initialise import init_skew_, init_symmetric_
from attnflow.geometry.monitor import monitor
from attnflow.geometry.penalty import penalty
from attnflow.geometry.score import score
from attnflow.geometry.scores import directionality, symmetry
from attnflow.geometry.table import GeometryScores

__all__ = [
    "GeometryScores",
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
