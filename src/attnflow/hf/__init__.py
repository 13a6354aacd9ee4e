"""Hugging Face: run transformers models under our masks, and load the models that demos and commands use."""

from importlib.util import find_spec

from attnflow._core.errors import MissingExtra

if find_spec("transformers") is None:
    raise MissingExtra("transformers", "hf", "attnflow.hf")

from attnflow.hf.attach import MaskHandle, use_mask

__all__ = ["MaskHandle", "use_mask"]
