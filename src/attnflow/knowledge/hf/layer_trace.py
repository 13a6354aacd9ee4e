"""What a trace keeps while a model runs: each layer's strongest entries, and what every part does to the targets."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

import torch
from torch import Tensor
from torch.nn import functional

from attnflow.knowledge.hf.direct_effect import Directions, Kind, Stream, wide
from attnflow.knowledge.hf.readers import LayerReader
from attnflow.knowledge.memory_layer.reader import Reading
from attnflow.knowledge.provenance import By, LayerTrace

_WEIGHTS: Final = 1 << 22  # weights that are worked on at once, of all entries and as many tokens as that allows
_BLOCK: Final = 1 << 13  # entries whose values are held at once


class Effects:
    """Direct effects of what is added to the stream: (kind, layer) -> [positions]."""

    def __init__(self, directions: Directions | None) -> None:
        self._directions = directions
        self._found: dict[tuple[Kind, int], Tensor] = {}

    def add(self, kind: Kind, layer: int, value: Tensor) -> None:
        """One more contribution, [positions, model_dim]."""
        if self._directions is not None:
            effect = (value * self._directions.rows).sum(dim=-1).cpu()
            self._found[kind, layer] = effect + self._found.get((kind, layer), 0)

    def of(self, kind: Kind, layer: int | None = None) -> Tensor | None:
        """The effects of a kind, in a layer or in all."""
        chosen = [value for (k, number), value in self._found.items() if k == kind and layer in (None, number)]
        return torch.stack(chosen).sum(dim=0) if chosen else None

    def rest(self, layers: Sequence[int]) -> Tensor:
        """The effects of all blocks but these."""
        chosen = [value for (k, number), value in self._found.items() if k != "embedding" and number not in layers]
        zero = torch.zeros_like(next(iter(self._found.values())))
        return torch.stack([zero, *chosen]).sum(dim=0)


@dataclass(frozen=True, eq=False)
class _Piece:
    """What is kept of some positions; `places` are those of entries in a reading, -1 where none fired."""

    places: Tensor
    heads: Tensor
    scores: Tensor
    weights: Tensor
    norms: Tensor
    effects: Tensor
    active: Tensor
    output_norm: Tensor
    explained: Tensor


class LayerWatch:
    """Watches one layer, and keeps its strongest entries."""

    def __init__(self, reader: LayerReader, stream: Stream, frozen: Directions | None, top: int, by: By) -> None:
        self.reader, self._stream, self._frozen, self._top, self._by = reader, stream, frozen, top, by
        self._pieces: list[_Piece] = []
        self._heads = 1

    def see(self, reading: Reading) -> None:
        """Keep what is asked for of a reading."""
        sequence, batch = self._stream.sequence, self._stream.batch
        read = reading.scores.shape[-2:]  # heads, entries
        shape = (batch, reading.weights.shape[:-2].numel() // batch, *read)  # some families flatten a batch
        scores = reading.scores.reshape(len(reading.scores), *shape)[:, sequence]
        weights = reading.weights.reshape(shape)[sequence]
        ids = None if reading.ids is None else reading.ids.reshape(shape)[sequence]
        self._heads = read[0]
        self._pieces = []  # of one call: a second one replaces it
        step = max(1, _WEIGHTS // max(1, read.numel()))
        for start in range(0, len(self._stream.positions), step):
            rows = self._stream.positions[start : start + step]
            block = None if self._frozen is None else self._frozen.rows[start : start + step]
            kind = wide(weights.dtype)
            here = scores[:, rows].to(kind), weights[rows].to(kind)
            self._pieces.append(self._piece(*self._tabled(*here, None if ids is None else ids[rows]), block))

    def _tabled(self, scores: Tensor, weights: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Scores and weights with a column for each entry that any of the tokens read, and the places of these."""
        if ids is None:
            return scores, weights, self.reader.every().to(scores.device)
        places, column = _distinct(ids)
        if not len(places):  # nobody read anything: a column for some entry, with weight 0
            places = self.reader.every()[:1].to(ids.device)
        shape = (*ids.shape[:-1], len(places))
        spread = torch.where(ids >= 0, weights, 0)
        table = spread.new_zeros(shape).scatter_add(-1, column, spread)
        # What was not read has no score; it is below every score that was.
        absent = torch.finfo(scores.dtype).min
        every = scores.new_full((len(scores), *shape), absent)
        read_scores = torch.where(ids >= 0, scores, absent)
        return every.scatter_reduce(-1, column.expand_as(read_scores), read_scores, "amax"), table, places

    def _piece(self, scores: Tensor, weights: Tensor, places: Tensor, rows: Tensor | None) -> _Piece:
        norms = weights.new_empty(weights.shape[1:])
        effects = torch.full_like(weights, float("nan"))
        total = 0
        for block in torch.arange(len(places), device=places.device).split(max(1, _BLOCK // weights.shape[1])):
            values = self.reader.values(places[block]).detach().to(weights)
            norms[:, block] = values.norm(dim=-1)
            total = total + torch.einsum("phe,hed->pd", weights[..., block], values)
            if rows is not None:
                effects[..., block] = weights[..., block] * torch.einsum("pd,hed->phe", rows, values)
        size = (weights.abs() * norms if self._by == "norm" else effects.abs()).masked_fill(weights == 0, -1)
        width = min(self._top, self._heads * self.reader.num_entries)
        flat = functional.pad(size.flatten(1), (0, max(0, width - size[0].numel())), value=-1)
        largest, order = flat.topk(width, dim=-1)
        fired = largest >= 0
        order = torch.where(fired, order, 0)
        total = cast(Tensor, total)
        rest = total - self._written(torch.where(fired, _pick(weights, order), 0), order, weights.shape, places)
        size_all = total.norm(dim=-1)
        return _Piece(
            torch.where(fired, places[order % len(places)], -1),
            torch.where(fired, order // len(places), -1),
            _pick(scores, order),
            _pick(weights, order),
            _pick(weights.abs() * norms, order),
            _pick(effects, order),
            (scores[0] > 0).flatten(1).sum(dim=-1),
            size_all,
            1 - torch.where(size_all > 0, rest.norm(dim=-1) / size_all, 0),
        )

    def _written(self, weights: Tensor, order: Tensor, shape: torch.Size, places: Tensor) -> Tensor:
        """What the kept entries write."""
        sparse = weights.new_zeros(shape).flatten(1).scatter_add(-1, order, weights).view(shape)
        written = weights.new_zeros(())
        for columns in (order % len(places)).unique().split(max(1, _BLOCK // shape[1])):
            values = self.reader.values(places[columns]).detach().to(weights)
            written = written + torch.einsum("phe,hed->pd", sparse[..., columns], values)
        return written

    def finish(self, effects: Effects) -> LayerTrace:
        """The layer as it goes into the trace."""
        if not self._pieces:
            raise ValueError(f"layer {self.reader.layer} did not read its entries in the forward pass")
        places, heads, layer = self.joined("places"), self.joined("heads"), self.reader.layer
        absent = places < 0
        distinct, column = _distinct(places)
        scores = self.joined("scores", -2)
        thresholds = torch.zeros_like(scores)
        if len(distinct):
            thresholds = self.reader.thresholds(distinct).detach()[:, heads.clamp(min=0), column].to(scores)
        hide = partial(torch.masked_fill, mask=absent, value=0)
        return LayerTrace(
            layer,
            self._stream.paths[layer],
            self.reader.num_entries * self._heads,
            self.reader.ids(places).masked_fill(absent, -1).cpu(),
            heads.cpu(),
            hide(scores).cpu(),
            hide(thresholds).cpu(),
            hide(self.joined("weights")).cpu(),
            hide(self.joined("norms")).cpu(),
            None if self._frozen is None else hide(self.joined("effects")).cpu(),
            self.joined("active").cpu(),
            self.joined("output_norm").cpu(),
            self.joined("explained").cpu(),
            effects.of("entries", layer),
            effects.of("attention", layer),
        )

    def joined(self, name: str, dim: int = 0) -> Tensor:
        """What was kept of all positions."""
        return torch.cat([getattr(piece, name) for piece in self._pieces], dim=dim)


@contextmanager
def unobserved(readers: Sequence[LayerReader]) -> Generator[None]:
    """Whoever watched the layers does not see what happens here, and watches on afterwards."""
    before = [reader.observer for reader in readers]
    try:
        for reader in readers:
            reader.observer = None
        yield
    finally:
        for reader, observer in zip(readers, before, strict=True):
            reader.observer = observer


def _distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The ids that occur, without -1, and for each place which of them it holds (any, for -1)."""
    distinct = ids[ids >= 0].unique()
    return distinct, torch.searchsorted(distinct, ids).clamp(max=max(len(distinct) - 1, 0))


def _pick(table: Tensor, order: Tensor) -> Tensor:
    """Places of the flattened [heads, entries] of each position."""
    return table.flatten(-2).gather(-1, order.expand(*table.shape[:-3], *order.shape))
