"""The one zoo of tiny random models: every family that a test runs, made in milliseconds, and what they run on.

`tiny` makes two layers of width 32, 4 heads and a vocabulary of 50 for most tests; `deep` makes three layers, for
faults that have a layer before and after them; `ZOO[name].build()` is `tiny` with fixed weights and plain attention.
"""

from __future__ import annotations

from tests.models.make import DEEP_VOCABULARY, ZOO, deep, modular, outputs, tiny, tokens
from tests.models.options import WIDTH, WINDOW
from tests.models.table import BIDIRECTIONAL, CAUSAL, HYBRID, MODULAR, WITHOUT_INTERFACE, TinyModel

__all__ = [
    "BIDIRECTIONAL",
    "CAUSAL",
    "DEEP_VOCABULARY",
    "HYBRID",
    "MODULAR",
    "WIDTH",
    "WINDOW",
    "WITHOUT_INTERFACE",
    "ZOO",
    "TinyModel",
    "deep",
    "modular",
    "outputs",
    "tiny",
    "tokens",
]
