"""Reads documents and allowed pairs from the arguments of a call, for audits and lints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnflow._core.markup import plural, shorten
from attnflow.audit.inputs import Inputs, Slot
from attnflow.masks.build import computed_pairs
from attnflow.masks.flex import allowed_of_rows, is_row_intervals

Documents = str | Sequence[Any] | Tensor | None
BOUNDARIES: Final = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seq_lens", "cu_seqlens")  # of the batch, not of its rows
DOCUMENT_ARGUMENTS: Final = ("seq_idx", *BOUNDARIES)
# Other names for the same: boundaries, a number for each position, lengths, positions.
_MORE_BOUNDARIES: Final = re.compile(r"cu_?seq_?len(gth)?s?(_(q|k|kv))?(_padded)?|cumulative_(seq_?)?len(gth)?s?")
_NUMBERS: Final = re.compile(
    r"(document|doc|segment|sequence|seq|sample|example|pack|packing)s?_?(id|idx|index|number)s?"
)
LENGTHS: Final = re.compile(r"((document|doc|segment|sequence|seq|sample|example|packed)s?_?)?(len|length)s")
_POSITIONS: Final = re.compile(r"positions?|input_pos(itions)?|pos_ids?|position_indices")
_FORMS: Final = (_MORE_BOUNDARIES, _NUMBERS, LENGTHS, _POSITIONS)
_BY_NAME: Final = (*DOCUMENT_ARGUMENTS, "attention_mask", "position_ids", "decoder_position_ids")


def read_packing(
    arguments: Mapping[str, Any],
    real: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    *,
    from_lowest: bool = False,
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """({argument: bool [batch, n], where runs of positions begin but the first}, why boundaries are not believed)."""
    starts: dict[str, Tensor] = {}
    problems: list[str] = []
    total = real.numel()
    for name in [*BOUNDARIES, *(n for n in arguments if n not in BOUNDARIES and _MORE_BOUNDARIES.fullmatch(n))]:
        bounds = integers(arguments, name, (1,)) if name in BOUNDARIES else _integers(arguments[name], 1)
        if bounds is None:
            continue
        lengths = bounds.diff()
        if not _rises(bounds, total):
            few = f"{bounds[:6].tolist()}{' ...' if len(bounds) > 6 else ''}"
            problems.append(f"{name} must rise from 0 to {total}, the number of positions, got {few}")
            continue
        starts[name] = _at_bounds(bounds[1:], real)
        most = arguments.get(f"max_length_{name[-1]}")
        if most is not None and int(most) < lengths.max():
            problems.append(f"max_length_{name[-1]} is {int(most)}, but {name} has a document of {int(lengths.max())}")
    sequences = integers(arguments, "seq_idx", (1, 2))
    if sequences is not None and _per_position(sequences, real.shape) is None:
        raise ValueError(f"seq_idx must number the positions {list(real.shape)}, got {list(sequences.shape)}")
    for name, value in sorted(arguments.items(), key=lambda item: item[0] != "seq_idx"):
        begins = _of_lengths(value, real) if LENGTHS.fullmatch(name) else None
        if _NUMBERS.fullmatch(name) and (numbers := _per_position(_integers(value, 2), real.shape)) is not None:
            begins = _changes(numbers, real)
        starts |= {} if begins is None else {name: begins}
    if mask is not None and not mask.is_floating_point() and mask.long().amax() > 1:
        starts["attention_mask"] = _changes(mask, real)
    if positions is not None:  # one goes back, or stays at the lowest one (a document of one token)
        several = positions.ndim > 2  # of an image, all tokens may share a time
        positions = (positions[0] if several else positions).expand_as(real)
        before, both = _before(positions, real)
        lowest = positions == positions.where(real, positions.max()).amin(-1, keepdim=True)
        back = (positions < before) | ((positions == before) & lowest & (not several))
        back &= both & (lowest | (not from_lowest))
        if back.any():
            starts["position_ids"] = back
    return starts, tuple(problems)


def starts_by(batch: Mapping[str, Any], documents: Documents, real: Tensor, flat: bool) -> tuple[str, Tensor | None]:
    """(what tells documents, as the caller says; where they begin by it, None where that is read by its name)."""
    name = documents if isinstance(documents, str) else "" if documents is None else "documents="
    if name in ("", "rows", *_BY_NAME) or any(form.fullmatch(name) for form in _FORMS):
        return name, None
    value = batch[name] if isinstance(documents, str) else documents
    numbers, total = _integers(value, 2), real.numel()
    if numbers is not None and numbers.shape == (real.shape[1:] if flat else real.shape):
        return name, _changes(numbers.view_as(real), real)
    begins = _of_lengths(value, real)
    if begins is None and numbers is not None and numbers.ndim == 1 and _rises(numbers, total):
        begins = _at_bounds(numbers[1:], real)
    if begins is None:
        raise ValueError(
            f"documents={name.removesuffix('documents=')} must number the positions {list(real.shape)}, be lengths of "
            f"documents that add up to them, or boundaries that rise from 0 to {total}, got {shorten(value, 60)}"
        )
    return name, begins


def _rises(bounds: Tensor, total: int) -> bool:
    return len(bounds) > 1 and not bounds[0] and int(bounds[-1]) == total and not (bounds.diff() < 0).any()


def other_positions(arguments: Mapping[str, Any], size: tuple[int, int]) -> tuple[str, Tensor] | None:
    """(name, positions [batch, n]) of an entry that holds position ids under another name."""
    for name in filter(_POSITIONS.fullmatch, arguments):
        if (positions := _per_position(_integers(arguments[name], 2), size)) is not None:
            return name, positions
    return None


def numbers_of(value: object) -> Tensor | None:
    """An entry as a tensor; None for texts, objects and lists of different lengths."""
    try:
        return as_tensor(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _integers(value: object, axes: int) -> Tensor | None:
    tensor = numbers_of(value)
    return tensor.long() if tensor is not None and _whole(tensor) and 0 < tensor.ndim <= axes else None


def _whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def _per_position(numbers: Tensor | None, size: tuple[int, ...]) -> Tensor | None:
    n = size[1]
    if numbers is None or numbers.shape[-1] != n or numbers.numel() not in (n, size[0] * n):
        return None
    return numbers.reshape(-1, n).expand(size)


def _of_lengths(value: Any, real: Tensor) -> Tensor | None:
    """Where documents begin by their lengths, of the whole batch or row by row; None if they do not add up."""
    if isinstance(value, list | tuple) and value and all(isinstance(row, list | tuple | Tensor) for row in value):
        lengths = [part for row in value if (part := _integers(row, 1)) is not None]
        if not len(lengths) == len(value) == len(real):
            return None
    elif (whole := _integers(value, 2)) is not None:
        lengths = list(torch.atleast_2d(whole))
    else:
        return None
    sizes = [int(part.sum()) for part in lengths]
    n, tokens = real.shape[1], real.sum(-1).tolist()
    if len(lengths) == 1 and len(real) > 1:
        if lengths[0].tolist() == tokens:
            return torch.zeros_like(real)  # of the rows, as their padding says, too
        return _at_bounds(lengths[0].cumsum(0), real) if sizes[0] == real.numel() else None
    if len(lengths) != len(real) or any(size not in (n, count) for size, count in zip(sizes, tokens, strict=True)):
        return None
    places = [torch.arange(n) if size == n else row.cumsum(0) - 1 for size, row in zip(sizes, real.long(), strict=True)]
    numbers = [torch.bucketize(at, part.cumsum(0), right=True) for at, part in zip(places, lengths, strict=True)]
    return _changes(torch.stack(numbers), real)


def documents(inputs: Inputs, slot: Slot) -> tuple[Tensor, str]:
    """(pairs within a document by any argument, bool [1 or batch, n, n]; documents in words, "" for one)."""
    mask, positions = inputs.argument(slot, "attention_mask"), inputs.argument(slot, "position_ids")
    real = inputs.real_in(slot).expand(inputs.batch, -1)
    begins, problems = read_packing(inputs.kwargs, real, mask, positions)
    if problems:
        raise ValueError(problems[0])
    starts = [each for each in begins.values() if each.any()]
    if not starts:
        return torch.ones(1, slot.length, slot.length, dtype=torch.bool), ""
    numbers = torch.stack(starts).any(0).cumsum(-1)
    runs = (row[kept].unique_consecutive(return_counts=True)[1] for row, kept in zip(numbers, real, strict=True))
    rows = [lengths.tolist() for lengths in runs]
    words = f"up to {plural(max(map(len, rows)), 'packed document')} a sequence"
    if all(row == rows[0] for row in rows):
        sizes = " + ".join(map(str, rows[0][:12])) + (" + ..." if len(rows[0]) > 12 else "")
        words = f"{plural(len(rows[0]), 'packed document')}, {sizes} tokens"
    return numbers[:, :, None] == numbers[:, None, :], words


def allowed_pairs(mask: object, batch: int, n: int) -> Tensor | None:
    """The pairs that a mask of any form allows in any head, bool [batch or 1, n, n]; None for a mask of positions."""
    if isinstance(mask, BlockMask):
        mask = computed_pairs(mask)
    pairs = as_tensor(mask)
    if pairs.ndim < 3:
        return None
    if is_row_intervals(pairs) and pairs.shape[-2] != n:
        pairs = allowed_of_rows(pairs, n)
    if pairs.shape[-2:] != (n, n) or pairs.shape[0] not in (1, batch):
        raise ValueError(f"attention_mask must be [{batch}, heads, {n}, {n}], got {list(pairs.shape)}")
    zero_one = not pairs.is_floating_point() or bool(((pairs == 0) | (pairs == 1)).all() and (pairs == 1).any())
    allow = pairs != 0 if zero_one else pairs >= 0  # above 0 it is a bias, as of keys that stand for several
    return allow.any(1) if allow.ndim == 4 else allow


def integers(arguments: Mapping[str, Any], name: str, ranks: tuple[int, ...]) -> Tensor | None:
    """An argument as int64 on the CPU; None if it is missing."""
    if (value := arguments.get(name)) is None:
        return None
    try:
        tensor = as_tensor(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__} that is not one: {error}") from error
    if not _whole(tensor):
        raise TypeError(f"{name} must hold integers, got {tensor.dtype}")
    if tensor.ndim not in ranks:
        raise ValueError(f"{name} must have {' or '.join(map(str, ranks))} axes, got {list(tensor.shape)}")
    return tensor.long()


def as_tensor(value: object) -> Tensor:
    return (value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))).detach().cpu()


def _at_bounds(ends: Tensor, real: Tensor) -> Tensor:
    """Where documents begin that run over all rows and end before the positions `ends`."""
    return _changes(torch.bucketize(torch.arange(real.numel()), ends, right=True).view_as(real), real)


def _changes(numbers: Tensor, real: Tensor) -> Tensor:
    before, both = _before(numbers, real)
    return both & (numbers != before)


def _before(values: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    last = torch.where(real, torch.arange(real.shape[1]), -1).cummax(-1).values
    last = F.pad(last[:, :-1], (1, 0), value=-1)
    return values.gather(1, last.clamp(min=0)), real & (last >= 0)
