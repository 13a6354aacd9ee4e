"""What a model may be called with: checks of token ids, tensors and caches among its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor

CACHES: Final = ("past_key_values", "cache_params", "cache")  # what forward and its outputs call a cache of past states


def unpadded(named: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Each row of tensors [rows, tokens], without the tokens at its ends that `attention_mask` leaves out."""
    ids = named["input_ids"]
    odd = [f"{name} of {list(value.shape)}" for name, value in named.items() if value.shape != ids.shape]
    if odd:
        raise ValueError(f"inputs of several prompts must be [prompts, tokens], got {odd[0]}: pass a list of them")
    rows: list[dict[str, Tensor]] = []
    for row, real in enumerate(named.get("attention_mask", torch.ones_like(ids))):
        places = real.nonzero().flatten().tolist()
        if not places:
            raise ValueError(f"prompt {row} is all padding, by its attention_mask")
        rows.append({name: value[row : row + 1, places[0] : places[-1] + 1] for name, value in named.items()})
    return rows


def special_ids(configs: Iterable[object], suffixes: tuple[str, ...]) -> set[int]:
    ids: set[int] = set()
    pending = list(configs)
    for config in pending:
        for name, value in vars(config).items() if config is not None else ():
            if hasattr(value, "get_text_config"):
                pending.append(value)
            elif name.endswith(suffixes):
                values = cast("list[object]", value) if isinstance(value, list | tuple) else [value]
                ids.update(one for one in values if isinstance(one, int))
    return ids


def rows_of_ids(inputs: Sequence[Any]) -> Tensor:
    lengths = [len(cast(Sequence[object], row)) for row in inputs if isinstance(row, Sequence | Tensor)]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"expected sequences of one length, got lengths {', '.join(map(str, lengths[:8]))}: pad them and pass "
            "attention_mask with them, or audit each alone"
        )
    tensor = torch.atleast_2d(torch.as_tensor(inputs))
    if tensor.is_floating_point() and tensor.numel():
        raise TypeError("token ids must be integers, got a list of floats; pass torch.tensor(rows) if they are vectors")
    return tensor.long() if tensor.is_floating_point() else tensor


def named_tensors(inputs: Mapping[str, object]) -> dict[str, Tensor]:
    """Make tensors of named inputs, without those that are None and an empty cache; `ValueError` for a filled one."""
    named = {str(name): value for name, value in inputs.items() if value is not None}
    for name in CACHES:
        cache = cast(Any, named.pop(name, ()))
        if cache.get_seq_length() if hasattr(cache, "get_seq_length") else len(cache):
            raise ValueError(
                f"{name} holds states of earlier positions, which are not read here: pass the whole sequence, without "
                "a cache"
            )
    tensors = {name: as_tensor(name, value) for name, value in named.items()}
    for part in ("", "decoder_"):
        ids, mask = tensors.get(f"{part}input_ids"), tensors.get(f"{part}attention_mask")
        if ids is not None and mask is not None and ids.ndim == mask.ndim == 2 and ids.shape != mask.shape:
            raise ValueError(
                f"{part}input_ids are {list(ids.shape)}, their {part}attention_mask is {list(mask.shape)}: it needs "
                "one entry for each token"
            )
    return tensors


def as_tensor(name: str, value: object) -> Tensor:
    try:
        device = None if isinstance(value, Tensor) else "cpu"  # whatever the default device is
        return torch.as_tensor(value, device=device).clone()  # the caller may write to it before results read it again
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: of no type that torch infers
        shown = " ".join(f"{value!r:.60}".split())
        raise TypeError(f"{name} must be a tensor or a list of numbers, got {shown}") from None


def batched_ids(ids: Tensor) -> Tensor:
    if ids.ndim not in (1, 2) or ids.numel() == 0:
        raise ValueError(f"token ids must be [tokens] or [batch, tokens] with at least one token, got {ids.shape}")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"expected a text or token ids, got a tensor of {ids.dtype}")
    return ids if ids.ndim == 2 else ids[None]
