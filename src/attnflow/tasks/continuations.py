"""What `score` returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnflow._core.results import Result


@dataclass(frozen=True)
class Scores(Result):
    """The continuations of requests under a model.

    Attributes:
        log_probs: for each request, the sum of the log-probabilities of its continuation's tokens, in nats.
        greedy: whether each of these tokens is the most probable one.
        tokens_before: tokens of all requests, each run by itself.
        tokens_after: tokens that were run.
        passes: forward passes.
    """

    log_probs: tuple[float, ...]
    greedy: tuple[bool, ...]
    tokens_before: int
    tokens_after: int
    passes: int

    def rows(self) -> Sequence[Mapping[str, object]]:
        """One row for each request."""
        pairs = enumerate(zip(self.log_probs, self.greedy, strict=True))
        return [{"request": number, "log_prob": value, "greedy": greedy} for number, (value, greedy) in pairs]

    def __str__(self) -> str:
        return (
            f"{len(self.log_probs):,} requests in {self.passes:,} passes, "
            f"{self.tokens_before:,} tokens -> {self.tokens_after:,}"
        )
