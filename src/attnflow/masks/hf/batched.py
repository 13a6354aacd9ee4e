"""Attention of one module under the masks that come with each batch, as row intervals in place of `attention_mask`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor

from attnflow.masks.hf.attention import FlexOnCpu, Native, attend, dense_form, route_of
from attnflow.masks.rows import (
    allowed_of_rows,
    block_mask_of_rows,
    first_alike,
    is_row_intervals,
    mask_of_layer,
    num_layers_of,
)
from attnflow.models.interception import AttentionCall, Output, Proceed
from attnflow.models.mask_request import FLEX

_NATIVE: Final = "_attnflow_native"  # of the tensor that a batch brings: what its forms are, for all layers to share


@dataclass(frozen=True, eq=False)
class BatchAttention:
    """The interceptor that reads the masks of a batch; a call that brings none goes on under the model's own mask."""

    name: str  # the module's path, for messages
    layer: int  # its number among the attention modules
    num_layers: int
    flex_on_cpu: FlexOnCpu

    def __call__(self, call: AttentionCall, proceed: Proceed) -> Output:
        """Attention under the masks of the batch, by whatever computes it."""
        mask, (batch, heads, queries, _), num_keys = call.mask, call.query.shape, call.key.shape[2]
        layers = num_layers_of(mask, queries)
        if not isinstance(mask, Tensor) or not (layers or is_row_intervals(mask)):
            return proceed(call)
        route = route_of(self.name, self.flex_on_cpu, call, proceed)
        if layers is not None and layers != self.num_layers:
            raise ValueError(
                f"{self.name} was given masks for {layers} layers, one each, but the model has {self.num_layers} "
                "attention modules: tasks with a mask per layer are for models of exactly that many"
            )
        if layers is not None and mask.is_floating_point() and route == FLEX:
            raise ValueError(
                f"{self.name} is computed by flex_attention, which takes no dense masks: make the batches with "
                'af.tasks.Collator(..., masks="intervals")'
            )
        layer = None if layers is None else _shared(mask, self.layer, queries)
        one = mask if layer is None else mask_of_layer(mask, layer, queries)
        if not one.is_floating_point():
            self._check(one, batch, heads, queries, num_keys)
        elif one.shape[0] not in (1, batch) or one.shape[3] != num_keys:
            raise ValueError(
                f"{self.name} was given masks of {one.shape[0]} sequences over {one.shape[3]} keys for {batch} "
                f"sequences over {num_keys} keys"
            )
        return attend(call, proceed, route, _native(mask, one, layer, num_keys, route, call.query))

    def _check(self, rows: Tensor, batch: int, heads: int, queries: int, keys: int) -> None:
        """Raise unless the masks are those of this call. Reads no values but of masks for a cache."""
        sequences, own_heads, _, size = rows.shape
        if size != queries or rows.shape[2] in (1, queries):
            pairs = rows.shape[2] in (1, queries)
            raise ValueError(
                f"{self.name} was given "
                + (
                    f"an int32 mask {list(rows.shape)}; make a mask of pairs bool (additive for eager attention), "
                    if pairs
                    else f"masks over {size} positions for {queries}; pad masks as tokens are padded (size=...), "
                )
                + "or take what af.masks.batch([...]).row_intervals() gives"
            )
        if sequences not in (1, batch):
            raise ValueError(f"{self.name} was given the masks of {sequences} sequences for {batch} sequences")
        if own_heads not in (1, heads):
            raise ValueError(
                f"{self.name} was given masks for {own_heads} heads, but its queries have {heads}; pass a mask for "
                "each head of the queries, where keys have fewer heads too"
            )
        if keys == queries or torch.compiler.is_compiling():
            return
        last = int(rows[:, :, : rows.shape[2] // 2 * 2].max()) if rows.numel() else 0
        if last > keys or rows.shape[2] % 2:
            raise ValueError(
                f"{self.name} attends from {queries} queries to {keys} keys, but its masks reach to key {last - 1}"
                + " by other numbers of the keys, which are for whole sequences" * (rows.shape[2] % 2)
            )


def _shared(mask: Tensor, layer: int, queries: int) -> int:
    """The first layer that has the mask of this one, so that both share its forms; itself where nothing is kept."""
    forms = _forms(mask)
    if forms is None:
        return layer
    if "layers" not in forms:
        forms["layers"] = first_alike(mask, queries)
    return cast(list[int], forms["layers"])[layer]


def _native(mask: Tensor, one: Tensor, layer: int | None, num_keys: int, implementation: str, query: Tensor) -> Native:
    """A layer's mask in the form that `implementation` takes: made once for all that share it (a compiler merges them).

    Args:
        mask: what the batch brings, by which the form is found again.
        one: of it, the mask of the layer.
        layer: number of the layer; None where one mask is for all.
        num_keys: of the call.
        implementation: what computes it.
        query: whose device and type the form has.
    """
    forms = _forms(mask)
    if forms is None:
        return _made(one.to(query.device), num_keys, implementation, query.dtype)
    key = layer, num_keys, implementation, query.device, query.dtype
    if key not in forms:
        forms[key] = _made(one.to(query.device), num_keys, implementation, query.dtype)
    return cast(Native, forms[key])


def _forms(mask: Tensor) -> dict[object, object] | None:
    """What was made of a tensor since it was last written to; None where nothing can be kept."""
    if torch.compiler.is_compiling() or mask.is_inference():
        return None
    forms = getattr(mask, _NATIVE, None)
    if forms is None or forms[0] != mask._version:
        forms = mask._version, {}
        setattr(mask, _NATIVE, forms)
    return forms[1]


def _made(one: Tensor, num_keys: int, implementation: str, dtype: torch.dtype) -> Native:
    if one.is_floating_point():
        return dense_form(one == 0, True, implementation, dtype)
    if implementation == FLEX:
        return block_mask_of_rows(one, num_keys), None
    return dense_form(allowed_of_rows(one, num_keys), True, implementation, dtype)
