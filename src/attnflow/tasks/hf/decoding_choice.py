"""Which token a row of logits becomes: the best one, or one drawn as transformers' `generate` draws it."""

from __future__ import annotations

from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from attnflow._core.checks import integer, number


class Choice:
    """Greedy, unless a temperature, `top_k` or `top_p` is given: then tokens are drawn, on the CPU.

    Attributes:
        greedy: whether the best token is taken.
    """

    def __init__(
        self,
        temperature: float | None,
        top_k: int | None,
        top_p: float | None,
        seed: int,
    ) -> None:
        self._warpers = LogitsProcessorList()
        self.greedy = temperature is None and top_k is None and top_p is None
        if temperature is not None:
            temperature = number("temperature", temperature)
            if temperature <= 0:
                raise ValueError(f"temperature must be above 0, got {temperature:g}; leave it out for greedy decoding")
            self._warpers.append(TemperatureLogitsWarper(temperature))
        if top_k is not None:
            self._warpers.append(TopKLogitsWarper(integer("top_k", top_k, 1)))
        if top_p is not None:
            top_p = number("top_p", top_p)
            if not 0 < top_p <= 1:
                raise ValueError(f"top_p must be above 0 and at most 1, got {top_p:g}")
            self._warpers.append(TopPLogitsWarper(top_p))
        self._generator = torch.Generator().manual_seed(integer("seed", seed))

    def probabilities(self, logits: Float[Tensor, "*rows vocabulary"]) -> Float[Tensor, "*rows vocabulary"]:
        """What a token of each row is drawn from: after temperature, top k and top p, in that order."""
        flat = logits.reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
        read = torch.zeros(len(flat), 0, dtype=torch.int64, device=flat.device)  # none of the warpers looks at it
        warped = self._warpers(cast(torch.LongTensor, read), cast(torch.FloatTensor, flat))
        return warped.softmax(dim=-1).reshape(logits.shape)

    def draw(
        self, logits: Float[Tensor, "*rows vocabulary"]
    ) -> tuple[Int[Tensor, "*rows"], Float[Tensor, "*rows vocabulary"]]:
        """(a token of each row, what it was drawn from)."""
        chances = self.probabilities(logits)
        if self.greedy:
            return logits.argmax(dim=-1), chances
        return self.pick(chances), chances

    def pick(self, chances: Float[Tensor, "*rows vocabulary"]) -> Int[Tensor, "*rows"]:
        """A token of each row of probabilities, which need not add up to 1."""
        flat = chances.reshape(-1, chances.shape[-1])
        return torch.multinomial(flat, 1, generator=self._generator).reshape(chances.shape[:-1])

    def uniform(self, count: int) -> Float[Tensor, " count"]:
        """Numbers in [0, 1), for a rule that rejects."""
        return torch.rand(count, generator=self._generator, dtype=torch.float64)
