"""Masked places that are filled a few at a time, the surest first."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnflow._core.checks import integer, number
from attnflow.tasks.hf.decoding_choice import Choice


class Fill:
    """The places of each sequence that are being decoded, partly masked (MaskGIT's schedule, arXiv:2202.04200).

    Attributes:
        tokens: the ids that stand there; the mask token where nothing does yet.
        hidden: where nothing stands yet.
    """

    def __init__(self, tokens: Int[Tensor, "batch places"], hidden: Bool[Tensor, "batch places"]) -> None:
        self.tokens, self.hidden = tokens, hidden

    @property
    def done(self) -> bool:
        """Whether every place holds a token."""
        return not bool(self.hidden.any())

    def reveal(
        self,
        logits: Float[Tensor, "batch places vocabulary"],
        choice: Choice,
        per_pass: int,
        threshold: float | None,
    ) -> None:
        """Fill the `per_pass` surest hidden places of each sequence, and all that are as sure as `threshold`."""
        logits = logits.to(self.tokens.device)
        drawn, chances = choice.draw(logits)
        sure = chances.gather(-1, drawn[..., None])[..., 0].masked_fill(~self.hidden, -1.0)
        rank = sure.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        now = rank < per_pass
        if threshold is not None:
            now |= sure >= threshold
        now &= self.hidden
        self.tokens = torch.where(now, drawn, self.tokens)
        self.hidden = self.hidden & ~now


def schedule(per_pass: int | None, threshold: float | None, places: int) -> tuple[int, float | None]:
    """Checked: how many places a pass fills at least (None: all), and how sure others must be."""
    least = places if per_pass is None else integer("per_pass", per_pass, 1, max(places, 1))
    if threshold is None:
        return least, None
    value = number("threshold", threshold, 0.0)
    if per_pass is None:
        raise ValueError("threshold goes with per_pass, the number of places to fill at least; all are filled at once")
    return least, value
