"""How a knowledge base ages: which entries fire, repeat or contradict one another, which encoder wrote them."""

from attnflow.knowledge.monitor.activity import activity
from attnflow.knowledge.monitor.contradiction import contradictions
from attnflow.knowledge.monitor.duplication import duplicates
from attnflow.knowledge.monitor.reembedding import drift, reembed
from attnflow.knowledge.monitor.sparse import sparsity

__all__ = ["activity", "contradictions", "drift", "duplicates", "reembed", "sparsity"]
