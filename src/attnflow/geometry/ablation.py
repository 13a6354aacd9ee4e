"""Takes one component out of the stream: what scores lose by its terms, with norms moving, and in all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnflow._core.checks import preview
from attnflow.geometry.attribution import ScoreAblation, ScoreAttribution
from attnflow.geometry.row import check_again, product_of

if TYPE_CHECKING:
    from attnflow.models.interception import AttentionCall
    from attnflow.models.stream import ResidualStream


def without(
    stream: ResidualStream, seen: AttentionCall, titles: Mapping[int, str], result: ScoreAttribution, component: str
) -> ScoreAblation:
    """Compare the scores of a result with those of the stream without one component; four passes up to the layer."""
    names = dict.fromkeys((*result.components, *result.key_components))
    if component not in names:
        raise ValueError(f"component must be one of {preview(names)}, got {component!r}")
    keys = list(result.keys)
    stream.complete()
    values = [one.value for one in stream.components]
    index = next(number for number, title in titles.items() if title == component)
    value = values[index]
    assert value is not None  # it has terms
    values[index] = torch.zeros_like(value)

    def scores(call: AttentionCall) -> Tensor:
        rows = torch.stack([product_of(call, head, result.query)[0] for head in result.heads])[:, keys].cpu()
        return rows if result.head is None else rows[0]

    before = scores(seen)
    with stream.still(), torch.no_grad():
        held = scores(stream.query_and_key(values)) - before
        direct = scores(stream.query_and_key(values, held=False)) - before
        total = scores(stream.recomputed(index, torch.zeros_like(value)).call) - before
        check_again(scores(stream.recomputed(index, value).call), before)
    terms = torch.zeros_like(before)
    if component in result.components:
        terms -= result.by_query_component(raw=True)[..., result.components.index(component)]
    if component in result.key_components:
        terms -= result.by_key_component(raw=True)[..., result.key_components.index(component)]
    if component in result.components and component in result.key_components:
        at = result.components.index(component), result.key_components.index(component)
        terms += result.raw[..., at[0], at[1]]
    return ScoreAblation(
        result.model, result.layer, result.head, component, result.query, result.keys, result.tokens, before,
        terms, held, direct, total,
    )  # fmt: skip
