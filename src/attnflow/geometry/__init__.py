"""In which geometry a model attends: symmetry and directionality of the bilinear form W_q^T W_k."""

from attnflow.geometry.initialise import init_skew_, init_symmetric_
from attnflow.geometry.penalty import penalty
from attnflow.geometry.published import Comparison, PublishedScores, published_of, published_scores
from attnflow.geometry.recorder import Recorder
from attnflow.geometry.score import query_keys, score
from attnflow.geometry.scores import directionality, symmetry
from attnflow.geometry.table import GeometryScores, Quartiles, ScoreRow, Summary
from attnflow.models.checkpoints import BadCheckpoint

__all__ = [
    "BadCheckpoint",
    "Comparison",
    "GeometryScores",
    "PublishedScores",
    "Quartiles",
    "Recorder",
    "ScoreRow",
    "Summary",
    "directionality",
    "init_skew_",
    "init_symmetric_",
    "penalty",
    "published_of",
    "published_scores",
    "query_keys",
    "score",
    "symmetry",
]
