"""Cuts a batch into its rows and packed documents: what each is called with alone, and where its outputs are."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from attnflow.audit.batch.reading import Family, beside_ends, family_of, moved, read_batch
from attnflow.audit.inputs import read, where_chosen
from attnflow.audit.packing import BOUNDARIES, DOCUMENT_ARGUMENTS, as_tensor
from attnflow.masks.flex import is_row_intervals
from attnflow.models.subject import Subject

_COUNTS: Final = ("max_length_q", "max_length_k", "cache_position")  # of the batch, as the boundaries are
_IMAGES: Final = ("pixel", "image", "video", "audio", "input_features", "input_values")
BOUNDARY_NAME: Final = re.compile(r"doc|segment|seq|sample|cu_|position|pack|lengths")  # in names that are not read
_PADDING_MASKS: Final = {"mask": False, "padding_mask": True, "key_padding_mask": True, "src_key_padding_mask": True}
Place = tuple[int, Tensor] | None  # an axis of positions, and the columns of the batch along it


@dataclass(frozen=True, eq=False)
class Axis:
    """A run of positions: of the ids, or of states of an encoder that a decoder reads."""

    name: str  # the entry with a value per position
    prefix: str  # of the entries beside it, such as "decoder_"
    real: Tensor  # bool [batch, n], no padding
    documents: Tensor  # [batch, n], numbers within each row
    allow: Tensor | None = None  # bool [batch, n, n], the pairs of a mask of pairs

    @property
    def length(self) -> int:
        return self.real.shape[1]


@dataclass(frozen=True, eq=False)
class Cut:
    row: int
    document: int
    columns: tuple[Tensor, ...]  # of each axis
    whole: bool  # whether it is all that its row holds


@dataclass(frozen=True, eq=False)
class CutBatch:
    kwargs: dict[str, Any]
    axes: tuple[Axis, ...]  # the last one holds the documents
    size: int  # number of rows
    pool: Tensor  # token ids that may replace others
    dropped: frozenset[str]  # entries that say what a row alone needs nobody to say
    needed: frozenset[str]  # arguments that the model's forward requires
    unread: tuple[tuple[str, str], ...]  # entries that cannot be cut, with the reason
    stuck: str = ""  # why nothing can be cut

    def parts(self, documents: int | None) -> list[Cut]:
        if not self.axes:
            return [Cut(row, 0, (), True) for row in range(self.size)]
        parts: list[Cut] = []
        for row in range(self.size):
            *others, real = (axis.real[row].nonzero()[:, 0] for axis in self.axes)
            numbers = self.axes[-1].documents[row][real]
            runs = [real[numbers == number] for number in numbers.unique()]
            chosen = list(enumerate(runs))[-documents if documents else 0 :]
            parts += [Cut(row, number, (*others, run), len(runs) == 1) for number, run in chosen]
        return parts

    def tokens(self) -> tuple[Tensor, Tensor]:
        """(token ids [batch, n], which of them are real)."""
        if not self.axes or self.kwargs[self.axes[-1].name].is_floating_point():
            raise ValueError("expected a batch of token ids, got none: samples are found by their tokens")
        return self.kwargs[self.axes[-1].name].cpu(), self.axes[-1].real

    def trivial(self, part: Cut) -> bool:
        if self.size > 1 or any(len(run) < axis.length for run, axis in zip(part.columns, self.axes, strict=True)):
            return False
        positions = [self.kwargs.get(f"{axis.prefix}position_ids") for axis in self.axes]
        return all(p is None or torch.equal(as_tensor(p).flatten(), torch.arange(p.numel())) for p in positions)

    def alone(self, part: Cut) -> dict[str, Any]:
        kwargs: dict[str, Any] = {}
        for name, value in self.kwargs.items():
            if name not in self.dropped or name in self.needed:
                kwargs[name] = self.cut(name, value, part)
            if name in self.needed and name.endswith("position_ids"):
                kwargs[name] = torch.arange(kwargs[name].shape[-1], device=value.device).expand_as(kwargs[name])
        for axis, run in zip(self.axes, part.columns, strict=True):
            name = f"{axis.prefix}position_ids"
            if axis.allow is None or self.kwargs.get(name) is None:
                continue
            pairs = axis.allow[part.row][run][:, run]
            if not torch.equal(pairs, torch.ones_like(pairs).tril()):  # the mask alone does not say where tokens stand
                positions = self.cut(name, self.kwargs[name], part)
                kwargs[name] = positions - positions.amin()
        return kwargs

    def row(self, row: int) -> dict[str, Any] | None:
        """A row with its padding and its documents, as a batch of one; None where boundaries hold for the batch."""
        if any(self.kwargs.get(name) is not None for name in (*BOUNDARIES, *_COUNTS)):
            return None
        whole = Cut(row, 0, tuple(torch.arange(axis.length) for axis in self.axes), True)
        return {name: self.cut(name, value, whole) for name, value in self.kwargs.items()}

    def axis_of(self, name: str) -> int | None:
        prefixes = [axis.prefix for axis in self.axes]
        if name == "labels" and prefixes:
            return len(prefixes) - 1
        prefix = next((p for p in ("decoder_", "encoder_") if name.startswith(p) and name != "encoder_outputs"), "")
        image = any(word in name for word in _IMAGES) and all(axis.name != name for axis in self.axes)
        return prefixes.index(prefix) if prefix in prefixes and not image else None

    def cut(self, name: str, value: Any, part: Cut) -> Any:
        if isinstance(value, Mapping):
            items = {key: self.cut(name, item, part) for key, item in cast("Mapping[str, Any]", value).items()}
            return type(value)(**items) if hasattr(value, "to_tuple") else items
        if isinstance(value, tuple | list) and any(isinstance(item, Tensor) for item in cast("list[Any]", value)):
            return [self.cut(name, item, part) for item in cast("list[Any]", value)]
        if isinstance(value, BlockMask) or is_row_intervals(value):
            raise ValueError(f"{name} holds blocks or intervals, which cannot be cut")
        if not isinstance(value, Tensor) or not value.ndim:
            return value
        if self.size > 1 and len(value) == self.size:
            value = value[part.row : part.row + 1]
        elif self.size > 1 and name.endswith("position_ids") and value.ndim == 3 and value.shape[1] == self.size:
            value = value[:, part.row : part.row + 1]
        place = self.axis_of(name)
        if place is None:
            return value
        n, run = self.axes[place].length, part.columns[place].to(value.device)
        if value.ndim > 2 and value.shape[-2:] == (n, n) and ("mask" in name or value.shape[1] != n):
            return value[..., run[:, None], run]
        if name.endswith("position_ids"):
            return value[..., run]
        return value[:, run] if value.ndim > 1 and value.shape[1] == n else value

    def where(self, value: Tensor, single: Tensor, part: Cut, encoder: bool) -> tuple[Tensor, Tensor, Place] | str:
        """(an output of a part in the batch, alone; their axis of positions, found by lengths), or what differs."""
        other = f"has shape {list(value.shape)} in the batch and {list(single.shape)} alone"
        if value.ndim != single.ndim:
            return other
        axes = list(zip(self.axes, part.columns, strict=True))
        axes = axes if encoder else axes[::-1]
        rowed, place = self.size == 1, cast(Place, None)
        for at, (size, few) in enumerate(zip(value.shape, single.shape, strict=True)):
            if self.size > 1 and (size, few) == (self.size, 1):  # twice in scores of rows for rows
                value, rowed = value.narrow(at, part.row, 1), True
                continue
            for (axis, run), flat in product(axes, (False, True)):
                start = (size // self.size if flat else size) - axis.length  # of virtual tokens, in front; or -1
                if flat and (rowed or size % self.size or size == few):
                    continue
                if start < -1 or few - len(run) != start or (size == few and start > 0):
                    continue
                index = (run[:start] if start < 0 else run + start).to(value.device)
                index = index + part.row * (axis.length + start) if flat else index
                value, single = value.index_select(at, index), single.narrow(at, max(start, 0), len(index))
                rowed, place = rowed or flat, place or (at, run[: len(index)])
                break
            else:
                if not rowed and size == few * self.size:  # what else belongs to rows, flattened: parts of images
                    value, rowed = value.narrow(at, part.row * few, few), True
                elif size != few:
                    return other
        if not rowed and single.shape[:1] != (1,):
            return "has no batch axis"
        if place is None and not part.whole:
            return "has no positions, and its row holds several documents"
        return value, single, place


def rows_of(subject: Subject, kwargs: Mapping[str, Any]) -> CutBatch:
    inputs, model = read(subject, kwargs), subject.model
    given = {name: value for name, value in inputs.kwargs.items() if value is not None}
    kwargs = {name: v for name, v in given.items() if not hasattr(v, "get_seq_length") or v.get_seq_length()}
    family, plain = family_of(model), getattr(model, "config", None) is None
    axes, unread = list[Axis](), list[tuple[str, str]]()
    dropped = {"position_ids", "decoder_position_ids", *DOCUMENT_ARGUMENTS, *_COUNTS}
    for slot in inputs.slots:
        name = cast(str, slot.name)
        prefix = slot.prefix
        mask, away = kwargs.get(f"{prefix}attention_mask"), f"{prefix}attention_mask"
        for other, inverse in _PADDING_MASKS.items() if plain and mask is None else ():
            value, tokens = kwargs.get(other), inputs.values(slot)
            if not isinstance(value, Tensor) or value.shape != (inputs.batch, slot.length):
                continue
            real = value == 0 if inverse else value != 0
            if len(tokens[~real].unique(dim=0)) > 1:  # padding is one token
                unread.append((other, "what it hides is not one padding token: it is cut along, and not read"))
            else:
                mask, away = real.long(), other
        entries = {n: kwargs[n] for n in DOCUMENT_ARGUMENTS if n in kwargs and len(inputs.slots) == 1}
        entries |= {"attention_mask": mask, "position_ids": kwargs.get(f"{prefix}position_ids")}
        axis = _axis(name, prefix, inputs.values(slot), entries, family)
        axes.append(axis)
        dropped |= {away} if axis.allow is None else set()
    states, mask = kwargs.get("encoder_hidden_states"), kwargs.get("encoder_attention_mask")
    if isinstance(states, Tensor) and isinstance(mask, Tensor) and mask.shape == states.shape[:2]:
        axes.insert(0, Axis("encoder_hidden_states", "encoder_", mask.cpu() != 0, torch.zeros_like(mask.cpu())))
        dropped.add("encoder_attention_mask")
    first = next((value for value in kwargs.values() if isinstance(value, Tensor)), torch.zeros(1))
    size = inputs.batch if axes else len(first)
    parameters = inspect.signature(model.forward).parameters.values()
    needed = frozenset(parameter.name for parameter in parameters if parameter.default is parameter.empty)
    more, stuck = _unread(kwargs, size, dropped, axes)
    unread += more
    stuck = stuck or ("" if inputs.batched else "the inputs have no batch axis")
    return CutBatch(kwargs, tuple(axes), size, inputs.pool, frozenset(dropped), needed, tuple(unread), stuck)


def _axis(name: str, prefix: str, values: Tensor, entries: dict[str, Any], family: Family) -> Axis:
    values = values.detach().cpu()
    vectors = values.is_floating_point()
    ids = torch.zeros(values.shape[:2], dtype=torch.int64) if vectors else values
    family = Family() if vectors else replace(family, decoder=False)
    reading = read_batch({"input_ids": ids, **{n: v for n, v in entries.items() if v is not None}}, family)
    if reading.problems:
        raise ValueError(reading.problems[0])
    real = reading.real
    if prefix and reading.mask is None and reading.allow is None:  # decoders start with the id of padding
        real = real | (~real).long().cumprod(-1).bool()
    begins = F.pad(reading.documents.diff(dim=-1) != 0, (1, 0))
    if reading.allow is not None and not begins.any():
        begins = _blocks(reading.allow) & real
    elif family.ends and not vectors:
        early, late = beside_ends(begins, torch.isin(ids, torch.tensor(family.ends)) & real, real)
        begins = (begins & ~late & ~early) | moved(late, 1, False) | moved(early, -1, False)
    return Axis(name, prefix, real, begins.cumsum(-1), reading.allow)


def _blocks(allow: Tensor) -> Tensor:
    """Where a document begins by a mask of pairs: no pair crosses the border in front of it."""
    n = allow.shape[-1]
    allow = allow | torch.eye(n, dtype=torch.bool)
    lowest = allow.long().argmax(-1)
    highest = n - 1 - allow.flip(-1).long().argmax(-1)
    apart = lowest.flip(-1).cummin(-1).values.flip(-1) >= torch.arange(n)
    return F.pad(apart[:, 1:] & (highest.cummax(-1).values[:, :-1] < torch.arange(1, n)), (1, 0))


def _unread(
    kwargs: Mapping[str, Any], size: int, dropped: Iterable[str], axes: list[Axis]
) -> tuple[list[tuple[str, str]], str]:
    """(entries that stay whole although they hold tensors, each with the reason; why nothing can be cut)."""
    unread: list[tuple[str, str]] = []
    packed = bool(axes) and bool((axes[-1].documents * axes[-1].real).any())
    for name, value in kwargs.items():
        main = any(axis.name == name for axis in axes)
        image = any(word in name for word in _IMAGES) and not main
        if _is_cache(name, value):
            return unread, f"{name} holds states of earlier positions"
        if packed and len(axes) > 1:
            return unread, f"{axes[0].name} stands beside packed documents: which of them it belongs to is not known"
        if BOUNDARY_NAME.search(name) and not (image or main or name in dropped):
            unread.append((name, "may say where documents begin or tokens stand, and is not read: it is cut along"))
        if image and packed:
            return unread, f"{name} belongs to one of several documents, and which is not known"
        if not isinstance(value, Tensor) or name in dropped or not value.ndim:
            continue
        if name.endswith("attention_mask") and value.ndim == 2 and not value.all():
            unread.append((name, "marks padding of an entry that is not cut to what it holds"))
        if size > 1 and len(value) not in (1, size):
            if image:
                return unread, f"{name} has {len(value)} entries for {size} rows: it belongs to the batch"
            unread.append((name, f"has shape {list(value.shape)}, without an axis of the {size} rows: it stays whole"))
    return unread, ""


def _is_cache(name: str, value: object) -> bool:
    return hasattr(value, "get_seq_length") or name in ("past_key_values", "cache_params", "state")


def stirred(rows: CutBatch, place: int, where: Tensor, seed: int) -> dict[str, Any]:
    """The call with other tokens, or other vectors, at the positions `where` [batch, n] of an axis."""
    name = rows.axes[place].name
    values: Tensor = rows.kwargs[name]
    generator = torch.Generator().manual_seed(seed)
    if values.is_floating_point():
        noise = torch.randn(values.shape, generator=generator, dtype=torch.float64).to(values)
        other = values + noise * values.detach().std(correction=0).clamp(min=1e-3)
    else:
        other = rows.pool[torch.randint(len(rows.pool), values.shape, generator=generator)].to(values)
    return {**rows.kwargs, name: where_chosen(where, other, values)}


def attached_masks(model: nn.Module) -> list[Any]:
    try:
        from attnflow.masks.hf.attention import MaskedAttention
        from attnflow.models.passes.interception import in_force
    except ImportError:  # without transformers nothing is attached
        return []
    interceptors = (part for module in model.modules() for part in in_force(module, "mask"))
    return [part for part in interceptors if isinstance(part, MaskedAttention)]
