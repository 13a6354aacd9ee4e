"""Biases on transformers models."""

from importlib.util import find_spec

from attnflow._core.errors import MissingExtra

if find_spec("transformers") is None:
    raise MissingExtra("transformers", "hf", "a bias on a model")

from attnflow.bias.hf.attach import attach, handle
from attnflow.bias.hf.capture import capture
from attnflow.bias.hf.saving import load, save
from attnflow.bias.hf.trainer import trainer
from attnflow.bias.hf.training import train

__all__ = ["attach", "capture", "handle", "load", "save", "train", "trainer"]
