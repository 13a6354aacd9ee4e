"""Architectures of this package, of which transformers learns when a checkpoint names one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

# By `model_type`: what makes its classes known. The top level fills it in, as rooms above this one define them.
REGISTRATIONS: Final[dict[str, Callable[[], object]]] = {}
