"""Queries and keys by component: what each summand of the residual stream has in them, with norms held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.passes.evaluation import still
from attnflow.models.passes.reads import direct_path

if TYPE_CHECKING:
    from attnflow.models.passes.stream import Component, RecordedCall, ResidualStream

_CHECKS = 8  # random directions in which the summands must add up to the stream


@dataclass(frozen=True, eq=False)
class Parts:
    """Queries and keys by component, float64 on the CPU, and the constant rest that no component makes."""

    query_components: list[int]
    key_components: list[int]
    query: list[Tensor]  # for each head: [components, head_dim]
    query_constant: list[Tensor]  # [head_dim]
    key: dict[int, Tensor]  # for each key head: [components, places, head_dim]
    key_constant: dict[int, Tensor]  # [places, head_dim]


def parts_of(stream: ResidualStream, seen: RecordedCall, heads: Sequence[int], at: int, end: int) -> Parts:
    """Read the queries of heads at one position, and the keys before `end`: by products, or else by differentiation."""
    exact = torch.autocast(seen.call.query.device.type, enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), exact:
        direct = _direct(stream, seen, heads, at, end)
    if direct is not None:
        return direct
    with still(stream.model):
        return _differentiated(stream, heads, at, end)


def _direct(stream: ResidualStream, seen: RecordedCall, heads: Sequence[int], at: int, end: int) -> Parts | None:
    """By products of matrices; None where a side has another path, or where the summands are not the whole stream."""
    group = seen.query.shape[1] // seen.key.shape[1]
    queries = [direct_path(seen.query[0, head], slice(at, at + 1), stream.reads) for head in heads]
    keys = {n: direct_path(seen.key[0, n], slice(end), stream.reads) for n in sorted({h // group for h in heads})}
    sides = [side for side in (*queries, *keys.values()) if side is not None]
    if len(sides) < len(queries) + len(keys) or len({side.source.data_ptr() for side in sides}) > 1:
        return None
    of_queries, of_keys = sides[: len(queries)], sides[len(queries) :]
    source = sides[0].source
    draw = torch.Generator().manual_seed(0)
    directions = torch.randn(_CHECKS, source.shape[1], generator=draw, dtype=torch.float64, device="cpu").to(
        source.device
    )
    matrix = torch.cat([*(side.matrix for side in of_keys), directions]).T

    def keep(value: Tensor) -> tuple[Tensor, Tensor] | None:
        if value.numel() != source.numel() or value.shape[-1] != source.shape[1]:
            return None
        flat = value.reshape(source.shape)
        return flat[at].double(), flat[:end].double() @ matrix

    if stream.large:
        with still(stream.model):
            stream.record(keep)
        kept = [component.kept for component in stream.components]
    else:
        kept = [None if one.value is None else keep(one.value) for one in stream.components]
    pairs = [pair for pair in kept if pair is not None]
    if not pairs:
        return None
    used = [n for n, pair in enumerate(kept) if pair is not None]
    at_query, products = (torch.stack([pair[side] for pair in pairs]) for side in (0, 1))
    if not _adds_up(at_query, source[at].double(), source.dtype) or not _adds_up(
        products[..., -_CHECKS:], source[:end].double() @ directions.T, source.dtype
    ):
        return None
    columns = products[..., :-_CHECKS].split([side.matrix.shape[0] for side in of_keys], dim=-1)
    return Parts(
        used,
        used,
        [side.turn((at_query @ side.matrix.T)[:, None])[:, 0].cpu() for side in of_queries],
        [side.constant[0].cpu() for side in of_queries],
        {n: side.turn(own).cpu() for n, side, own in zip(keys, of_keys, columns, strict=True)},
        {n: side.constant.cpu() for n, side in zip(keys, of_keys, strict=True)},
    )


def _adds_up(summands: Tensor, total: Tensor, kind: torch.dtype) -> bool:
    """Whether summands [summands, ..., n] give the total [..., n] up to the rounding of a running sum in `kind`."""
    limit = 4 * len(summands) * torch.finfo(kind).eps * summands.abs().sum(0).square().mean(-1).sqrt()
    return bool(((summands.sum(0) - total).square().mean(-1).sqrt() <= limit).all())


def _differentiated(stream: ResidualStream, heads: Sequence[int], at: int, end: int) -> Parts:
    """Differentiate the held pass, and run it once with every component at zero for the constants."""
    leaves, call, rest = stream.held_pass()
    group = call.query.shape[1] // call.key.shape[1]
    kv = sorted({head // group for head in heads})
    query = [_pulled(call.query[0, head, at], leaves, stream.components, at) for head in heads]
    key = {one: _pulled(call.key[0, one], leaves, stream.components, None) for one in kv}
    used, of_keys = (sorted({c for one in side for c in one}) for side in (query, key.values()))
    if not used or not of_keys:
        raise UnsupportedArchitecture(
            f"{stream.site.name}: its {'queries' if of_keys else 'keys'} are not made of a residual stream that is "
            "read, such as an encoder whose attention does not call the attention interface, or states that a "
            "router or an indexer compresses"
        )
    size = call.query.shape[3]
    empty = [torch.zeros(*shape, dtype=torch.float64, device="cpu") for shape in ((size,), (call.key.shape[2], size))]
    return Parts(
        used,
        of_keys,
        [torch.stack([one.get(c, empty[0]) for c in used]) for one in query],
        [rest.query[0, head, at].double().cpu() for head in heads],
        {n: torch.stack([one.get(c, empty[1]) for c in of_keys])[:, :end] for n, one in key.items()},
        {one: rest.key[0, one, :end].double().cpu() for one in kv},
    )


def _pulled(
    target: Tensor, leaves: Sequence[Tensor | None], components: Sequence[Component], at: int | None
) -> dict[int, Tensor]:
    """What each component adds to a target [..., head_dim], by one backward pass for each of its last entries."""
    if not target.requires_grad:
        return {}
    index = [n for n, leaf in enumerate(leaves) if leaf is not None]
    inputs = [cast(Tensor, leaves[n]) for n in index]
    parts: dict[int, list[Tensor]] = {}
    zero = target.new_zeros(target.shape[:-1]).double()
    for entry in range(target.shape[-1]):
        grads = torch.autograd.grad(target[..., entry].sum(), inputs, retain_graph=True, allow_unused=True)
        for n, leaf, grad in zip(index, inputs, grads, strict=True):
            if cast("Tensor | None", grad) is not None:
                axis = _axis(leaf, len(target), components[n]) if at is None else None
                product = grad.double() * leaf.detach().double()
                value = product.sum() if axis is None else product.movedim(axis, 0).flatten(1).sum(1)
                parts.setdefault(n, [zero] * entry).append(value)
    return {n: torch.stack(values, dim=-1).detach().cpu() for n, values in parts.items()}


def _axis(leaf: Tensor, positions: int, component: Component) -> int:
    for axis in (leaf.ndim - 2, 1, 0):
        if axis < leaf.ndim - 1 and leaf.shape[axis] == positions:
            return axis
    raise UnsupportedArchitecture(
        f"there are {positions} keys, and {component.path} adds {list(leaf.shape)} to the stream: some keys are not "
        "made of this stream, such as those of a learned prefix or of another model's states"
    )
