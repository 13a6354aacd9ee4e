"""Tiles of terms with gradients added up in place, so that no gradient of one tile is as large as a whole tensor."""

from __future__ import annotations

from typing import Final, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnflow.bias.impl._guidance_tile import GuidanceTiles
from attnflow.bias.terms import Additive, Dense, Guidance, Offset, Product, Term, wide


@runtime_checkable
class TensorTerm(Term, Protocol):
    """A term that says which tensors it is made of, as all of ours do; without that, gradients cannot be recomputed."""

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name, in a fixed order."""
        ...

    def with_tensors(self, tensors: list[Tensor]) -> TensorTerm:
        """The same term on other tensors, given in the order of `tensors()`."""
        ...


@runtime_checkable
class TermTiles(Protocol):
    """Computes blocks of pairs of one term, and gathers gradients from them."""

    def tile(
        self, rows: slice, columns: slice, allowed: Bool[Tensor, "batch_1 heads_1 queries keys"] | None
    ) -> Float[Tensor, "batch_2 groups queries keys"]:
        """B for a block of pairs; anything finite where no pair is allowed."""
        ...

    def start(self) -> None:
        """Forget what has been gathered."""
        ...

    def gather(
        self,
        rows: slice,
        columns: slice,
        allowed: Bool[Tensor, "batch_1 heads_1 queries keys"] | None,
        gradient: Float[Tensor, "batch_2 groups queries keys"],
    ) -> None:
        """Add what the upstream gradient of a block of pairs gives to each tensor."""
        ...

    def gradients(self) -> list[Tensor | None]:
        """The gradient of each of the term's tensors, None for integers."""
        ...


class _InPlace:
    """Terms whose own `tile` costs nothing but the tile; subclasses add to `sums`, one for each tensor of the term."""

    def __init__(self, term: Term) -> None:
        self.term = cast(TensorTerm, term)

    def tile(self, rows: slice, columns: slice, allowed: Tensor | None) -> Tensor:
        return self.term.tile(rows, columns)

    def start(self) -> None:
        tensors = self.term.tensors().values()
        self.sums: list[Tensor | None] = [torch.zeros_like(wide(t)) if t.is_floating_point() else None for t in tensors]

    def gradients(self) -> list[Tensor | None]:
        return self.sums


class _ProductTiles(_InPlace):
    def gather(self, rows: slice, columns: slice, allowed: Tensor | None, gradient: Tensor) -> None:
        term, (to_rows, to_columns) = cast(Product, self.term), cast(list[Tensor], self.sums)
        gradient = gradient.to(to_rows.dtype)
        _add(to_rows[:, :, rows], gradient @ wide(term.columns[:, :, columns]))
        _add(to_columns[:, :, columns], gradient.mT @ wide(term.rows[:, :, rows]))


class _AdditiveTiles(_InPlace):
    def gather(self, rows: slice, columns: slice, allowed: Tensor | None, gradient: Tensor) -> None:
        to_columns, *to_rows = cast(list[Tensor], self.sums)
        _add(to_columns[:, :, columns], gradient.sum(dim=2))
        for each in to_rows:
            _add(each[:, :, rows], -gradient.sum(dim=3))


class _DenseTiles(_InPlace):
    def gather(self, rows: slice, columns: slice, allowed: Tensor | None, gradient: Tensor) -> None:
        (to_values,) = cast(list[Tensor], self.sums)
        _add(to_values[:, :, rows, columns], gradient)


class _OffsetTiles(_InPlace):
    def gather(self, rows: slice, columns: slice, allowed: Tensor | None, gradient: Tensor) -> None:
        term, to_table = cast(Offset, self.term), cast(Tensor, self.sums[0])
        bucket = term.buckets(rows, columns)
        gradient = gradient.to(to_table.dtype).sum_to_size((len(bucket), *gradient.shape[1:]))
        for total, part in zip(to_table, gradient.unbind(dim=1), strict=True):
            if total.is_cuda:  # each device has one of these that adds in a fixed order
                total.index_put_((bucket,), part, accumulate=True)
            else:
                total.index_add_(0, bucket.flatten(), part.flatten())


class _AutogradTiles(_InPlace):
    """Any other term: its tile is computed again with autograd."""

    def gather(self, rows: slice, columns: slice, allowed: Tensor | None, gradient: Tensor) -> None:
        tensors = list(self.term.tensors().values())
        places = [index for index, total in enumerate(self.sums) if total is not None]
        with torch.enable_grad():
            for index in places:
                tensors[index] = tensors[index].detach().requires_grad_()
            tile = self.term.with_tensors(tensors).tile(rows, columns)
            inputs = [tensors[index] for index in places]
            upstream = gradient.sum_to_size(tile.shape).to(tile.dtype)
            parts = torch.autograd.grad(tile, inputs, upstream, materialize_grads=True)
        for index, part in zip(places, parts, strict=True):
            cast(Tensor, self.sums[index]).add_(part)


def _add(total: Tensor, part: Tensor) -> None:
    """In place; one tensor may serve all batch elements."""
    total.add_(part.sum_to_size(total.shape))


_TILES: Final[dict[type, type[_InPlace]]] = {
    Product: _ProductTiles,
    Additive: _AdditiveTiles,
    Offset: _OffsetTiles,
    Dense: _DenseTiles,
}


def tiles_of(term: Term) -> TermTiles:
    """What computes the tiles of a term."""
    if isinstance(term, Guidance):
        return cast(TermTiles, GuidanceTiles(term))
    return cast(TermTiles, _TILES.get(type(term), _AutogradTiles)(term))
