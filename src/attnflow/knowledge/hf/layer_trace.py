"""What a trace keeps of one layer while a model runs: its strongest entries, of all that it read."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from attnflow.knowledge.hf.direct_effect import Directions, Kind, Stream, wide
from attnflow.knowledge.layered import LayerReader
from attnflow.knowledge.provenance import By, LayerTrace
from attnflow.knowledge.reader import Reading

_WEIGHTS: Final = 1 << 22  # weights that are worked on at once, of all entries and as many tokens as that allows
_BLOCK: Final = 1 << 13  # entries whose values are held at once


class LayerWatch:
    """Watches one layer, and keeps the entries with the `top` largest effects or norms for each position.

    Attributes:
        pieces: of some positions each: places, those of entries in a reading (-1 where none fired), and what belongs to
            the entry there, under the names of `LayerTrace`.
    """

    def __init__(self, reader: LayerReader, stream: Stream, frozen: Directions | None, top: int, by: By) -> None:
        self.reader, self._stream, self._frozen, self._top, self._by = reader, stream, frozen, top, by
        self.pieces: list[dict[str, Tensor]] = []
        self._heads = 1

    def see(self, reading: Reading) -> None:
        """Keep what is asked for of a reading; a second call of the layer replaces the first."""
        sequence, batch = self._stream.sequence, self._stream.batch
        read = reading.scores.shape[-2:]  # heads, entries
        shape = (batch, reading.weights.shape[:-2].numel() // batch, *read)  # some families flatten a batch
        scores = reading.scores.reshape(len(reading.scores), *shape)[:, sequence]
        weights = reading.weights.reshape(shape)[sequence]
        ids = None if reading.ids is None else reading.ids.reshape(shape)[sequence]
        self._heads, self.pieces = read[0], []
        step = max(1, _WEIGHTS // max(1, read.numel()))
        for start in range(0, len(self._stream.positions), step):
            rows = self._stream.positions[start : start + step]
            towards = None if self._frozen is None else self._frozen.rows[start : start + step]
            kind = wide(weights.dtype)
            table = self._tabled(scores[:, rows].to(kind), weights[rows].to(kind), None if ids is None else ids[rows])
            self.pieces.append(self._strongest(*table, towards))

    def joined(self, name: str) -> Tensor:
        """What was kept of all positions."""
        return torch.cat([piece[name] for piece in self.pieces], dim=-2 if name == "scores" else 0)

    def finish(self, effects: Mapping[tuple[Kind, int], Tensor]) -> LayerTrace:
        """The layer as it goes into the trace, with the direct effects of its parts."""
        layer = self.reader.layer
        if not self.pieces:
            raise ValueError(f"layer {layer} did not read its entries in the forward pass")
        places, heads, scores = self.joined("places"), self.joined("heads"), self.joined("scores")
        distinct, column = _distinct(places)
        thresholds = torch.zeros_like(scores)
        if len(distinct):
            thresholds = self.reader.thresholds(distinct).detach()[:, heads.clamp(min=0), column].to(scores)
        hide = partial(torch.masked_fill, mask=places < 0, value=0)
        return LayerTrace(
            layer,
            self._stream.paths[layer],
            self.reader.num_entries * self._heads,
            self.reader.ids(places).masked_fill(places < 0, -1).cpu(),
            heads.cpu(),
            hide(scores).cpu(),
            hide(thresholds).cpu(),
            hide(self.joined("weights")).cpu(),
            hide(self.joined("norms")).cpu(),
            None if self._frozen is None else hide(self.joined("effects")).cpu(),
            self.joined("active").cpu(),
            self.joined("output_norm").cpu(),
            self.joined("explained").cpu(),
            effects.get(("entries", layer)),
            effects.get(("attention", layer)),
        )

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

    def _strongest(self, scores: Tensor, weights: Tensor, places: Tensor, rows: Tensor | None) -> dict[str, Tensor]:
        norms = weights.new_empty(weights.shape[1:])
        effects = torch.full_like(weights, float("nan"))
        total = weights.new_zeros(())
        for block, values in self._values(torch.arange(len(places), device=places.device), places, weights):
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
        kept = weights.new_zeros(weights.shape).flatten(1)
        kept = kept.scatter_add(-1, order, torch.where(fired, _pick(weights, order), 0)).view(weights.shape)
        written = weights.new_zeros(())
        for block, values in self._values((order % len(places)).unique(), places, weights):
            written = written + torch.einsum("phe,hed->pd", kept[..., block], values)
        output_norm = total.norm(dim=-1)
        return {
            "places": torch.where(fired, places[order % len(places)], -1),
            "heads": torch.where(fired, order // len(places), -1),
            "scores": _pick(scores, order),
            "weights": _pick(weights, order),
            "norms": _pick(weights.abs() * norms, order),
            "effects": _pick(effects, order),
            "active": (scores[0] > 0).flatten(1).sum(dim=-1),
            "output_norm": output_norm,
            "explained": 1 - torch.where(output_norm > 0, (total - written).norm(dim=-1) / output_norm, 0),
        }

    def _values(self, columns: Tensor, places: Tensor, like: Tensor) -> Generator[tuple[Tensor, Tensor]]:
        """(some columns, the values [heads, columns, model_dim] of their entries), block by block."""
        for block in columns.split(max(1, _BLOCK // self._heads)):
            yield block, self.reader.values(places[block]).detach().to(like)


def _distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The ids that occur, without -1, and for each place which of them it holds (any, for -1)."""
    distinct = ids[ids >= 0].unique()
    return distinct, torch.searchsorted(distinct, ids).clamp(max=max(len(distinct) - 1, 0))


def _pick(table: Tensor, order: Tensor) -> Tensor:
    """Places of the flattened [heads, entries] of each position."""
    return table.flatten(-2).gather(-1, order.expand(*table.shape[:-3], *order.shape))
