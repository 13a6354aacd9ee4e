"""Biases on transformers models."""

from importlib.util import find_spec

from attnflow._core.errors import MissingExtra

if find_spec("transformers") is None:
    raise MissingExtra("transformers", "hf", "a bias on a model")

from attnflow.bias.hf.attach import attach
from attnflow.bias.hf.capture import capture
from attnflow.bias.hf.saving import load, save

__all__ = ["attach", "capture", "load", "save"]
