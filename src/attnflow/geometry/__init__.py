"""In which geometry a model attends: symmetry and directionality of the bilinear form W_q^T W_k."""

from attnflow.geometry.published import Comparison, PublishedScores, published_of, published_scores
from attnflow.geometry.scores import directionality, symmetry
from attnflow.geometry.table import GeometryScores, Quartiles, ScoreRow, Summary

__all__ = [
    "Comparison",
    "GeometryScores",
    "PublishedScores",
    "Quartiles",
    "ScoreRow",
    "Summary",
    "directionality",
    "published_of",
    "published_scores",
    "symmetry",
]
