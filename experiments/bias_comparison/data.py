"""The texts of the comparison: one that models start from, and a new one that they are tuned to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from attnflow.models import load_model
from experiments.bias_comparison.settings import Comparison
from experiments.runner.packing import Drawn
from experiments.runner.text import (
    TEST,
    VALIDATION,
    learned_from_training,
    named_tokenizer,
    split_works,
    streamed,
    works,
)

POEMS: Final = ("rape_of_lucrece", "passionate_pilgrim", "phoenix_and_the_turtle")  # to tune to
_POEM_FOR_CHOOSING, _POEMS_FOR_RESULTS = "lovers_complaint", "sonnets"


@dataclass(frozen=True)
class Rows:
    training: Any  # what batches are drawn from
    choosing: Tensor  # int64[rows, length], for choosing the learning rate
    test: Tensor  # likewise, for the results
    mask_token: int  # of the tokenizer, or -1

    def batch(self, seed: int, place: int, size: int) -> Tensor:
        """The rows of a pass: int64[size, length], a function of the seed and of the place of the pass alone."""
        drawn = Drawn(self.training, (place + 1) * size, seed)
        return torch.stack([drawn[place * size + number]["input_ids"] for number in range(size)])


@dataclass(frozen=True)
class Texts:
    old: Rows
    new: Rows
    vocabulary: int


def texts_of(config: Comparison) -> Texts:
    if isinstance(config.tokenizer, int):
        tokenizer = learned_from_training(config.tokenizer)
    elif config.tokenizer:
        tokenizer = named_tokenizer(config.tokenizer)
    else:
        model = next(part.model for part in config.parts if isinstance(part.model, str))
        _, tokenizer = load_model(model, dtype=config.dtype)
    old = _rows(config.text, config, tokenizer)
    new = old if config.new_text == config.text else _rows(config.new_text, config, tokenizer)
    return Texts(old, new, len(cast(Any, tokenizer)))


def _rows(source: str, config: Comparison, tokenizer: Any) -> Rows:
    mask = getattr(tokenizer, "mask_token_id", None)
    token = -1 if mask is None else mask
    if source in ("shakespeare", "poems"):
        held = {*VALIDATION, *TEST}
        poems = (*POEMS, _POEM_FOR_CHOOSING, _POEMS_FOR_RESULTS)
        if source == "poems":
            training, choosing, test = POEMS, (_POEM_FOR_CHOOSING,), (_POEMS_FOR_RESULTS,)
        else:
            training = tuple(name for name in works() if name not in {*held, *poems})
            choosing, test = VALIDATION, tuple(name for name in TEST if name not in poems)
        split = split_works(tokenizer, config.length, training, choosing, test, config.held_out)
        return Rows(split.training, split.validation.tokens, split.test.tokens, token)
    rows, first, second = streamed(source, tokenizer, config.length, config.rows, config.held_out)
    return Rows(rows, first, second, token)
