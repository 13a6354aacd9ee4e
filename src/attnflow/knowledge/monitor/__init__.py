"""How a knowledge base ages: which entries fire, which are duplicates, which encoder wrote them."""

from attnflow.knowledge.monitor.activity import activity
from attnflow.knowledge.monitor.duplication import duplicates
from attnflow.knowledge.monitor.reembedding import drift, reembed

__all__ = ["activity", "drift", "duplicates", "reembed"]
