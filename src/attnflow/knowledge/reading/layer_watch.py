"""`LayerWatch`: keeps what one layer read in a pass, and finds its strongest entries afterwards."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from attnflow.knowledge.layered import LayerReader
from attnflow.knowledge.reader import LayerReading, distinct
from attnflow.knowledge.reading.direct_effect import Directions, Stream, wide
from attnflow.knowledge.reading.provenance import Beside, By, LayerTrace, Promoted
from attnflow.models.subject import Subject

_WEIGHTS: Final = 1 << 22  # weights that are worked on at once, of all entries and as many tokens as that allows
_BLOCK: Final = 1 << 13  # entries whose values are held at once
_PROMOTED: Final = 5  # tokens named for an entry
_PUSHED: Final = 256  # entries whose pushes on all tokens are held at once
_LAST: Final = 40  # entries of the last position, as a page lists them, whose tokens are named first


class LayerWatch:
    """Watches one layer and keeps the `top` strongest entries for each position.

    `pieces` holds blocks of positions: "places" of entries in a reading (-1: none) and columns named as in
    `LayerTrace`.
    """

    def __init__(self, reader: LayerReader, stream: Stream, top: int) -> None:
        self.reader, self._stream, self._top = reader, stream, top
        self.frozen: Directions | None = None  # those of direct effects
        self.towards: Tensor | None = None  # the derivative of what is asked by what the layer adds, [tokens, width]
        self.pieces: list[dict[str, Tensor]] = []
        self._reading: LayerReading | None = None

    @property
    def ran(self) -> bool:
        return self._reading is not None

    def see(self, reading: LayerReading) -> None:
        """Keep a reading; a second call of the layer replaces the first."""
        tables = {name: getattr(reading, name) for name in ("ids", "scores", "weights")}
        kept = {name: None if table is None else table.detach() for name, table in tables.items()}
        self._reading = replace(reading, **kept)

    def _keep(self, by: By) -> None:
        """Find the strongest entries, for blocks of positions."""
        reading = self._reading
        if reading is None:
            layer, _ = self._stream.numbers[self.reader]
            raise ValueError(f"layer {layer} did not read its entries in the forward pass")
        read = reading.scores.shape[-2:]  # heads, entries
        scores, weights = reading.scores[0].flatten(0, -3), reading.weights.flatten(0, -3)
        ids = None if reading.ids is None else reading.ids.flatten(0, -3)  # some families flatten a batch
        self._heads, kind = read[0], wide(weights.dtype)
        step = max(1, _WEIGHTS // max(1, read.numel()))
        gradient = None if self.towards is None else self.towards.flatten(0, -2)
        for start in range(0, len(self._stream.positions), step):
            rows = self._stream.positions[start : start + step]
            direct = None if self.frozen is None else self.frozen.rows[start : start + step]
            effect = None if gradient is None else gradient[rows].to(kind)
            table = self._tabled(scores[rows].to(kind), weights[rows].to(kind), None if ids is None else ids[rows])
            self.pieces.append(self._strongest(*table, effect, direct, by))
        self._beside = tuple(self._parts(reading))
        self._reading = None

    def _parts(self, reading: LayerReading) -> Generator[Beside]:
        bias = self.reader.output_bias
        parts = dict(reading.beside)
        if parts and bias is not None:
            parts["bias"] = bias.detach().expand(parts["error"].shape)
        for name, written in parts.items():
            vectors = self._stream.pick(written)
            towards = None if self.towards is None else self._stream.pick(self.towards)
            rows = (towards, None if self.frozen is None else self.frozen.rows)
            effects = [None if row is None else (vectors * row).sum(dim=-1).cpu() for row in rows]
            yield Beside(name, vectors.norm(dim=-1).cpu(), *effects)

    def joined(self, name: str) -> Tensor:
        return torch.cat([piece[name] for piece in self.pieces])

    def finish(self, by: By) -> LayerTrace:
        number, direct = self.reader.layer, {} if self.frozen is None else self.frozen.effects
        self._keep(by)
        places, heads, scores = self.joined("places"), self.joined("heads"), self.joined("scores")
        unique, column = distinct(places)
        thresholds = torch.zeros_like(scores)
        if len(unique):
            thresholds = self.reader.thresholds(unique).detach()[0, heads.clamp(min=0), column].to(scores)
        hide = partial(torch.masked_fill, mask=places < 0, value=0)
        return LayerTrace(
            number,
            self._stream.paths[number],
            self.reader.num_entries * self._heads,
            self.reader.ids(places).masked_fill(places < 0, -1).cpu(),
            heads.cpu(),
            hide(scores).cpu(),
            hide(thresholds).cpu(),
            hide(self.joined("weights")).cpu(),
            hide(self.joined("norms")).cpu(),
            None if self.towards is None else hide(self.joined("effects")).cpu(),
            None if self.frozen is None else hide(self.joined("direct")).cpu(),
            *self._numbered(places, heads),
            self.joined("active").cpu(),
            self.joined("output_norm").cpu(),
            self.joined("explained").cpu(),
            direct.get(("entries", number)),
            direct.get(("attention", number)),
            letter=self.reader.letter,
            beside=self._beside,
        )

    def _tabled(self, scores: Tensor, weights: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Spread scores and weights to one column per entry that any token read; also return the entries' places."""
        if ids is None:
            return scores, weights, self.reader.every().to(scores.device)
        places, column = distinct(ids)
        if not len(places):  # no token read an entry: make one column, with weight 0
            places = self.reader.every()[:1].to(ids.device)
        shape = (*ids.shape[:-1], len(places))
        spread = torch.where(ids >= 0, weights, 0)
        table = spread.new_zeros(shape).scatter_add(-1, column, spread)
        # An entry that was not read has no score; it counts as lower than all scores.
        absent = torch.finfo(scores.dtype).min
        read_scores = torch.where(ids >= 0, scores, absent)
        return scores.new_full(shape, absent).scatter_reduce(-1, column, read_scores, "amax"), table, places

    def _numbered(self, places: Tensor, heads: Tensor) -> tuple[Tensor, int]:
        """Numbers of entries within their layer of the model, and that layer's number; see `layered.numbering`."""
        layer, offset = self._stream.numbers[self.reader]
        return (offset + heads * self.reader.span + places).masked_fill(places < 0, -1).cpu(), layer

    def _strongest(
        self, scores: Tensor, weights: Tensor, places: Tensor, towards: Tensor | None, direct: Tensor | None, by: By
    ) -> dict[str, Tensor]:
        norms = weights.new_empty(weights.shape[1:])
        effects, directs = (torch.full_like(weights, float("nan")) for _ in range(2))
        total = weights.new_zeros(())
        for block, values in self._values(torch.arange(len(places), device=places.device), places, weights):
            norms[:, block] = values.norm(dim=-1)
            total = total + torch.einsum("phe,hed->pd", weights[..., block], values)
            for table, rows in ((effects, towards), (directs, direct)):
                if rows is not None:
                    table[..., block] = weights[..., block] * torch.einsum("pd,hed->phe", rows, values)
        tables = {"norm": weights.abs() * norms, "effect": effects, "direct": directs}
        size = tables[by].abs().masked_fill(weights == 0, -1)
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
            "direct": _pick(directs, order),
            "sizes": largest,
            "active": ((scores > 0) & (weights != 0)).flatten(1).sum(dim=-1),
            "output_norm": output_norm,
            "explained": 1 - torch.where(output_norm > 0, (total - written).norm(dim=-1) / output_norm, 0),
        }

    def _values(self, columns: Tensor, places: Tensor, like: Tensor) -> Generator[tuple[Tensor, Tensor]]:
        """Yield blocks of columns with their entries' values [heads, columns, model_dim]."""
        for block in columns.split(max(1, _BLOCK // self._heads)):
            yield block, self.reader.values(places[block]).detach().to(like)


def _pick(table: Tensor, order: Tensor) -> Tensor:
    """Gather from the flattened [heads, entries] of each position."""
    return table.flatten(1).gather(1, order)


def promoted_tokens(
    watched: Sequence[LayerWatch], frozen: Directions, count: int, subject: Subject
) -> tuple[Promoted, ...]:
    places, heads, effects = (
        torch.cat([one.joined(name) for one in watched], dim=1).cpu() for name in ("places", "heads", "sizes")
    )
    which = torch.repeat_interleave(torch.tensor([one.joined("places").shape[1] for one in watched]))
    order = effects.abs().masked_fill(places < 0, -1).argsort(dim=1, descending=True)
    columns = [table.gather(1, order) for table in (which.expand_as(places), places, heads)]
    ranked = [key for key in zip(*(table.T.flatten().tolist() for table in columns), strict=True) if key[1] >= 0]
    last = [key for key in zip(*(table[-1].tolist() for table in columns), strict=True) if key[1] >= 0]
    asked = list(dict.fromkeys(last[:_LAST] + ranked))[:count]
    found, vectors, words = list[tuple[int, int, int]](), list[Tensor](), list[Promoted]()
    for index, one in enumerate(watched):
        mine = [(place, head) for place_of, place, head in asked if place_of == index]
        if mine:
            where, at = (torch.tensor(column, device=frozen.rows.device) for column in zip(*mine, strict=True))
            values = one.reader.values(where).detach().to(frozen.rows)
            vectors.append(values[at, torch.arange(len(at), device=at.device)])
            found += [(one.reader.layer, id, mine[row][1]) for row, id in enumerate(one.reader.ids(where).tolist())]
    for start in range(0, len(found), _PUSHED):  # the unembedding is read once for many
        pushes = frozen.pushes(torch.cat(vectors)[start : start + _PUSHED])
        sides = [pushes.topk(min(_PROMOTED, pushes.shape[-1]), largest=up).indices.tolist() for up in (True, False)]
        for place, *moved in zip(found[start : start + _PUSHED], *sides, strict=True):
            words.append(Promoted(*place, *(tuple(subject.texts(tokens)) for tokens in moved)))
    return tuple(words)
