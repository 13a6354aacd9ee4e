"""Biases on transformers models."""

from importlib.util import find_spec

from attnflow._core.errors import MissingExtra

if find_spec("transformers") is None:
    raise MissingExtra("transformers", "hf", "a bias on a model")

from attnflow.bias.hf.attach import attach, detach, disabled
from attnflow.bias.hf.capture import capture, capturing
from attnflow.bias.hf.documents import read_documents
from attnflow.bias.hf.packing import Packed
from attnflow.bias.hf.saving import load, save_pretrained
from attnflow.bias.hf.strength import strength
from attnflow.bias.hf.summary import BiasSummary, summary
from attnflow.bias.hf.train import Trained, train
from attnflow.bias.hf.training import BiasTrainer, TrainingConfig, trainer

__all__ = [
    "BiasSummary",
    "BiasTrainer",
    "Packed",
    "Trained",
    "TrainingConfig",
    "attach",
    "capture",
    "capturing",
    "detach",
    "disabled",
    "load",
    "read_documents",
    "save_pretrained",
    "strength",
    "summary",
    "train",
    "trainer",
]
