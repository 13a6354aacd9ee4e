"""Where to read and where not to: losses of reading, and text that asks for nothing of a store."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_ROWS: Final = 64  # written at a time


def reading_loss(scores: Tensor, place: Tensor, absent: Tensor) -> Tensor:
    """-log of the weight of the right entry, or of none where it is absent; the mean over tokens and heads."""
    at = place[:, None, None].expand(-1, scores.shape[1], 1)
    right = scores.gather(-1, at).squeeze(-1)
    scores = scores.masked_fill(
        absent[:, None, None] & torch.zeros_like(scores, dtype=torch.bool).scatter(-1, at, True), -math.inf
    )
    total = functional.pad(scores, (1, 0)).logsumexp(dim=-1)
    return (total - torch.where(absent[:, None], 0, right)).mean()


def pool_of(wanted: Tensor, total: int, size: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """`size` entries at least, among them all that are wanted, and where these are."""
    others = torch.randperm(total, generator=draw)[:size].to(wanted.device)
    pool = torch.cat([wanted.unique(), others]).unique()
    return pool, torch.searchsorted(pool, wanted)


def nothing_loss(scores: Float[Tensor, "tokens heads entries"]) -> Tensor:
    """-log of the weight that lies on no entry; the mean over tokens and heads."""
    return functional.pad(scores, (1, 0)).logsumexp(dim=-1).mean()


@torch.no_grad()
def written_by(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, words: Sequence[str], rows: int, length: int, seed: int
) -> Int64[Tensor, "rows length"]:
    """Text of a model's own, each row begun by a word: text to practise on that no data set has to be there for."""
    first = [cast("list[int]", tokenizer(f" {word}", add_special_tokens=False)["input_ids"])[:1] for word in words]
    device = next(model.parameters()).device
    end = int(getattr(tokenizer, "eos_token_id", None) or 0)
    made: list[Tensor] = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for start in range(0, rows, _ROWS):
            ids = torch.tensor([first[row % len(first)] for row in range(start, min(start + _ROWS, rows))])
            made.append(
                cast(Any, model).generate(
                    input_ids=ids.to(device), attention_mask=torch.ones_like(ids).to(device), do_sample=True, top_k=0,
                    temperature=1.0, max_new_tokens=length - 1, min_new_tokens=length - 1, pad_token_id=end,
                )
            )  # fmt: skip
    return torch.cat(made)
