"""How a knowledge base ages: which entries fire, which are duplicates, which encoder wrote them."""

from attnflow.knowledge.monitor.activity import Activity, ActivityReport, LayerActivity
from attnflow.knowledge.monitor.duplication import Duplicates, duplicates
from attnflow.knowledge.monitor.reembedding import Drift, Reembedded, VersionDrift, drift, reembed

__all__ = [
    "Activity",
    "ActivityReport",
    "Drift",
    "Duplicates",
    "LayerActivity",
    "Reembedded",
    "VersionDrift",
    "drift",
    "duplicates",
    "reembed",
]
