"""A text or token ids as the inputs of an audit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnflow.models.loaded import Loaded


def text_inputs(loaded: Loaded, inputs: str | Sequence[int], limit: int | None = None) -> dict[str, Tensor]:
    """Arguments of the model's forward: the tokens, and the same tokens reversed as a second sequence of the batch.

    With two sequences an audit also sees what crosses a batch. For an encoder-decoder they stand on both sides.

    Args:
        loaded: the model, with its tokenizer if `inputs` is a text.
        inputs: a text, or token ids.
        limit: tokens that are read at most.

    Raises:
        ValueError: fewer than two tokens, token ids outside of the vocabulary, or a text without a tokenizer.
    """
    model: Any = loaded.model
    if isinstance(inputs, str):
        if loaded.tokenizer is None:
            raise ValueError("a text needs the model's tokenizer, and none is loaded: give token ids")
        inputs = loaded.tokenizer(inputs, truncation=limit is not None, max_length=limit)["input_ids"]
    ids = [int(token) for token in inputs][:limit]
    if len(ids) < 2:
        raise ValueError(f"expected at least 2 tokens, got {len(ids)}: nothing can flow")
    vocabulary = model.get_input_embeddings().num_embeddings
    beyond = next((token for token in ids if not 0 <= token < vocabulary), None)
    if beyond is not None:
        raise ValueError(f"token ids of this model lie in [0, {vocabulary}), got {beyond}")
    tokens = torch.tensor([ids, ids[::-1]])
    if getattr(model.config, "is_encoder_decoder", False):
        return {"input_ids": tokens, "decoder_input_ids": tokens[:, :-1]}  # an audit tells them by their lengths
    return {"input_ids": tokens}
