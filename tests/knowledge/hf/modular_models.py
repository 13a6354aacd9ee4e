"""Tiny modular models: 2 blocks of width 32, GQA 4:2, 24 entries of width 20 read by 2 heads, vocabulary of 50."""

from __future__ import annotations

import torch

from attnflow.knowledge import ModularConfig, ModularForCausalLM

OPTIONS = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_entries": 24,
    "entry_dim": 20,
    "num_knowledge_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


def modular(dtype: torch.dtype = torch.float64, disturbed: bool = True, **changes: object) -> ModularForCausalLM:
    """A model without dropout, in evaluation mode; disturbed: no parameter is 0 or 1 throughout."""
    torch.manual_seed(0)
    model = ModularForCausalLM(ModularConfig(**{**OPTIONS, **changes}))
    if disturbed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def tokens(batch: int = 2, length: int = 7) -> torch.Tensor:
    """Random token ids, without padding."""
    return torch.randint(3, 50, (batch, length))
