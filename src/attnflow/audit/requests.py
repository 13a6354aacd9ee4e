"""Compares the mask that a model asks transformers for with what its configuration and the inputs say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from attnflow._core.markup import plural
from attnflow.audit.inputs import Inputs, Slot

# Families in which all image tokens of a sequence see one another (or all of a prefix), and those in which only the
# tokens of one image do.
_JOINED: Final = frozenset({"molmo2", "molmo2_text", "hrm_text", "paligemma"})
_APART: Final = frozenset({"gemma3", "gemma3_text", "gemma4", "gemma4_text", "t5gemma2", "gemma4_unified"})
_TYPES: Final = ("mm_token_type_ids", "token_type_ids")


@dataclass(frozen=True)
class Disagreement:
    words: str
    pairs: Tensor  # bool [rows, n, n], not empty
    wider: bool  # whether these are asked for and not to be read; else they are to be read and not asked for


def disagreement(
    asked: Tensor, expected: Tensor, base: Tensor, together: Tensor, real: Tensor, words: tuple[str, str]
) -> Disagreement | None:
    """The first of: padding that is read, documents that mix, later positions, another window or chunks.

    All are bool [rows, n, n] but `real`, [rows, n]; what padding reads is not judged. `expected` is the narrower part
    of `base` that a layer may read, and `words` describe the request and the expectation.
    """
    queries, keys = real[:, :, None], real[:, None, :]
    n = real.shape[-1]
    padding = asked & base & queries & ~keys
    if padding.any():
        count = int(padding.any(1).sum(-1).max())
        why = f"asked for {plural(count, 'position')} of padding; attention_mask says that they are padding"
        return Disagreement(why, padding, True)
    judged = queries & keys
    across = asked & ~together & judged & torch.ones(n, n, dtype=torch.bool).tril()
    if across.any():
        return Disagreement("asked for earlier documents; the inputs say that documents are packed", across, True)
    more, less = asked & ~expected & judged, expected & ~asked & judged
    less = less & torch.ones(n, n, dtype=torch.bool).tril()  # prefix models ask for less than both directions
    if more.any() or less.any():
        why = f"asked for {words[0]}; the configuration and inputs say {words[1]}"
        return Disagreement(why, more if more.any() else less, bool(more.any()))
    return None


def within_blocks(later: Tensor, family: str, inputs: Inputs, slot: Slot) -> tuple[Tensor, str]:
    """(later pairs that belong to one image or prefix, what the others do: "" without any, "unknown", or in words)."""
    runs, types = _blocks(inputs, slot)
    if runs is None or types is None:
        return later, "unknown"
    inside = later & (runs[:, :, None] == runs[:, None, :])
    if torch.equal(inside, later):
        return later, ""
    joined = later & (types[:, :, None] == types[:, None, :])
    if family in _JOINED:
        return joined, "" if torch.equal(joined, later) else "tokens of two types that see one another"
    return (inside, "blocks that see later blocks") if family in _APART else (later, "unknown")


def _blocks(inputs: Inputs, slot: Slot) -> tuple[Tensor | None, Tensor | None]:
    """(number of the run, type) of each position, [rows, n]: by token types, by places without tokens, by equal ids."""
    types = next((kind for name in _TYPES if (kind := inputs.argument(slot, name)) is not None), None)
    ids = inputs.kwargs.get(slot.name or "")
    if types is None and slot.places:
        types = torch.zeros(1, slot.length, dtype=torch.int64)
        types[:, list(slot.places)] = 1 + torch.arange(len(slot.places))
    elif types is None and isinstance(ids, Tensor) and not ids.is_floating_point():
        types = torch.atleast_2d(ids).detach().cpu()
    if types is None:
        return None, None
    changes = (types[:, 1:] != types[:, :-1]).cumsum(-1)
    return torch.nn.functional.pad(changes, (1, 0)), types
