"""Changes of entries' values that are in force together: the same bits in any order, and the old bits without them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnflow.knowledge.base import LayeredKnowledge

_EXACT: Final = 1e-13  # of the norm of a change: what its factors may lack
_SAMPLES: Final = 64  # numbers by which a layer is recognised in another precision
_ROWS: Final = 256  # of a change that are computed at once, so that they stay in the cache


@dataclass(frozen=True, eq=False)
class ValueChange:
    """What an edit adds to the values of entries of a layer, left @ right; all places of a fact have one direction."""

    ids: Int[Tensor, " entries"]  # ascending
    left: Float[Tensor, "entries rank"]
    right: Float[Tensor, "rank model_dim"]

    @classmethod
    def of(cls, base: LayeredKnowledge, layer: int, change: Float[Tensor, "entries model_dim"]) -> ValueChange:
        """Factor a change of all values of a layer, leaving out the entries that do not change."""
        rows = change.any(dim=1).nonzero().flatten().cpu()
        ids, order = base.ids[base.rows(layer)].cpu()[rows].sort()
        return cls(ids, *factors(change.cpu().double()[rows[order]]))

    def dense(self) -> Float[Tensor, "entries model_dim"]:
        """Add the products one by one, so that every machine gets the same bits, unlike from a matrix product."""
        blocks: list[Tensor] = []
        for left in self.left.split(_ROWS):
            block = left.new_zeros(len(left), self.right.shape[1])
            for column, row in zip(left.T, self.right, strict=True):
                block += column[:, None] * row
            blocks.append(block)
        return torch.cat(blocks)


def factors(matrix: Float[Tensor, "rows columns"]) -> tuple[Tensor, Tensor]:
    """Factor a matrix by projecting it onto random images of it, until nothing but rounding is left (Halko, 2011)."""
    rows, columns = matrix.shape
    rank, draw = 16, torch.Generator().manual_seed(0)
    while 2 * rank < min(rows, columns):
        basis = torch.linalg.qr(matrix @ torch.randn(columns, rank, generator=draw, dtype=matrix.dtype)).Q
        turned, sizes, right = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
        kept = sizes > _EXACT * sizes[0]
        left, right = basis @ turned[:, kept] * sizes[kept], right[kept]
        if float((matrix - left @ right).norm()) <= 2 * _EXACT * float(matrix.norm()):
            return left, right
        rank *= 2
    identity = torch.eye(min(rows, columns), dtype=matrix.dtype)
    return (identity, matrix) if rows <= columns else (matrix, identity)


@dataclass(frozen=True, eq=False)
class Patch:
    layers: Mapping[int, ValueChange]  # by the number of the reader
    numbers: Mapping[int, int]  # of each reader, the number of the model's layer

    @cached_property
    def digest(self) -> str:
        parts = [part for change in self.layers.values() for part in (change.ids, change.left, change.right)]
        shapes = repr([*self.layers, *(tuple(part.shape) for part in parts)]).encode()
        return hashlib.sha256(b"".join([shapes, *(part.numpy().tobytes() for part in parts)])).hexdigest()


@dataclass(frozen=True, eq=False)
class EditStack:
    """Values are those without patches plus all changes, in float64 and a fixed order, rounded once."""

    # Of each layer, the ascending ids of the entries that change, and their values without patches.
    before: Mapping[int, tuple[Tensor, Tensor]]
    patches: Sequence[Patch]

    def exact(self, layer: int) -> Float[Tensor, "entries model_dim"]:
        ids, values = self.before[layer]
        total = values.to(torch.float64, copy=True)
        for patch in sorted(self.patches, key=lambda patch: patch.digest):
            if layer in patch.layers:
                change = patch.layers[layer]
                total[torch.searchsorted(ids, change.ids)] += change.dense()
        return total

    def values(self, layer: int, exact: Tensor | None = None) -> Float[Tensor, "entries model_dim"]:
        values, exact = self.before[layer][1], self.exact(layer) if exact is None else exact
        return torch.where(exact == values.double(), values, exact.to(values.dtype))  # -0.0 + 0.0 would be 0.0


class Move(NamedTuple):
    """Values of a layer's entries as they were, as they are now, and as they would be without rounding."""

    layer: int
    ids: Tensor
    before: Tensor
    now: Tensor
    exact: Tensor


_STACKS: Final = WeakKeyDictionary[LayeredKnowledge, EditStack]()
_NONE: Final = EditStack({}, ())


def in_force(base: LayeredKnowledge) -> Sequence[Patch]:
    return _STACKS.get(base, _NONE).patches


def add(base: LayeredKnowledge, patch: Patch) -> list[Move]:
    """Put a patch in force; `ValueError` or `RuntimeError` if it cannot be, and then nothing changes."""
    old = _STACKS.get(base, _NONE)
    if any(patch.digest == other.digest for other in old.patches):
        raise ValueError("this edit is in force on the model already: remove its handle before you apply it again")
    before = dict(old.before)
    for layer, change in patch.layers.items():
        ids, values = before.get(layer, (change.ids[:0], None))
        new = change.ids[~torch.isin(change.ids, ids)]
        own = _values(base, layer, new)
        if values is not None and values.dtype != own.dtype:
            raise RuntimeError(
                f"the model was cast from {values.dtype} to {own.dtype} while edits were in force: remove these first"
            )
        ids, order = torch.cat([ids, new]).sort()
        before[layer] = ids, (own if values is None else torch.cat([values, own]))[order]
    return _replace(base, old, EditStack(before, (*old.patches, patch)), patch)


def take(base: LayeredKnowledge, patch: Patch) -> None:
    """Take a patch out of force; `RuntimeError` if its entries were changed since, and then nothing changes."""
    old = _STACKS[base]
    rest = EditStack(old.before, [other for other in old.patches if other is not patch])
    _replace(base, old, rest, patch)
    before = dict(old.before)
    for layer in patch.layers:
        ids, values = before.pop(layer)
        touched = [other.layers[layer].ids for other in rest.patches if layer in other.layers]
        if touched:
            kept = torch.isin(ids, torch.cat(touched))
            before[layer] = ids[kept], values[kept]
    _STACKS[base] = EditStack(before, rest.patches)


def fingerprint(base: LayeredKnowledge, layer: int) -> dict[str, object]:
    """Identify the entries of a layer, as they are without edits: exactly in one precision, by samples in another."""
    ids = base.ids[base.rows(layer)].cpu().sort().values
    rows, stack = base.get(ids.to(base.ids.device)).cpu(), _STACKS.get(base, _NONE)
    if layer in stack.before:
        changed, values = stack.before[layer]
        there = torch.isin(changed, ids)
        rows[torch.searchsorted(ids, changed[there]), base.layouts[layer].value] = values[there]
    digest = hashlib.sha256(rows.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    samples = rows.flatten()[:: max(1, rows.numel() // _SAMPLES)].double().tolist()
    return {"dtype": str(rows.dtype), "sha256": digest, "samples": samples}


def _replace(base: LayeredKnowledge, old: EditStack, new: EditStack, patch: Patch) -> list[Move]:
    moves: list[Move] = []
    for layer in patch.layers:
        if layer in old.before and not _holds(base, layer, old):
            raise RuntimeError(
                f"entries of layer {patch.numbers[layer]} were changed or deleted after an edit that is in force: undo "
                "that first, or make the edits permanent with from_ffn(to_ffn(model))"
            )
        ids = new.before[layer][0]
        exact, before = new.exact(layer), _values(base, layer, ids)
        now = new.values(layer, exact).to(before.dtype)
        if not bool(torch.isfinite(now).all()):
            where = f"layer {patch.numbers[layer]}"
            raise ValueError(f"the edit makes values of {where} too large for {now.dtype}: cast the model first")
        moves.append(Move(layer, ids, before, now, exact))
    for move in moves:
        rows = base.get(move.ids)
        rows[:, base.layouts[move.layer].value] = move.now.to(rows.device)
        base.update(move.ids, rows)
    _STACKS[base] = new
    return moves


def _holds(base: LayeredKnowledge, layer: int, stack: EditStack) -> bool:
    try:
        now = _values(base, layer, stack.before[layer][0])
    except KeyError:
        return False
    return torch.equal(now, stack.values(layer).to(now.dtype))


def _values(base: LayeredKnowledge, layer: int, ids: Tensor) -> Tensor:
    return base.get(ids)[:, base.layouts[layer].value].cpu().clone()
