"""What a decoder of transformers is given step by step: a static cache, and the output of an encoder that has run."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import StaticCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import ModelOutput

from attnflow._core.errors import UnsupportedArchitecture


def static_cache(model: nn.Module, length: int) -> StaticCache:
    """A static cache for `length` tokens; `UnsupportedArchitecture` unless a transformers model that takes one."""
    if not isinstance(model, PreTrainedModel) or not cast(Any, model)._can_compile_fullgraph:
        raise UnsupportedArchitecture(f"{type(model).__name__} takes no static cache")
    return StaticCache(config=model.config.get_text_config(), max_cache_len=length)


def encoder_output(output: object, hidden: Tensor) -> ModelOutput:
    """What an encoder returned, or else its states: some decoders read entries of their own, some by index."""
    return output if isinstance(output, ModelOutput) else BaseModelOutput(last_hidden_state=cast(Any, hidden))
