"""Matches rows of tensors with positions, inside a model and in the outputs that its caller receives."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple, cast

import torch
from torch import Tensor


@dataclass(frozen=True)
class Frame:
    batch: int  # number of sequences
    batched: bool
    segments: Mapping[int, int]  # {length: joint position of the first one}
    streams: bool = False  # whether the layers are called with several streams, [streams, batch, positions, width]
    whole: bool = True  # whether a pass feeds all positions at once
    passed: tuple[int, ...] = ()  # numbers of positions that were passed, to which a model may add some
    kept: int = 0  # how many of the last positions the call asks outputs for (`logits_to_keep`); 0 for all
    widths: frozenset[int] = frozenset()  # sizes of the model's features, which may equal a number of positions
    beside: frozenset[int] = frozenset()  # numbers of rows of other inputs, such as images


def canonical(
    tensor: Tensor, frame: Frame, layered: bool = False, within: bool = False
) -> tuple[Tensor, int] | str | None:
    """(values [batch, positions, features], offset); None without a sequence axis; a reason if it is ambiguous."""
    if (
        not tensor.is_floating_point()
        or tensor.is_meta
        or tensor.layout is not torch.strided
        or tensor.ndim < 1 + frame.batched
        or not tensor.numel()
    ):
        return None
    if not frame.batched:
        tensor = tensor[None]
    sizes = list(tensor.shape)
    pairs = [p for p in range(len(sizes) - 1) if sizes[p] == frame.batch and sizes[p + 1] in frame.segments]
    streams = len(sizes) > 3 and pairs == [1]
    if streams and 1 < sizes[0] == frame.batch and not layered and (frame.streams or not within):
        return f"shape {tuple(tensor.shape)} has two axes as long as the batch"
    if streams and (sizes[0] not in (1, frame.batch) or frame.streams):
        tensor, axes = tensor.movedim(1, 0), [2]
    elif sizes[0] in (1, frame.batch):
        axes = [axis for axis in range(1, len(sizes)) if sizes[axis] in frame.segments]
    elif len(sizes) >= 3 and sizes[0] in frame.segments and sizes[1] == frame.batch:
        tensor, axes = tensor.transpose(0, 1), [1]
    else:
        return None
    if not axes:
        return None
    scores = tensor.ndim > 3 and axes == [tensor.ndim - 2, tensor.ndim - 1]  # [batch, heads, queries, keys]: of queries
    if len(axes) > 1 and not scores and not (layered and tensor.ndim == 3):
        return f"shape {tuple(tensor.shape)} has several axes as long as the sequence"
    values = tensor.movedim(axes[0], 1)
    return values.reshape(*values.shape[:2], -1), frame.segments[values.shape[1]]


Form = Literal[
    "axis",  # the batch comes first
    "second axis",  # the batch comes second, behind stacked layers
    "batch first",  # rows of positions are flattened into one axis
    "position first",
    "sequence first",  # several rows of positions for each sequence are flattened into one axis
    "group first",
    "pooled",  # one vector for each sequence
    "one per sequence",  # anything else for each sequence
    "related",  # [batch, rows of another input]: similarities by design
    "related columns",  # [rows of another input, batch]
    "pairs",  # [batch, batch]: every sequence with every other
    "unknown",
]
_EITHER: Final[Mapping[Form, tuple[Form, ...]]] = {  # what an unsure layout may be
    "axis": ("axis", "second axis"),
    "batch first": ("batch first", "position first"),
    "sequence first": ("sequence first", "group first"),
    **{form: (form, "related columns", "pairs") for form in ("pooled", "one per sequence", "related")},
}


class OutputLayout(NamedTuple):
    """How a tensor that the caller receives holds positions: chosen in the base pass, kept in all others."""

    form: Form
    rows: int = 0  # per sequence
    offset: int = 0  # joint position of the first row
    shape: tuple[int, ...] = ()  # of the tensor in the unperturbed pass
    why: str = ""  # what came in place of positions, of an unknown layout
    sure: bool = True  # whether the place of the batch is known, not guessed

    @property
    def aligned(self) -> bool:
        return not (self.pooled or self.form in ("one per sequence", "pairs", "unknown"))

    @property
    def related(self) -> bool:
        return self.form in ("related", "related columns", "pairs")

    @property
    def pooled(self) -> bool:
        return self.form in ("pooled", "related", "related columns")

    @property
    def pools(self) -> bool:
        return self.sure and (self.form == "pooled" or (self.form == "one per sequence" and len(self.shape) == 1))


def layout_of(tensor: Tensor, frame: Frame, inside: Mapping[int, Tensor]) -> OutputLayout:
    """The layout of a received tensor; `inside` {offset: [batch, positions, features]} are the last outputs before it.

    Of n - 1 vectors row i is position i, as in `logits[:, :-1]`, unless they are the last rows of `inside`. Of n - 1
    numbers row i is position i + 1, the label of a loss.
    """
    shape = tuple(tensor.shape)
    state = len(shape) == 3 and shape[:2] == (1, frame.batch)  # as the last one of a GRU's only layer
    if state and frame.batch > 1 and frame.batch in frame.segments:
        why = f"has shape {list(shape)}, of positions or of sequences: pass another length"
        return OutputLayout("unknown", shape=shape, why=why)
    summary = shape[1:] if state else shape
    pooled = frame.batched and len(summary) == 2 and summary[1] in frame.widths  # [batch, width] or [batch, positions]
    if not pooled and isinstance(rows := canonical(as_numbers(tensor), frame, layered=True), tuple):
        stacked = len(shape) > 3 and shape[0] == shape[1] == frame.batch > 1 and shape[2] in frame.segments
        return OutputLayout("axis", rows[0].shape[1], rows[1], shape, sure=not stacked)
    if frame.batched and len(shape) == 2 and shape[1] == frame.batch != shape[0] and shape[0] in frame.beside:
        return OutputLayout("related columns", 1, max(frame.segments.values()), shape)
    layout = _in_counted_rows(tensor, frame, inside, pooled) or _for_each_sequence(shape, summary, frame, pooled)
    came = "is one number" if not shape else f"has shape {list(shape)}"
    why = f"{came}, and none of its axes holds {max(frame.segments)} positions"
    return layout or OutputLayout("unknown", shape=shape, why=why)


def _in_counted_rows(tensor: Tensor, frame: Frame, inside: Mapping[int, Tensor], pooled: bool) -> OutputLayout | None:
    """Rows known by their number: those that the call keeps, all positions, or one fewer; also [groups * batch, n]."""
    shape, batch, numbers = tuple(tensor.shape), frame.batch, as_numbers(tensor)
    for rows, (length, offset) in _row_counts(frame):
        flat, before = shape[:1] == (batch * rows,), inside.get(offset)
        if rows == frame.kept and len(shape) == 3 and shape[:2] == (batch, rows):
            return OutputLayout("axis", rows, offset + length - rows, shape)
        if not flat and (pooled or shape[:1] != (batch,) or shape[1:].count(rows) != 1):
            continue
        form: Form = "batch first" if flat else "axis"
        for other in _EITHER[form] if flat and batch > 1 else (form,):
            for first in {0, length - rows} if before is not None and before.shape[1] == length else ():
                guess = OutputLayout(other, rows, offset + first, shape)
                if torch.equal(arranged(numbers, guess, frame), cast(Tensor, before)[:, first : first + rows]):
                    return guess
        if rows >= length - 1:
            label = rows < length and len(shape) == 2 - flat and tensor.is_floating_point()
            return OutputLayout(form, rows, offset + label, shape, sure=not flat or batch == 1)
    if len(shape) > 2 and shape[0] > batch and shape[0] % batch == 0 and shape[1] in frame.segments:
        return OutputLayout("sequence first", shape[1], frame.segments[shape[1]], shape, sure=batch == 1)
    return None


def _for_each_sequence(
    shape: tuple[int, ...], summary: tuple[int, ...], frame: Frame, pooled: bool
) -> OutputLayout | None:
    """One row for each sequence: a summary, or similarities with the rows of another input."""
    batch = frame.batch
    layers = len(shape) > 2 and shape[1] == batch > 1  # [layers, batch, ...] as well as [batch, ...]
    related = len(shape) == 2 and shape[1] in frame.beside
    if not (frame.batched and summary[:1] == (batch,) and (pooled or related or (batch > 1 and not layers))):
        return None
    sure = not pooled or not {rows for rows, _ in _row_counts(frame)}.intersection(summary[1:])
    why = "" if sure else f"has shape {list(shape)}, of positions or of features: pass another length"
    form: Form = "pooled" if pooled else "related" if sure and related else "one per sequence"
    sure &= not (len(shape) == 2 and shape[1] == batch > 1)
    return OutputLayout(form, 1, max(frame.segments.values()), shape, why, sure)


def _row_counts(frame: Frame) -> list[tuple[int, tuple[int, int]]]:
    """(rows, (length, offset) of their segment): those asked for or passed, all of a segment, else one fewer."""
    last = [(frame.kept, segment) for segment in sorted(frame.segments.items(), key=itemgetter(1))[-1:] if frame.kept]
    whole = [(length, (length, offset)) for length, offset in frame.segments.items()]
    fewer = [(rows - 1, segment) for rows, segment in whole if rows > 2 and rows - 1 not in frame.segments]
    padded = [(rows, segment) for rows in frame.passed for segment in frame.segments.items() if rows < segment[0] - 1]
    return last + whole + fewer + padded


def arranged(tensor: Tensor, layout: OutputLayout, frame: Frame) -> Tensor:
    """A received tensor as [batch, rows, features]; as [1, 1, features] if its layout is unknown."""
    tensor = as_numbers(tensor)
    if layout.form in ("unknown", "pairs"):
        return tensor.reshape(1, 1, -1)
    if layout.form == "related columns":
        return tensor.T.reshape(frame.batch, 1, -1)
    if layout.form in ("batch first", "pooled", "one per sequence", "related"):
        return tensor.reshape(frame.batch, layout.rows, -1)
    if layout.form == "position first":
        return tensor.reshape(layout.rows, frame.batch, -1).transpose(0, 1)
    if layout.form in ("axis", "second axis"):
        narrow = dataclasses.replace(frame, segments={layout.rows: layout.offset})
        rows = canonical(tensor.transpose(0, 1) if layout.form == "second axis" else tensor, narrow, layered=True)
        assert isinstance(rows, tuple)
        return rows[0]
    if layout.form == "sequence first":
        groups = tensor.unflatten(0, (frame.batch, -1))
    else:
        groups = tensor.unflatten(0, (-1, frame.batch)).transpose(0, 1)
    return groups.movedim(2, 1).reshape(frame.batch, layout.rows, -1)


def settled(layout: OutputLayout, before: Tensor, after: Tensor, frame: Frame) -> OutputLayout:
    """The layout whose other sequences hold still between two passes when sequence 0 alone changes."""
    for form in _EITHER[layout.form]:
        guess = layout._replace(form=form, sure=True)
        if form == "pairs":
            moves = as_numbers(before) != as_numbers(after)
            if moves.any() and not moves[1:, 1:].any():
                return guess
            continue
        moved = (arranged(before, guess, frame) != arranged(after, guess, frame)).flatten(1).any(1)
        if moved[0] and not moved[1:].any():
            return guess
    return layout._replace(form="one per sequence" if layout.related else layout.form, sure=True)


def as_numbers(tensor: Tensor) -> Tensor:
    """The tensor in floating point, with all its values: predicted ids, flags and sparse tensors are compared, too."""
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor if tensor.is_floating_point() else tensor.double()


# Caches of keys, values and states among outputs, as transformers names them.
_CACHES: Final = re.compile(r"(.*_)?(past_\w+|cache)|cache_params|shared_kv_states|state")


def leaves(root: object, other: Callable[[str, object], None] | None = None) -> list[tuple[str, Tensor]]:
    """All tensors in nested containers but caches, with their paths; `other` gets what is neither, but for None."""
    tensors: list[tuple[str, Tensor]] = []
    left: list[tuple[str, object]] = [("", root)]
    while left:  # a loop: it runs for every module of every pass
        path, value = left.pop()
        if isinstance(value, Tensor) and not value.is_nested:
            tensors.append((path, value))
        elif isinstance(value, Mapping):
            items = cast(Mapping[Any, object], value).items()
            kept = [(k, v) for k, v in items if isinstance(v, Tensor) or not _CACHES.fullmatch(str(k))]
            left += [(f"{path}.{k}", v) for k, v in kept][::-1]
        elif isinstance(value, tuple | list | Tensor):
            left += [(f"{path}.{index}", item) for index, item in enumerate(cast(list[object], value))][::-1]
        elif other is not None and dataclasses.is_dataclass(value):
            left += [(f"{path}.{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)][::-1]
        elif other is not None and value is not None and not isinstance(value, bool | str):
            other(path, value)
    return tensors
