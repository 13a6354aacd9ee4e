"""A tokenizer and a model of seconds that benchmarks can be asked of."""

from __future__ import annotations

from typing import Any

import torch

from experiments.runner.text import word_pieces
from tests.models import CAUSAL

VOCABULARY = 270
SIZES = {"max_position_embeddings": 256, "pad_token_id": 268, "eos_token_id": 267, "bos_token_id": 267}


def reader() -> Any:
    """Byte pairs: any text can be read."""
    return word_pieces(["alpha beta gamma delta"], VOCABULARY)


def language_model() -> Any:
    """A Llama that reads 256 of its tokens."""
    torch.manual_seed(0)
    return CAUSAL["Llama"].make(vocab_size=VOCABULARY, **SIZES)
