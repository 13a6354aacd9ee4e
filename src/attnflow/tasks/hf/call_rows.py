"""Reads the sequences of a model's call, or says why they are not shared, and maps outputs back to them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.audit.packing import BOUNDARIES
from attnflow.models.arguments import CACHES
from attnflow.tasks.prefixes import Batch, SharedPlan

CACHE: Final = "a cache was in use or requested (pass use_cache=False)"
_ROWS: Final = {"input_ids", "attention_mask", "position_ids", "labels"}
_FLAGS: Final = {"use_cache", "return_dict", "output_hidden_states", "output_attentions", "output_router_logits"}
PACKED: Final = {*BOUNDARIES, "seq_idx", "max_length_q", "max_length_k"}  # where packed sequences begin, for kernels
_PLAIN: Final = {*_ROWS, *_FLAGS, *PACKED, "num_items_in_batch", "fused_lm_head"}


class NotShared(Exception):
    """Why a call is not shared; its text is what the report counts."""


def named_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [name for name in inspect.signature(model.forward).parameters if name != "self"]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def other_arguments(named: Mapping[str, Any]) -> list[str]:
    """The arguments that hold something which may refer to the rows."""

    def nothing(value: object) -> bool:
        return value is None or value is False or value == 0 if not isinstance(value, Tensor) else value.ndim == 0

    return sorted(name for name, value in named.items() if name not in _PLAIN and not nothing(value))


def read_batch(named: Mapping[str, Any], model: nn.Module, by_column: bool, counted: bool = False) -> Batch:
    """The sequences of a call (`counted`: pads take no position); raises `NotShared` if none can be shared."""
    if any(named.get(name) is not None for name in CACHES) or flag(named, model, "use_cache"):
        raise NotShared(CACHE)
    ids, mask, positions = (named.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise NotShared("it had no input_ids [batch, tokens]")
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == ids.shape):
        raise NotShared("its attention_mask was not [batch, tokens]")
    if flag(named, model, "output_attentions"):
        raise NotShared("output_attentions was requested")
    if not flag(named, model, "return_dict"):
        raise NotShared("a tuple was requested (return_dict=False)")
    starts = None
    real = np.ones(tuple(ids.shape), np.bool_) if mask is None else (mask != 0).cpu().numpy()
    if positions is None:
        places = real.cumsum(axis=1) - 1 if counted else np.arange(ids.shape[1])
        placed = np.broadcast_to(places, tuple(ids.shape))
    elif isinstance(positions, Tensor) and positions.ndim == 2 and positions.shape[1] == ids.shape[1]:
        placed = np.broadcast_to(positions.cpu().numpy().astype(np.int64), tuple(ids.shape))
        if mask is None and (np.diff(placed, axis=1) != 1).any():  # as transformers finds packed sequences
            starts = np.diff(placed, axis=1, prepend=placed[:, :1]) != 1
    else:
        raise NotShared("its position_ids were not [batch, tokens]")
    begins = np.zeros(real.shape, np.bool_) if starts is None else starts
    begins[:, 0] = True
    expected = {name: np.append(np.flatnonzero(begins), begins.size) for name in BOUNDARIES}
    expected["seq_idx"] = np.cumsum(begins, axis=1) - 1
    for name, value in expected.items():
        given = named.get(name)
        if isinstance(given, Tensor) and not np.array_equal(given.cpu().numpy().ravel(), value.ravel()):
            raise NotShared(f"its {name} disagrees with the sequences that its position_ids mark")
    given_columns = by_column and (counted or positions is not None)
    return Batch(ids.cpu().numpy().astype(np.int64), real, placed, by_column=given_columns, starts=starts)


def flag(named: Mapping[str, Any], model: nn.Module, name: str) -> bool:
    """An argument that the config decides where the call does not."""
    value = named.get(name)
    return bool(getattr(text_config(model), name, False)) if value is None else bool(value)


def text_config(model: nn.Module) -> object:
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    return text() if callable(text) else config


def in_rows(output: object, chosen: SharedPlan) -> object:
    if isinstance(output, Tensor):
        return to_rows(output, chosen)
    if isinstance(output, tuple | list):
        parts = cast("list[object]", output)
        return type(output)(in_rows(one, chosen) for one in parts)
    if isinstance(output, Mapping):
        values = {name: in_rows(v, chosen) for name, v in cast(Mapping[str, object], output).items()}
        return values if type(output) is dict else cast(Any, type(output))(**values)
    return output


def to_rows(tensor: Tensor, chosen: SharedPlan) -> Tensor:
    """The values in the trees' slots, at the tokens of the rows (0 at pads) or at their labels."""
    if tensor.ndim == 0:
        return tensor
    rows, width = chosen.shape
    if tuple(tensor.shape[:2]) == (rows, width):
        place = chosen.place
    elif chosen.label_place is not None and tuple(tensor.shape[:2]) == (rows, width - 1):
        place = chosen.label_place
    else:
        raise UnsupportedArchitecture(
            f"cannot map an output of shape {tuple(tensor.shape)} back to the batch's sequences: expected [{rows}, "
            f"{width}, ...] or one row for each label, not a part (sequence parallelism). Remove the handle of "
            "share_prefixes for this call"
        )
    index = torch.from_numpy(place).to(tensor.device)
    flat = tensor.reshape(rows * tensor.shape[1], *tensor.shape[2:])
    wide = flat.float() if flat.dtype in (torch.float16, torch.bfloat16) and flat.requires_grad else flat
    read = wide.index_select(0, index.clamp(min=0).flatten()).to(flat.dtype)  # gradients of the rows add up in float32
    read = read.reshape(*place.shape, *tensor.shape[2:])
    pads = index < 0
    return read.masked_fill(pads.reshape(*place.shape, *[1] * (tensor.ndim - 2)), 0) if bool(pads.any()) else read


def router_rows(logits: Tensor, chosen: SharedPlan) -> Tensor:
    """The router logits [batch * tokens, experts] of the rows; 0 at pads, which the loss leaves out."""
    return to_rows(logits.reshape(*chosen.shape, logits.shape[-1]), chosen).flatten(0, 1)
