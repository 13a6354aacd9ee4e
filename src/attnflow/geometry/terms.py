"""The terms of one row of scores: every pair of components, checked against what the attention received."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.geometry.attribution import ScoreAttribution
from attnflow.geometry.parts import Parts
from attnflow.geometry.row import ScoreRow
from attnflow.models.subject import Subject

if TYPE_CHECKING:
    from attnflow.models.passes.interception import AttentionCall
    from attnflow.models.passes.stream import ResidualStream

CLOSE: Final = 1e-5  # of the range of a row: how far a sum of terms may be from the score


@dataclass(frozen=True, eq=False)
class HeadTerms:
    """The fields of a `ScoreAttribution` for one head, over all keys that its row has."""

    raw: Tensor
    constants: Mapping[str, Tensor]
    scores: Tensor
    weights: Tensor
    slope: Tensor
    error: float

    @property
    def expected(self) -> Tensor:
        return torch.einsum("j,jcd->cd", self.weights * self.slope, self.raw)

    def expected_constant(self, name: str) -> Tensor:
        weights = self.weights * self.slope if name == "biases" else self.weights  # the others are not under a softcap
        return weights @ self.constants[name]


def head_terms(parts: Parts, number: int, head: int, row: ScoreRow, call: AttentionCall, where: str) -> HeadTerms:
    """t_j(c, c') = scaling * q^c . k_j^c' of a head, which is the one of that number in `parts`."""
    group = call.query.shape[1] // call.key.shape[1]
    q, q0 = parts.query[number], parts.query_constant[number]  # [components, head_dim], [head_dim]
    k, k0 = parts.key[head // group], parts.key_constant[head // group]  # [components, keys, head_dim]
    raw = torch.einsum("ch,djh->jcd", row.scaling * q, k)
    biases = row.scaling * (k0 @ (q.sum(0) + q0) + k.sum(0) @ q0)
    error = _error(raw.sum((1, 2)) + biases, row, call.query.dtype)
    if not error <= CLOSE:
        raise UnsupportedArchitecture(
            f"{where}: the terms do not add up to the score that attention received (they differ by {error:.2g} of the "
            f"row's range, {CLOSE:g} is allowed), so that no attribution of it is given. In float32, model.double() "
            "tells rounding from an unknown part"
        )
    scores = row.product
    for added in row.added.values():
        scores = scores + added
    return HeadTerms(raw, {"biases": biases, **row.added}, scores, row.weights, row.slope, error)


def _error(total: Tensor, row: ScoreRow, dtype: torch.dtype) -> float:
    """The largest difference, of the range of the row, or of what rounding makes of scores that are nearly equal."""
    scores = row.product[row.allowed]
    size = float(scores.abs().amax())
    rounded = 16 * torch.finfo(dtype).eps * size
    span = max(float(scores.amax() - scores.amin()), rounded / CLOSE) if len(scores) > 1 else size
    return float((total - row.product)[row.allowed].abs().amax()) / (span or 1.0)


def attribution_of(
    terms: Sequence[HeadTerms], parts: Parts, stream: ResidualStream, keys: list[int], one_head: bool, **place: Any
) -> ScoreAttribution:
    """Join the terms of heads at some keys; each tensor is a copy, so that the result keeps nothing of the pass."""

    def joined(values: Sequence[Tensor]) -> Tensor:
        return values[0] if one_head else torch.stack(list(values))

    zero = torch.zeros_like(terms[0].scores)
    names = dict.fromkeys(name for head in terms for name in head.constants)
    components = stream.names(sorted({*parts.query_components, *parts.key_components}))
    return ScoreAttribution(
        model=Subject(stream.model).name,
        head=place["heads"][0] if one_head else None,
        keys=tuple(keys),
        components=tuple(components[c] for c in parts.query_components),
        key_components=tuple(components[c] for c in parts.key_components),
        raw=joined([head.raw[keys] for head in terms]),
        constants={name: joined([head.constants.get(name, zero)[keys] for head in terms]) for name in names},
        scores=joined([head.scores[keys] for head in terms]),
        weights=joined([head.weights[keys] for head in terms]),
        slope=joined([head.slope[keys] for head in terms]),
        expected=joined([head.expected for head in terms]),
        expected_constants={
            name: joined([head.expected_constant(name) if name in head.constants else zero.sum() for head in terms])
            for name in names
        },
        error=max(head.error for head in terms),
        **place,
    )
