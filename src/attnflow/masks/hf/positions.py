"""Where the queries and keys of one attention call lie in the sequence, and a mask in the form that the call takes."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from attnflow.masks.hf.forms import MaskForms, Span
from attnflow.models.mask_request import FLEX, AttentionMask, MaskRequest


class Positions:
    """Offsets and padding of one forward pass, from which each layer takes its own mask.

    Attributes:
        first_query: position of the first query, leading pads counted; a tensor only in a compiled model with a static
            cache.
        first_key: position of the first key.
        padding: bool[batch, slots], False at pads, or None if there are none.
        left: int[batch], leading pads of each sequence, or None if there are none.
    """

    def __init__(self, request: MaskRequest) -> None:
        eager = not torch.compiler.is_compiling()
        self._shape = request.batch_size, request.num_queries, request.num_keys
        self.first_query, self.first_key = request.first_query, request.first_key
        self.padding, self.left = request.pads()
        # Only outside of a trace: the leading pads of each sequence as Python integers.
        self._lefts = tuple(cast(list[int], self.left.tolist())) if eager and self.left is not None else None
        self._masks: dict[tuple[object, ...], tuple[AttentionMask, Tensor | None]] = {}

    def native(
        self, forms: MaskForms, cross: bool, crop: bool, implementation: str, device: torch.device, dtype: torch.dtype
    ) -> tuple[AttentionMask, Tensor | None]:
        """(mask in the form that `implementation` takes, queries that may attend to nothing or None)."""
        key = (id(forms), implementation, str(device), dtype)
        if key not in self._masks:
            self._masks[key] = self._make(forms, cross, crop, implementation, device, dtype)
        return self._masks[key]

    def _make(
        self, forms: MaskForms, cross: bool, crop: bool, implementation: str, device: torch.device, dtype: torch.dtype
    ) -> tuple[AttentionMask, Tensor | None]:
        may_be_empty = forms.has_empty_rows or self.padding is not None
        if isinstance(self.first_query, int):
            span = self._span(cross)
            may_be_empty |= self._check(forms, span, cross, crop)
            if implementation == FLEX:
                if self.padding is None:
                    return forms.block_mask(span, device), None
                lefts = self._lefts or (0,) * self._shape[0]
                return forms.padded_block_mask(span, self.padding, lefts, cross, device), None
        elif implementation == FLEX:
            raise RuntimeError("flex_attention needs the cache length as a number: compile with a dynamic cache")
        else:
            may_be_empty = True
        allowed = self._allowed(forms, cross, device)
        empty = None
        if may_be_empty:
            # A softmax over nothing is NaN or uniform, by kernel. Such a query attends everywhere here, and its
            # output is set to zero afterwards: the value that FlexAttention gives, with zero gradients.
            empty = ~allowed.any(dim=-1)
            allowed = allowed | empty[..., None]
            empty = empty[:, 0]
        if implementation == "eager":
            return torch.where(allowed, torch.zeros((), dtype=dtype, device=device), torch.finfo(dtype).min), empty
        return allowed, empty

    def _span(self, cross: bool) -> Span:
        _, queries, keys = self._shape
        first = 0 if cross else cast(int, self.first_query)
        end = self.first_key + keys if cross else first + queries
        return Span(first, queries, self.first_key, keys, end)

    def _check(self, forms: MaskForms, span: Span, cross: bool, crop: bool) -> bool:
        """Raise unless the mask covers the call and, without `crop`, loses nothing; returns whether it was cut."""
        mask = forms.mask
        what = "encoder" if cross else "sequence"
        if cross and span.num_queries != mask.num_queries:
            raise ValueError(
                f"a cross mask needs all its queries in one call: {mask!r} has {mask.num_queries}, the decoder was "
                f"given {span.num_queries}; run it on whole sequences (use_cache=False)"
            )
        lefts = self._lefts or (0,)
        if (span.end if cross else span.last_query) > mask.num_keys:
            self._check_length(forms, span, what)
        if span.first_key == 0 and span.end >= mask.num_keys:
            return False
        if torch.compiler.is_compiling():
            return self._check_compiled(forms, span, crop)
        first, last = forms.bounds()
        cut = False
        for left in sorted(set(lefts)):
            shift = 0 if cross else left
            rows = slice(max(span.first_query - shift, 0), max(span.last_query - shift, 0))
            late, early = last[rows] > span.end, first[rows] + left < span.first_key
            if late.any() and not crop:
                query = rows.start + int(late.argmax())
                raise ValueError(
                    f"{mask!r} lets query {query} attend to key {last[query] - 1}, but the {what} has only "
                    f"{span.end} positions so far; pass a mask of this size, such as "
                    f"mask[:{'' if cross else span.end}, :{span.end}], or crop=True to drop the keys that are not there"
                )
            if (early & (first[rows] < last[rows])).any():
                query = rows.start + int(early.argmax())
                raise ValueError(
                    f"{mask!r} lets query {query} attend to key {first[query]}, but the model's cache has kept only "
                    f"keys from {span.first_key} on; pass past_key_values=DynamicCache(), which keeps all of them"
                )
            cut |= bool(late.any())
        return cut

    def _check_compiled(self, forms: MaskForms, span: Span, crop: bool) -> bool:
        """The check without values of tensors or rows of the mask: stricter, never laxer."""
        if span.first_key or (forms.looks_ahead and not crop):
            raise ValueError(
                f"a compiled model needs a mask of its own sequence length or one that is causal, got {forms.mask!r} "
                f"for keys {span.first_key} to {span.end}; slice the mask, or do not compile"
            )
        return forms.looks_ahead

    def _check_length(self, forms: MaskForms, span: Span, what: str) -> None:
        """Slots beyond the mask are an error unless they are padding."""
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
        """bool[batch or 1, 1, queries, keys]: what each query of the call may attend to."""
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
        seen, sees = real & (key >= 0) & (key < columns), (query >= 0) & (query < rows)
        query, key = query.clamp(0, rows - 1), key.clamp(0, columns - 1)
        return (table[query[:, :, None], key[:, None, :]] & sees[:, :, None] & seen[:, None, :])[:, None]
