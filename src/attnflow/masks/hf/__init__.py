"""Masks on transformers models."""

from importlib.util import find_spec

from attnflow._core.errors import MissingExtra

if find_spec("transformers") is None:
    raise MissingExtra("transformers", "hf", "a mask on a model")

from attnflow.masks.hf.attach import MaskHandle, attach

__all__ = ["MaskHandle", "attach"]
