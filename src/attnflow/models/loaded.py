"""What `Subject` answers, as functions of a module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from attnflow.models.arguments import CACHES
from attnflow.models.subject import Loaded, Subject, Text, own_name, unwrapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

__all__ = ["CACHES", "Loaded", "Text", "own_name", "unwrapped"]


def split(model: nn.Module | Loaded) -> tuple[nn.Module, PreTrainedTokenizerBase | None]:
    subject = Subject.of(model)
    return subject.model, subject.tokenizer


def model_inputs(
    model: nn.Module, inputs: object, tokenizer: PreTrainedTokenizerBase | None, sequence: int = 0
) -> dict[str, Tensor]:
    return Subject(model, tokenizer).read(inputs, ids=True)


def any_inputs(model: nn.Module, inputs: object, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Tensor]:
    return Subject(model, tokenizer).read(inputs)


def text_inputs(loaded: Loaded, inputs: str | Sequence[int], limit: int | None = None) -> dict[str, Tensor]:
    return Subject.of(loaded).sample(inputs, limit)


def token_texts(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    return Subject(nn.Identity(), tokenizer).texts(ids)


def sequence_texts(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    return Subject(nn.Identity(), tokenizer).texts_in_sequence(ids)


def sparing(model: nn.Module) -> dict[str, Any]:
    return Subject(model).sparing


def accepts(model: nn.Module, name: str) -> bool:
    return Subject(model).accepts(name)


def accepted(model: nn.Module, *names: str) -> str | None:
    return Subject(model).accepted(*names)


def takes(function: Callable[..., object], name: str) -> bool:
    return name in inspect.signature(function).parameters


def embedding_table(model: nn.Module) -> nn.Embedding | None:
    return Subject(model).embedding


def ordinary_tokens(model: PreTrainedModel, count: int) -> list[int]:
    return Subject(model).ordinary_tokens(count)


def model_name(model: nn.Module) -> str:
    return Subject(model).name
