"""Hugging Face: run transformers models under our masks, and load the models that demos and commands use."""

from importlib.util import find_spec

from attnflow._core.errors import MissingExtra

if find_spec("transformers") is None:
    raise MissingExtra("transformers", "hf", "attnflow.hf")

from attnflow.hf.attach import MaskHandle, use_mask
from attnflow.hf.loader import Loaded, load_model
from attnflow.hf.packages import MODELS, MissingPackage
from attnflow.hf.text import sample_text

__all__ = ["MODELS", "Loaded", "MaskHandle", "MissingPackage", "load_model", "sample_text", "use_mask"]
