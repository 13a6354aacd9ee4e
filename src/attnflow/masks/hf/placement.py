"""Where the queries and keys of one forward pass lie: what the registered mask function hands to the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.bias.allow import Allow
from attnflow.masks.hf.tables import MaskTables, Span

FLEX: Final = "flex_attention"
Kernel = Tensor | BlockMask | None


class Placement(BlockMask):
    """Sequence offsets and padding of one forward pass, from which each layer takes its own mask.

    Transformers asks for one mask per kind of layer and passes the answer to every layer of that kind. This answer
    holds no mask: it says where the tokens lie, so that layers may have masks of their own, and so that a mask of
    another making (a 4D tensor given by the caller, `None`) is recognised rather than obeyed.

    It is a `BlockMask` by type only because that, besides a tensor, is what transformers passes through untouched
    when `generate` with a static cache makes its masks in advance.
    """

    def __init__(
        self,
        batch_size: int,
        num_queries: int,
        num_keys: int,
        first_query: int | Tensor = 0,
        first_key: int = 0,
        padding: Tensor | None = None,
    ) -> None:
        eager = not torch.compiler.is_compiling()
        if isinstance(first_query, Tensor):
            # A static cache hands out its live counter, which the first layer moves on before it attends.
            first_query = int(first_query) if eager else first_query.clone()
        self._shape = (batch_size, 1, num_queries, num_keys)
        self.first_query, self.first_key = first_query, first_key
        self.padding, self.left = _normal(padding, first_key + num_keys, first_query + num_queries, eager)
        # Only outside of a trace: the leading pads of each batch element as Python integers.
        self.lefts = tuple(cast(list[int], self.left.tolist())) if eager and self.left is not None else None
        self._request: dict[str, object] | None = None
        self._made: dict[tuple[object, ...], tuple[Kernel | Allow, Tensor | None]] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, 1, queries, keys), as of a 4D mask."""
        return self._shape

    @property
    def ndim(self) -> int:
        """4, as of a 4D mask."""
        return 4

    def __repr__(self) -> str:
        batch, _, queries, keys = self._shape
        where = f"{queries} queries from {self.first_query}, {keys} keys from {self.first_key}"
        return f"<placement of {batch} sequences: {where}{'' if self.padding is None else ', padded'}>"

    def contiguous(self) -> Placement:
        """Itself: `generate` calls this on masks made in advance."""
        return self

    def to(self, device: object = None, *args: object, **kwargs: object) -> Placement:  # pyright: ignore
        """Itself: each layer takes the mask to the device of its queries."""
        return self

    def original(self, implementation: str) -> Kernel:
        """The mask that the model would have had without us, for attention that keeps its own."""
        if self._request is None:
            return None
        key = ("original", implementation)
        if key not in self._made:
            make = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
            self._made[key] = cast(Kernel, make(**self._request)), None
        return cast(Kernel, self._made[key][0])

    def own(self, device: torch.device) -> Allow:
        """The model's own mask as a relation whose rows are made when they are asked for."""
        key = ("own", str(device))
        if key not in self._made:
            batch, _, queries, keys = self._shape
            rows = None if self._request is None else own_rows(self._request, batch, device)
            self._made[key] = Allow(rows, queries, keys, batch=batch), None
        return cast(Allow, self._made[key][0])

    def allow(self, tables: MaskTables, crop: bool, device: torch.device) -> Allow:
        """The mask of `attach` as a relation; checked like `native`, and all rows are held."""
        key = ("allow", id(tables), str(device))
        if key not in self._made:
            if isinstance(self.first_query, int):
                self._check(tables, self._span(False), False, crop)
            self._made[key] = Allow.from_dense(self._allowed(tables, False, device)), None
        return cast(Allow, self._made[key][0])

    def native(
        self, tables: MaskTables, cross: bool, crop: bool, implementation: str, device: torch.device, dtype: torch.dtype
    ) -> tuple[Kernel, Tensor | None]:
        """(mask in the form that `implementation` takes, queries that may attend to nothing or None)."""
        key = (id(tables), implementation, str(device), dtype)
        if key not in self._made:
            self._made[key] = self._make(tables, cross, crop, implementation, device, dtype)
        return cast(tuple[Kernel, Tensor | None], self._made[key])

    def _make(
        self, tables: MaskTables, cross: bool, crop: bool, implementation: str, device: torch.device, dtype: torch.dtype
    ) -> tuple[Kernel, Tensor | None]:
        may_be_empty = tables.has_empty_rows or self.padding is not None
        if isinstance(self.first_query, int):
            span = self._span(cross)
            may_be_empty |= self._check(tables, span, cross, crop)
            if implementation == FLEX:
                if self.padding is None:
                    return tables.block_mask(span, device), None
                lefts = self.lefts or (0,) * self._shape[0]
                return tables.padded_block_mask(span, self.padding, lefts, cross, device), None
        elif implementation == FLEX:
            raise RuntimeError("flex_attention needs the cache length as a number: compile with a dynamic cache")
        else:
            may_be_empty = True
        allowed = self._allowed(tables, cross, device)
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
        _, _, queries, keys = self._shape
        first = 0 if cross else cast(int, self.first_query)
        end = self.first_key + keys if cross else first + queries
        return Span(first, queries, self.first_key, keys, end)

    def _check(self, tables: MaskTables, span: Span, cross: bool, crop: bool) -> bool:
        """Raise unless the mask covers the call and, without `crop`, loses nothing; returns whether it was cut."""
        mask = tables.mask
        what = "encoder" if cross else "sequence"
        if cross and span.num_queries != mask.num_queries:
            raise ValueError(
                f"a cross mask needs all its queries in one call: {mask!r} has {mask.num_queries}, the decoder was "
                f"given {span.num_queries}; run it on whole sequences (use_cache=False)"
            )
        lefts = self.lefts or (0,)
        if (span.end if cross else span.last_query) > mask.num_keys:
            self._check_length(tables, span, what)
        if span.first_key == 0 and span.end >= mask.num_keys:
            return False
        if torch.compiler.is_compiling():
            return self._check_compiled(tables, span, crop)
        first, last = tables.bounds()
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

    def _check_compiled(self, tables: MaskTables, span: Span, crop: bool) -> bool:
        """The check without values of tensors or rows of the mask: stricter, never laxer."""
        if span.first_key or (tables.looks_ahead and not crop):
            raise ValueError(
                f"a compiled model needs a mask of its own sequence length or one that is causal, got {tables.mask!r} "
                f"for keys {span.first_key} to {span.end}; slice the mask, or do not compile"
            )
        return tables.looks_ahead

    def _check_length(self, tables: MaskTables, span: Span, what: str) -> None:
        """Slots beyond the mask are an error unless they are padding."""
        size = tables.mask.num_keys
        needed = span.end
        if self.padding is not None and not torch.compiler.is_compiling():
            slot = torch.arange(self.padding.shape[1], device=self.padding.device)
            position = slot if self.left is None else slot - self.left[:, None]
            needed = int(torch.where(self.padding & (slot < span.end), position + 1, 0).max())
        if needed > size:
            raise ValueError(
                f"the {what} has {needed} positions, but {tables.mask!r} covers {size}; pass a mask of at least that "
                "size, or a shorter input"
            )

    def _allowed(self, tables: MaskTables, cross: bool, device: torch.device) -> Tensor:
        """bool[batch or 1, 1, queries, keys]: what each query of the call may attend to."""
        _, _, queries, keys = self._shape
        mask = tables.mask
        first = 0 if cross else self.first_query
        end = self.first_key + keys if cross else first + queries
        padding = None if self.padding is None else self.padding.to(device)
        if self.left is None and isinstance(first, int) and first + queries <= mask.num_queries:
            stop = min(self.first_key + keys, cast(int, end), mask.num_keys)
            table = tables.dense(first + queries, stop, device)[first : first + queries, self.first_key : stop]
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
        table = tables.dense(rows, columns, device)
        seen, sees = real & (key >= 0) & (key < columns), (query >= 0) & (query < rows)
        query, key = query.clamp(0, rows - 1), key.clamp(0, columns - 1)
        return (table[query[:, :, None], key[:, None, :]] & sees[:, :, None] & seen[:, None, :])[:, None]

    def __getitem__(self, index: object) -> NoReturn:  # pyright: ignore
        self._misused("[...]")

    def __getattr__(self, name: str) -> object:
        if not name.startswith("__") and hasattr(Tensor, name):
            self._misused(f".{name}")
        raise AttributeError(name)

    def _misused(self, how: str) -> NoReturn:
        raise UnsupportedArchitecture(
            f"this model reads its attention mask outside of the attention interface (`mask{how}`), so that what it "
            "computes there would not follow the mask given to attach"
        )


def place(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    **others: object,
) -> Placement:
    """The mask function registered with transformers: says where the tokens lie.

    The model's own `mask_function` is dropped, and with it what transformers combined into it: causality, sliding
    windows, and the packed sequences that it reads into position ids that jump.
    """
    placement = Placement(batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask)
    placement._request = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": placement.first_query,
        "kv_offset": kv_offset,
        "attention_mask": attention_mask,
        **others,
    }
    return placement


def _normal(
    padding: Tensor | None, num_slots: int, end: int | Tensor, eager: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(padding over all slots or None if there is none, leading pads per batch element or None if there are none)."""
    if padding is None:
        return None, None
    padding = padding.bool()
    if padding.shape[1] < num_slots:
        padding = torch.nn.functional.pad(padding, (0, num_slots - padding.shape[1]))
    padding = padding[:, :num_slots]
    if eager and bool(padding[:, :end].all()):  # slots from `end` on are not written yet
        return None, None
    left = (~padding).cumprod(dim=1).sum(dim=1)
    return padding, None if eager and not bool(left.any()) else left


def own_rows(request: Mapping[str, Any], batch: int, device: torch.device) -> Callable[[slice], Tensor]:
    """Rows of the mask that a model asks transformers for, made when they are asked for."""
    inside = cast("Callable[..., Tensor | bool]", request["mask_function"])
    first_query, first_key, num_keys = request["q_offset"], request["kv_offset"], request["kv_length"]
    padding = cast("Tensor | None", request["attention_mask"])
    real = None
    if padding is not None:
        real = padding.bool().to(device)
        missing = first_key + num_keys - real.shape[1]
        real = torch.nn.functional.pad(real, (0, max(missing, 0)))[:, None, None, first_key : first_key + num_keys]
    element = torch.arange(batch, device=device)[:, None, None, None]
    head = torch.zeros(1, dtype=torch.int64, device=device)[:, None, None, None]
    key = (torch.arange(num_keys, device=device) + first_key)[None, None, None]

    def rows(block: slice) -> Tensor:
        query = (torch.arange(block.start, block.stop, device=device) + first_query)[None, None, :, None]
        allowed = inside(element, head, query, key)
        if not isinstance(allowed, Tensor):  # a function that allows everything may say so with a bool
            allowed = torch.full((1, 1, 1, 1), bool(allowed), device=device)
        shape = (allowed.shape[0], allowed.shape[1], block.stop - block.start, num_keys)
        return allowed.expand(shape) if real is None else allowed.expand(shape) & real

    return rows
