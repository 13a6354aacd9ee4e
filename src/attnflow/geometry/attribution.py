"""Why a query attended to a key: a score before the softmax as a sum over pairs of what each sublayer wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from attnflow._core import checks
from attnflow._core.markup import part_name
from attnflow._core.results import Result
from attnflow.models.passes.recording import ComponentName


class ScoreTerm(NamedTuple):
    """One term of a score: how much the pair of components moves log a_ij (`centred`), and its size (`raw`)."""

    head: int
    key: int  # position
    query_component: ComponentName
    key_component: ComponentName
    value: float  # centred
    raw: float


@dataclass(frozen=True, eq=False)
class ScoreAttribution(Result):
    """The scores of one query, in one head or in all, as sums of terms t(c, c') of pairs of components.

    With one head the tensors have the axes below; with `head=None` each has a leading axis of `heads`.
    """

    model: str
    layer: int
    head: int | None
    heads: tuple[int, ...]  # those that the tensors hold
    attention: Literal["self", "cross"]
    query: int
    query_token: str
    keys: tuple[int, ...]  # positions
    tokens: tuple[str, ...]  # texts of the keys
    components: tuple[ComponentName, ...]  # of the query's stream
    key_components: tuple[ComponentName, ...]  # of the keys' stream: the same, except in cross-attention
    raw: Float64[Tensor, "*heads keys query_components key_components"]
    constants: Mapping[str, Float64[Tensor, "*heads keys"]]  # "biases", and where present "positions", "attached bias"
    scores: Float64[Tensor, "*heads keys"]  # what the model computed, before a softcap and the softmax
    weights: Float64[Tensor, "*heads keys"]
    slope: Float64[Tensor, "*heads keys"]  # d cap(score) / d score; 1 without a softcap
    expected: Float64[Tensor, "*heads query_components key_components"]  # sum_k a_ik slope_k t_ik over all keys
    expected_constants: Mapping[str, Float64[Tensor, "*heads"]]  # the same of each constant
    error: float  # largest difference between sum and score, relative to the range of the row
    against: int | None = None  # the last of the keys, where the first one is compared with it

    @property
    def constant(self) -> Tensor:
        """The part of each score that no pair of components makes: biases of projections, positions, added biases."""
        return torch.stack(list(self.constants.values())).sum(0)

    @property
    def centred(self) -> Tensor:
        """t_ij - sum_k a_ik t_ik: the derivative of log a_ij by the size of the term, like `raw`.

        With a softcap each term is first multiplied by the slope of the cap at its score.
        """
        return self.raw * self.slope[..., None, None] - self.expected[..., None, :, :]

    @property
    def centred_constants(self) -> dict[str, Tensor]:
        """Each part of the constant, centred like the terms; only the biases are under a softcap."""
        return {
            name: values * (self.slope if name == "biases" else 1.0) - self.expected_constants[name][..., None]
            for name, values in self.constants.items()
        }

    def top(self, k: int = 10, key: int | None = None, *, raw: bool = False) -> list[ScoreTerm]:
        """List the k terms of largest magnitude, centred (or `raw`), of all keys or of the key at one position."""
        count = checks.integer("k", k, 1)
        chosen = range(len(self.keys)) if key is None else [self._column(key)]
        raws, centred = self._with_heads(self.raw)[:, chosen], self._with_heads(self.centred)[:, chosen]
        order = (raws if raw else centred).abs().flatten().topk(min(count, raws.numel())).indices
        places = zip(*(axis.tolist() for axis in torch.unravel_index(order, raws.shape)), strict=True)
        return [
            ScoreTerm(
                self.heads[h],
                self.keys[chosen[j]],
                self.components[c],
                self.key_components[d],
                float(centred[h, j, c, d]),
                float(raws[h, j, c, d]),
            )
            for h, j, c, d in places
        ]

    def contrast(self, k: int = 10) -> list[ScoreTerm]:
        """List the k terms that most favour or oppose the first key: raw terms of both keys, less each other.

        With `contrast_constant` all of them sum to the difference of the two scores, before a softcap. `value` is what
        the term adds for the first key, in the scores' own unit.

        Raises:
            ValueError: the result compares no keys, or holds several heads: pass `against` and a head to `attribute`.
        """
        count = checks.integer("k", k, 1)
        if self.against is None or self.head is None:
            raise ValueError("expected one head and a key to compare with: af.geometry.attribute(..., against=key)")
        terms = self.raw[0] - self.raw[1]
        order = terms.abs().flatten().topk(min(count, terms.numel())).indices
        pairs = zip(*(axis.tolist() for axis in torch.unravel_index(order, terms.shape)), strict=True)
        return [
            ScoreTerm(self.head, self.keys[0], self.components[c], self.key_components[d], float(value), float(value))
            for (c, d), value in zip(pairs, terms.flatten()[order].tolist(), strict=True)
        ]

    @property
    def contrast_constant(self) -> float:
        """What no pair of components makes of the difference of the two scores."""
        return float(self.constant[0] - self.constant[1])

    def rows(self) -> Sequence[Mapping[str, object]]:
        """One row for each head, key and pair of components."""
        raw, centred = self._with_heads(self.raw), self._with_heads(self.centred)
        return [
            {
                "layer": self.layer,
                "head": head,
                "query": self.query,
                "key": key,
                "token": token,
                "query_component": str(first),
                "key_component": str(second),
                "raw": raw_value,
                "centred": centred_value,
            }
            for h, head in enumerate(self.heads)
            for key, token, raws, values in zip(
                self.keys, self.tokens, raw[h].tolist(), centred[h].tolist(), strict=True
            )
            for first, raw_row, row in zip(self.components, raws, values, strict=True)
            for second, raw_value, centred_value in zip(self.key_components, raw_row, row, strict=True)
        ]

    def _column(self, key: object) -> int:
        position = checks.integer("key", key)
        if position not in self.keys:
            raise ValueError(f"key must be one of the positions {checks.preview(self.keys)}, got {position}")
        return self.keys.index(position)

    def _with_heads(self, tensor: Tensor) -> Tensor:
        return tensor if self.head is None else tensor[None]

    def __repr__(self) -> str:
        where = f"layer {self.layer}, all heads" if self.head is None else part_name(self.layer, "head", self.head)
        return (
            f"ScoreAttribution({self.model}, {where}, query {self.query} {self.query_token!r}, "
            f"{len(self.keys)} keys, {len(self.components)} x {len(self.key_components)} components, "
            f"error {self.error:.1g})"
        )


def telling(result: ScoreAttribution) -> list[int]:
    """Return the numbers of the keys that choose a head by their weight: not the first one and the query itself."""
    usual = {result.query, min(result.keys)} if result.attention == "self" else set[int]()
    return [index for index, position in enumerate(result.keys) if position not in usual]
