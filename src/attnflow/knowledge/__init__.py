"""From which store a model reads: feed-forward layers as cross-attention to an explicit knowledge base."""

from attnflow.knowledge.activations import ACTIVATIONS, sparsemax
from attnflow.knowledge.attention import Folded, GeneralizedCrossAttention
from attnflow.knowledge.base import KnowledgeBase

__all__ = ["ACTIVATIONS", "Folded", "GeneralizedCrossAttention", "KnowledgeBase", "sparsemax"]
