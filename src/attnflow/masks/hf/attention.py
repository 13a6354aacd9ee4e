"""Attention of one module under a mask of ours, or under those that come with each batch as row intervals."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.masks.flex import allowed_of_rows, block_mask_of_rows, is_row_intervals
from attnflow.masks.hf.forms import GridForms, MaskForms, Span
from attnflow.models.passes.interception import AttentionCall, Output, Proceed
from attnflow.models.passes.mask_request import FLEX, AttentionMask, MaskRequest

_NATIVE: Final = "_attnflow_native"  # of the tensor that a batch brings: what its forms are, for all layers to share

_FORBIDS: Final = -1e4  # added to scores, nothing is left of a weight
FlexOnCpu = Literal["forward", "sdpa"]
Native = tuple[AttentionMask, Tensor | None]  # a mask as a kernel takes it; queries that may attend to nothing, or None


class Positions:
    def __init__(self, request: MaskRequest) -> None:
        eager = not torch.compiler.is_compiling()
        self._shape = request.batch_size, request.num_queries, request.num_keys
        self.first_query, self.first_key = request.first_query, request.first_key  # leading pads counted
        self.padding, self.left = request.pads()
        # Only outside of a trace: the leading pads, and the end of what is real, of each sequence as Python integers.
        self._lefts = tuple(cast(list[int], self.left.tolist())) if eager and self.left is not None else None
        self._ends: tuple[int, ...] | None = None
        if eager and self.padding is not None:
            slots = torch.arange(1, self.padding.shape[1] + 1, device=self.padding.device)
            self._ends = tuple(cast(list[int], (self.padding * slots).amax(-1).tolist()))
        self._masks: dict[tuple[object, ...], Native] = {}

    def native(
        self, forms: GridForms, cross: bool, crop: bool, implementation: str, device: torch.device, dtype: torch.dtype
    ) -> Native:
        """(mask in the implementation's form; queries that may attend to nothing, or None)."""
        key = (id(forms), implementation, str(device), dtype)
        if key not in self._masks:
            self._masks[key] = self._make(forms, cross, crop, implementation, device, dtype)
        return self._masks[key]

    def _make(
        self, forms: GridForms, cross: bool, crop: bool, implementation: str, device: torch.device, dtype: torch.dtype
    ) -> Native:
        may_be_empty = self.padding is not None
        sequences = [self] if forms.shape[0] == 1 else [self._sequence(b) for b in range(forms.shape[0])]
        if isinstance(self.first_query, int):
            span = self._span(cross)
            for positions, row in zip(sequences, forms.parts, strict=True):
                for form in row:
                    may_be_empty |= form.has_empty_rows | positions._check(form, span, cross, crop)
            if implementation == FLEX:
                if self.padding is None:
                    return forms.block_mask(span, device), None
                lefts = self._lefts or (0,) * self._shape[0]
                return forms.padded_block_mask(span, self.padding, lefts, cross, device), None
        elif implementation == FLEX:
            raise RuntimeError("flex_attention needs the cache length as a number: compile with a dynamic cache")
        else:
            may_be_empty = True
        rows = [
            torch.cat([positions._allowed(form, cross, device) for form in row], dim=1)
            for positions, row in zip(sequences, forms.parts, strict=True)
        ]
        return dense_form(rows[0] if len(rows) == 1 else torch.cat(rows), may_be_empty, implementation, dtype)

    def _sequence(self, number: int) -> Positions:
        alone, part = copy.copy(self), slice(number, number + 1)
        alone._shape = 1, *self._shape[1:]
        for name in ("padding", "left", "_lefts", "_ends"):
            whole = getattr(self, name)
            setattr(alone, name, None if whole is None else whole[part])
        return alone

    def _span(self, cross: bool) -> Span:
        _, queries, keys = self._shape
        first = 0 if cross else cast(int, self.first_query)
        end = self.first_key + keys if cross else first + queries
        return Span(first, queries, self.first_key, keys, end)

    def _check(self, forms: MaskForms, span: Span, cross: bool, crop: bool) -> bool:
        """Raises unless the mask covers the call and, without `crop`, loses no key; returns whether it was cut."""
        mask = forms.mask
        what = "encoder" if cross else "sequence"
        if cross and span.num_queries != mask.num_queries:
            raise ValueError(
                f"a cross mask needs all its queries in one call: {mask!r} has {mask.num_queries}, the decoder was "
                f"given {span.num_queries}. Pass a mask of as many queries as the decoder gets, on whole sequences "
                "(use_cache=False). A model cannot generate under a cross mask."
            )
        if (span.end if cross else span.last_query) > mask.num_keys:
            self._check_length(forms, span, what)
        if span.first_key == 0 and span.end >= mask.num_keys:
            return False
        if torch.compiler.is_compiling():
            return self._check_compiled(forms, span, crop)
        first, last = forms.bounds
        cut = False
        for left, end in self._real(span):
            shift = 0 if cross else left
            stop = span.last_query if cross else min(span.last_query, end)
            rows = slice(max(span.first_query - shift, 0), max(stop - shift, 0))
            late, early = last[rows] > end - left, first[rows] + left < span.first_key
            if late.any() and not crop:
                query, keys = rows.start + int(late.argmax()), end - left
                padded = keys < span.end
                whose = f"a {what} has only {keys} positions so far, padding aside"
                whose = whose if padded else f"the {what} has only {keys} positions so far"
                ways = [] if cross else ["pass more of it in this call"]
                ways += [] if padded else [f"pass a mask of this size, such as mask[:{'' if cross else keys}, :{keys}]"]
                raise ValueError(
                    f"{mask!r} lets query {query} attend to key {last[query] - 1}, but {whose}; "
                    f"{', or '.join([*ways, 'crop=True to attach, to drop keys that are not there'])}"
                )
            if (early & (first[rows] < last[rows])).any():
                query = rows.start + int(early.argmax())
                raise ValueError(
                    f"{mask!r} lets query {query} attend to key {first[query]}, but the model's cache has kept only "
                    f"keys from {span.first_key - left} on; pass the model a DynamicCache(), which keeps all"
                )
            cut |= bool(late.any())
        return cut

    def _real(self, span: Span) -> list[tuple[int, int]]:
        """(first, end) of the slots without padding, of each sequence that differs in them."""
        rows = max(len(self._lefts or ()), len(self._ends or ()), 1)
        lefts, ends = self._lefts or (0,) * rows, self._ends or (span.end,) * rows
        return sorted({(left, min(end, span.end)) for left, end in zip(lefts, ends, strict=True)})

    def _check_compiled(self, forms: MaskForms, span: Span, crop: bool) -> bool:
        """`_check` without reading tensor values or mask rows: stricter, never laxer."""
        if span.first_key:
            raise ValueError(
                f"a compiled model needs all keys in its cache, which has kept those from {span.first_key} on; pass "
                "the model a DynamicCache(), which keeps all of them, or do not compile"
            )
        if forms.looks_ahead and not crop:
            raise ValueError(
                f"a compiled model needs a mask of its own sequence length or one that is causal, got {forms.mask!r} "
                f"for {span.end} keys; slice the mask, or do not compile"
            )
        return forms.looks_ahead

    def _check_length(self, forms: MaskForms, span: Span, what: str) -> None:
        size = forms.mask.num_keys
        needed = span.end
        if self.padding is not None and not torch.compiler.is_compiling():
            slot = torch.arange(self.padding.shape[1], device=self.padding.device)
            position = slot if self.left is None else slot - self.left[:, None]
            needed = int(torch.where(self.padding & (slot < span.end), position + 1, 0).max())
        if needed > size:
            raise ValueError(
                f"the {what} has {needed} positions, but {forms.mask!r} covers {size}; pass a mask of at least that "
                "size, or a shorter input"
            )

    def _allowed(self, forms: MaskForms, cross: bool, device: torch.device) -> Tensor:
        """bool[batch or 1, 1, queries, keys]: the keys that each query of the call may attend to."""
        _, queries, keys = self._shape
        mask = forms.mask
        first = 0 if cross else self.first_query
        end = self.first_key + keys if cross else first + queries
        padding = None if self.padding is None else self.padding.to(device)
        if self.left is None and isinstance(first, int) and first + queries <= mask.num_queries:
            stop = min(self.first_key + keys, cast(int, end), mask.num_keys)
            table = forms.dense(first + queries, stop, device)[first : first + queries, self.first_key : stop]
            if (missing := self.first_key + keys - stop) > 0:
                table = torch.nn.functional.pad(table, (0, missing))
            allowed = table[None, None]
            return allowed if padding is None else allowed & padding[:, None, None, self.first_key :]
        left = torch.zeros(1, dtype=torch.int64, device=device) if self.left is None else self.left.to(device)
        rows, columns = mask.shape
        if isinstance(first, Tensor):
            first, end = first.to(device), cast(Tensor, end).to(device)
        else:  # no position lies beyond its slot, and a mask may be far larger than the sequence
            rows, columns = min(rows, first + queries), min(columns, self.first_key + keys)
        slot = torch.arange(keys, device=device) + self.first_key
        query = torch.arange(queries, device=device) + first - (torch.zeros_like(left) if cross else left)[:, None]
        key = slot - left[:, None]
        real = (slot < end) if padding is None else (slot < end) & padding[:, self.first_key :]
        if torch.compiler.is_compiling():
            fits = (~real | (key < mask.num_keys)).all()
            torch._assert_async(fits, "the sequence is longer than its mask")  # pyright: ignore[reportPrivateImportUsage]
        table = forms.dense(rows, columns, device)
        inside, below = real & (key >= 0) & (key < columns), (query >= 0) & (query < rows)
        query, key = query.clamp(0, rows - 1), key.clamp(0, columns - 1)
        return (table[query[:, :, None], key[:, None, :]] & below[:, :, None] & inside[:, None, :])[:, None]


def _own_padding(mask: Tensor, batch: int, keys: int) -> MaskRequest | None:
    """The request that a model could have made, of a mask of its own for padding alone, [batch, 1, 1, keys]."""
    if tuple(mask.shape) not in ((batch, 1, 1, keys), (1, 1, 1, keys)):
        return None
    real = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and bool((mask[~real] > _FORBIDS).any()):
        return None  # a bias
    return MaskRequest(batch, keys, keys, padding=real[:, 0, 0].expand(batch, -1))


@dataclass(frozen=True, eq=False)
class MaskedAttention:
    name: str  # the module's path, for messages
    forms: GridForms
    cross: bool  # whether its keys are another sequence's
    crop: bool  # whether keys beyond the sequence may be dropped
    flex_on_cpu: FlexOnCpu

    def __call__(self, call: AttentionCall, proceed: Proceed) -> Output:
        self._check(call)
        positions = self._positions(call)
        route = route_of(self.name, self.flex_on_cpu, call, proceed)
        query = call.query
        native = positions.native(self.forms, self.cross, self.crop, route, query.device, query.dtype)
        return attend(call, proceed, route, native)

    def _check(self, call: AttentionCall) -> None:
        for masked, size, what in zip(self.forms.shape, call.query.shape, ("sequences", "heads"), strict=False):
            if masked not in (1, size):
                raise ValueError(
                    f"{self.name} attends with {size} {what}, but its masks are for {masked}: {self.forms.mask!r}"
                    + ("; pass one for each query head of this process" if what == "heads" else "")
                )

    def _positions(self, call: AttentionCall) -> Positions:
        batch, _, queries, _ = call.query.shape
        keys, request, mask = call.key.shape[2], call.request, call.mask
        if mask is None and request is None and (queries == keys or self.cross):
            return Positions(MaskRequest(batch, queries, keys))  # vision encoders ask for no mask at all
        if request is None and queries == keys and isinstance(mask, Tensor):
            request = _own_padding(mask, batch, keys)
        elif request is not None and request.num_queries == 1 < queries == keys == request.num_keys:
            request = MaskRequest(batch, keys, keys, padding=request.padding)  # one row for every query: padding alone
        if request is None:
            what = "None" if mask is None else f"{type(mask).__name__} of shape {tuple(mask.shape)}"
            raise ValueError(
                f"{self.name} was given the attention mask {what}, which would bypass the mask of attach. Pass a 2D "
                "attention_mask [batch, keys] for padding or none; put everything else into the mask itself. If you "
                "passed no such mask, either the model makes its own, and this architecture is not supported; or a "
                "compiled part of it made one. Then do not compile calls with gradient checkpointing or a static cache."
            )
        if (request.num_queries, request.num_keys) != (queries, keys):
            raise UnsupportedArchitecture(
                f"{self.name} attends from {queries} queries to {keys} keys under a mask that the model made for "
                f"{request.num_queries} queries and {request.num_keys} keys: positions cannot be matched to tokens"
            )
        if "positions" not in request.derived:
            request.derived["positions"] = Positions(request)
        return request.derived["positions"]


def route_of(name: str, flex_on_cpu: FlexOnCpu, call: AttentionCall, proceed: Proceed) -> str:
    """The implementation that computes a call; only `flex_on_cpu` can change the chosen one."""
    if call.implementation != FLEX or call.query.device.type != "cpu":
        return call.implementation
    if flex_on_cpu == "sdpa":
        lost = [name for name in ("softcap", "s_aux") if call.kwargs.get(name) is not None]
        if lost:
            raise ValueError(
                f"{name} passes {' and '.join(lost)}, which sdpa cannot apply in place of flex_attention; "
                "use backend='eager'"
            )
        return "sdpa"
    learns = any(tensor.requires_grad for tensor in (call.query, call.key, call.value))
    if torch.is_grad_enabled() and learns and not proceed.following:
        raise RuntimeError(
            "FlexAttention computes no gradients on the CPU. Use backend='sdpa' (the same numbers), "
            "or flex_on_cpu='sdpa' to let SDPA stand in on the CPU only; torch.no_grad() for inference"
        )
    return FLEX


def dense_form(allowed: Tensor, may_be_empty: bool, implementation: str, dtype: torch.dtype) -> Native:
    """The mask for SDPA or eager attention, from bool[batch or 1, heads or 1, queries, keys]."""
    empty = None
    if may_be_empty:
        # A softmax over nothing is NaN or uniform, by kernel. Such a query attends everywhere here, and its
        # output is set to zero afterwards: the value that FlexAttention gives, with zero gradients.
        empty = ~allowed.any(dim=-1)
        allowed = allowed | empty[..., None]
    if implementation == "eager":  # which would add a bool mask
        zero = torch.zeros((), dtype=dtype, device=allowed.device)
        return torch.where(allowed, zero, torch.finfo(dtype).min), empty
    return allowed, empty


def attend(call: AttentionCall, proceed: Proceed, implementation: str, native: Native) -> Output:
    """Computes the call under a native mask; queries that may attend to nothing give 0."""
    mask, empty = native
    output, weights = proceed(call.replace(mask=mask, empty=empty, implementation=implementation))
    if empty is not None:
        output = output.masked_fill(empty.transpose(1, 2)[..., None], 0.0)
        if weights is not None and implementation == "eager":
            weights = weights.masked_fill(empty[..., None], 0.0)
    return output, weights


@dataclass(frozen=True, eq=False)
class BatchAttention:
    """Interceptor that reads the masks of a batch; a call without them runs under the model's own mask."""

    name: str  # the module's path, for messages
    flex_on_cpu: FlexOnCpu

    def __call__(self, call: AttentionCall, proceed: Proceed) -> Output:
        mask, (batch, heads, queries, _), num_keys = call.mask, call.query.shape, call.key.shape[2]
        if not isinstance(mask, Tensor) or not is_row_intervals(mask):
            if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[2] not in (1, queries):
                raise ValueError(
                    f"{self.name} was given a {mask.dtype} mask {list(mask.shape)} for {queries} queries; row "
                    "intervals must stay int32: cast the model, not the batch"
                )
            return proceed(call)
        route = route_of(self.name, self.flex_on_cpu, call, proceed)
        self._check(mask, batch, heads, queries, num_keys)
        return attend(call, proceed, route, _native(mask, num_keys, route, call.query))

    def _check(self, rows: Tensor, batch: int, heads: int, queries: int, keys: int) -> None:
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


def _native(mask: Tensor, num_keys: int, implementation: str, query: Tensor) -> Native:
    """The masks in the implementation's form; outside a compiler, layers share it."""
    kept = _kept(mask)
    key = num_keys, implementation, query.device, query.dtype
    if kept is not None and key in kept:
        return kept[key]
    rows = mask.to(query.device)
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
