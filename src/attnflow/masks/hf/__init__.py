"""Masks on transformers models."""

from importlib.util import find_spec

from attnflow._core.errors import MissingExtra

if find_spec("transformers") is None:
    raise MissingExtra("transformers", "hf", "a mask on a model")

from attnflow.masks.hf.attach import MaskHandle, attach
from attnflow.masks.hf.reading import from_model

__all__ = ["MaskHandle", "attach", "from_model"]
