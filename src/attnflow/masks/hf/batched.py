"""Attention of one module under the masks that come with each batch, as row intervals in place of `attention_mask`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from attnflow.masks.batch_rows import allowed_of_rows, block_mask_of_rows, is_row_intervals
from attnflow.masks.hf.attention import FlexOnCpu, Native, attend, dense_form, route_of
from attnflow.models.interception import AttentionCall, Output, Proceed
from attnflow.models.mask_request import FLEX

_NATIVE: Final = "_attnflow_native"  # of a tensor of row intervals: what its forms are, for all layers to share


@dataclass(frozen=True, eq=False)
class BatchAttention:
    """The interceptor that reads row intervals; a call that brings none goes on under the model's own mask."""

    name: str  # the module's path, for messages
    flex_on_cpu: FlexOnCpu

    def __call__(self, call: AttentionCall, proceed: Proceed) -> Output:
        """Attention under the masks of the batch, by whatever computes it."""
        rows = call.mask
        if not isinstance(rows, Tensor) or not is_row_intervals(rows):
            return proceed(call)
        route = route_of(self.name, self.flex_on_cpu, call, proceed)
        num_keys = call.key.shape[2]
        batch, heads, queries, _ = call.query.shape
        self._check(rows, batch, heads, queries, num_keys)
        return attend(call, proceed, route, _native(rows, num_keys, route, call.query.device, call.query.dtype))

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


def _native(rows: Tensor, num_keys: int, implementation: str, device: torch.device, dtype: torch.dtype) -> Native:
    """Row intervals in the form that `implementation` takes: made once for all layers (a compiler merges them)."""
    if torch.compiler.is_compiling() or rows.is_inference():
        return _made(rows.to(device), num_keys, implementation, dtype)
    forms = getattr(rows, _NATIVE, None)
    if forms is None or forms[0] != rows._version:
        forms = rows._version, {}
        setattr(rows, _NATIVE, forms)
    key = num_keys, implementation, device, dtype
    if key not in forms[1]:
        forms[1][key] = _made(rows.to(device), num_keys, implementation, dtype)
    return forms[1][key]


def _made(rows: Tensor, num_keys: int, implementation: str, dtype: torch.dtype) -> Native:
    if implementation == FLEX:
        return block_mask_of_rows(rows, num_keys), None
    return dense_form(allowed_of_rows(rows, num_keys), True, implementation, dtype)
