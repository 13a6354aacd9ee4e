"""`Decoded`: what a decoder wrote, and in how many passes; `GreedyComparison`: whether it is the model's own text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnflow._core.results import Result


@dataclass(frozen=True)
class Decoded(Result):
    """New tokens of each sequence, and what they took.

    Attributes:
        tokens: the new token ids of each sequence, up to its end-of-text token (included) if it wrote one.
        passes: forward passes of the model, the prompt's included; sequences of a batch share them.
        drafted: tokens that were drafted and then checked, of lookahead; 0 of other decoders.
        accepted: how many of those were what the model itself would have written.
    """

    tokens: tuple[tuple[int, ...], ...]
    passes: int
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that one pass added to a sequence, on average; 0 where nothing was written."""
        written = sum(map(len, self.tokens))
        return written / (self.passes * len(self.tokens)) if written else 0.0

    def rows(self) -> Sequence[Mapping[str, object]]:
        """One row for each sequence."""
        return [
            {"sequence": number, "tokens": " ".join(map(str, tokens)), "passes": self.passes}
            for number, tokens in enumerate(self.tokens)
        ]

    def __str__(self) -> str:
        written = sum(map(len, self.tokens))
        drafts = f", {self.accepted} of {self.drafted} drafts accepted" if self.drafted else ""
        return f"{written} new tokens in {self.passes} passes: {self.tokens_per_pass:.2f} a pass{drafts}"


@dataclass(frozen=True)
class GreedyComparison(Result):
    """Greedy text of a lossless decoder against that of the model itself.

    Attributes:
        length: new tokens of the model itself.
        passes: that the lossless decoder took.
        divergence: number of the first new token that differs; None if none does.
        margin: there, by how much the logit of the model's best token exceeds the second; None without a divergence.
        scale: there, the largest absolute logit.
        tolerance: the relative difference that rounding may make: the square root of the precision's unit.
    """

    length: int
    passes: int
    divergence: int | None
    margin: float | None
    scale: float | None
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether texts are equal, or part where the two best tokens are equal but for rounding."""
        if self.divergence is None or self.margin is None or self.scale is None:
            return self.divergence is None
        return self.margin <= self.tolerance * self.scale

    def __str__(self) -> str:
        if self.divergence is None:
            return f"{self.length} tokens in {self.passes} passes, all as the model's own"
        cause = "rounding" if self.ok else "more than rounding"
        return (
            f"the texts part at new token {self.divergence} of {self.length}, where the two best logits are "
            f"{self.margin:.2g} apart ({cause}: the largest is {self.scale:.3g}, the tolerance {self.tolerance:.1e})"
        )
