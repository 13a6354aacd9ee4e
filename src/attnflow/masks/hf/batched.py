"""Attention of one module under the masks that come with each batch, as row intervals in place of `attention_mask`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from attnflow.masks.hf.attention import FlexOnCpu, Native, attend, dense_form, route_of
from attnflow.masks.rows import (
    allowed_of_rows,
    block_mask_of_rows,
    first_alike,
    is_row_intervals,
    num_layers_of,
    rows_of_layer,
)
from attnflow.models.interception import AttentionCall, Output, Proceed
from attnflow.models.mask_request import FLEX

_NATIVE: Final = "_attnflow_native"  # of the tensor that a batch brings: what its forms are, for all layers to share


@dataclass(frozen=True, eq=False)
class BatchAttention:
    """Interceptor that reads the masks of a batch; a call without them runs under the model's own mask."""

    name: str  # the module's path, for messages
    layer: int  # its number among the attention modules
    num_layers: int
    flex_on_cpu: FlexOnCpu

    def __call__(self, call: AttentionCall, proceed: Proceed) -> Output:
        """Computes attention under the masks of the batch."""
        mask, (batch, heads, queries, _), num_keys = call.mask, call.query.shape, call.key.shape[2]
        layers = num_layers_of(mask)
        if not isinstance(mask, Tensor) or not (layers or is_row_intervals(mask)):
            return proceed(call)
        route = route_of(self.name, self.flex_on_cpu, call, proceed)
        if layers is not None and layers != self.num_layers:
            raise ValueError(
                f"{self.name} was given masks for {layers} layers, one each, but the model has {self.num_layers} "
                "attention modules: tasks with a mask per layer are for models of exactly that many"
            )
        layer = None if layers is None else self.layer
        self._check(mask if layer is None else mask[:, layer : layer + 1], batch, heads, queries, num_keys)
        return attend(call, proceed, route, _native(mask, layer, num_keys, route, call.query))

    def _check(self, rows: Tensor, batch: int, heads: int, queries: int, keys: int) -> None:
        """Raises unless the masks fit this call; reads values only for a cache."""
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


def _native(mask: Tensor, layer: int | None, num_keys: int, implementation: str, query: Tensor) -> Native:
    """A layer's mask in the implementation's form; outside a compiler, layers with the same mask share it."""
    kept = _kept(mask)
    if layer is not None and kept is not None:
        if "layers" not in kept:
            kept["layers"] = first_alike(mask)
        layer = kept["layers"][layer]
    key = layer, num_keys, implementation, query.device, query.dtype
    if kept is not None and key in kept:
        return kept[key]
    rows = (mask if layer is None else rows_of_layer(mask, layer)).to(query.device)
    if implementation == FLEX:
        native = block_mask_of_rows(rows, num_keys), None
    else:
        native = dense_form(allowed_of_rows(rows, num_keys), True, implementation, query.dtype)
    if kept is not None:
        kept[key] = native
    return native


def _kept(mask: Tensor) -> dict[object, Any] | None:
    """The cache of forms made since the tensor was last written to; None if nothing can be cached."""
    if torch.compiler.is_compiling() or mask.is_inference():
        return None
    kept = getattr(mask, _NATIVE, None)
    if kept is None or kept[0] != mask._version:
        kept = mask._version, {}
        setattr(mask, _NATIVE, kept)
    return kept[1]
