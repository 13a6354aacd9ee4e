"""The form between tokens at a distance under rotary positions, M_r = W_q^T R_{-r} W_k for a key r places before.

R_p turns the pair of entries c by p times the frequency c. Frequencies are those that a module of the model keeps, and
the pairs those for which they turn what the keys' weights made into the keys that attention received.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.geometry.fold import NormPass, NotFolded, after, in_half
from attnflow.geometry.in_use import source_of
from attnflow.models.weights.attention import AttentionLayer
from attnflow.models.weights.families.rows import Selected

Order = Literal["halves", "neighbours"]
_CLOSE: Final = 1e-4  # of the largest entry
_CLOSE_IN_HALF: Final = 0.03  # where keys are rounded to half precision


@dataclass(frozen=True, eq=False)
class Rotary:
    frequencies: Tensor  # float64, one for each pair of entries of a head; the other entries are not turned
    order: Order  # which entries are a pair

    def turn(self, heads: Tensor, places: Tensor) -> Tensor:
        """Turn heads [..., head_dim] by R_p, p from `places` [...]."""
        pairs = len(self.frequencies)
        first = torch.arange(pairs, device=heads.device) * (1 if self.order == "halves" else 2)
        second = first + (pairs if self.order == "halves" else 1)
        angle = places[..., None].to(self.frequencies) * self.frequencies
        cosine, sine = angle.cos().to(heads), angle.sin().to(heads)
        turned = heads.clone()
        turned[..., first] = heads[..., first] * cosine - heads[..., second] * sine
        turned[..., second] = heads[..., second] * cosine + heads[..., first] * sine
        return turned

    def at(self, key: Tensor, head_dim: int, distance: int) -> Tensor:
        """R_{-distance} W_k of every head, for weights [heads * head_dim, d]."""
        heads = key.unflatten(0, (-1, head_dim)).mT
        return self.turn(heads, torch.tensor(-distance).expand(heads.shape[:-1])).mT.flatten(0, 1)


def rotary_of(model: nn.Module, layer: AttentionLayer, seen: NormPass | NotFolded) -> Rotary:
    """Find what turned the keys of a layer in a pass; raises where that is not known, or nothing did."""
    if isinstance(seen, NotFolded) or layer.name not in seen.attention or not isinstance(layer.key_rows, Selected):
        why = seen if isinstance(seen, NotFolded) else "its keys are not read where attention receives them"
        raise UnsupportedArchitecture(f"{layer.name}: no scores by distance: {why}")
    given = seen.attention[layer.name][1].key[0]
    received, close = given.double(), _CLOSE_IN_HALF if in_half(given) else _CLOSE
    heads, size, width = received.shape
    norm = after(layer.key_rows, seen)[1]
    made = seen.made[source_of(layer.key_rows)] if norm is None else norm.output
    made = made.reshape(-1, size, made.shape[-1])[0] if norm is None else made.reshape(-1, heads * size * width)[0]
    made = made[:, layer.key_rows.index] if norm is None else made
    by_token, by_head = (made.reshape(shape).double() for shape in ((size, heads, width), (heads, size, width)))
    candidates = [by_token.transpose(0, 1), *([] if norm is None else [by_head])]
    if any(_error(each, received) < close for each in candidates):
        raise UnsupportedArchitecture(f"{layer.name} turns no keys: without rotary positions distance changes nothing")
    places = torch.arange(size, device=received.device).expand(heads, size)
    rotations = [
        Rotary(buffer.double(), order)
        for name, buffer in model.named_buffers()
        for order in get_args(Order)
        if name.endswith("inv_freq") and 2 * buffer.numel() <= width
    ]
    errors = [min(_error(one.turn(each, places), received) for each in candidates) for one in rotations]
    if not errors or not min(errors) < close:
        raise UnsupportedArchitecture(
            f"{layer.name}: no scores by distance: the frequencies that modules keep (inv_freq) do not turn its keys "
            "into those that attention received"
        )
    return rotations[errors.index(min(errors))]


def _error(one: Tensor, other: Tensor) -> float:
    """How far two tensors are apart up to a factor, of the largest entry."""
    factor = (one * other).sum() / one.square().sum()
    return float((factor * one - other).abs().amax() / other.abs().amax())
