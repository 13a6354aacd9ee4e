"""What each source and each edge of one pass carries to a number, checked to add up, and its first-order effect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.explain.entries import Chunk, Entries, Writer
from attnflow.explain.explanation import Edge, Explanation, Source, SourceKind
from attnflow.models.passes.held import Derivatives, HeldAttention, HeldPass, Written
from attnflow.models.passes.watching import Call

_EDGES: Final = 600  # that are kept, the strongest by what they carry, and a third as many by their effect
_ENTRIES: Final = 400  # the same, by effect and by what they carry
_PROMOTED: Final = 3  # tokens that are named for an entry
_NAMED: Final = 40  # entries for which they are


class Strongest:
    """Finds the places of the largest values of many tables, each handed over once."""

    def __init__(self, count: int) -> None:
        self._count, self._floor = count, 0.0
        self._best = torch.zeros(0)

    def places(self, sizes: Tensor) -> Tensor:
        """Places in the flattened table of values that may be among the largest of all; sizes are not negative."""
        sizes = sizes.flatten()
        if self._floor:
            found = (sizes > self._floor).nonzero().flatten()
        else:
            found = sizes.topk(min(self._count, len(sizes))).indices
        if len(found) > self._count:
            found = found[sizes[found].topk(self._count).indices]
        best = torch.cat([self._best.to(sizes), sizes[found]])
        self._best = best.topk(min(self._count, len(best))).values
        if len(self._best) == self._count:
            self._floor = float(self._best[-1])
        return found


class Candidates(NamedTuple):
    """Entries of one chunk that may be among the strongest: their rows and columns, and three numbers of each."""

    writer: Writer
    written: Written
    chunk: Chunk
    rows: Tensor
    columns: Tensor
    carried: Tensor
    effects: Tensor
    weights: Tensor

    def value(self, at: int) -> Tensor:
        """What one of them wrote, up to the size of its weight."""
        return self.chunk.values[self.columns[at]] * self.weights[at].sign()

    def entry(self, at: int) -> int:
        """Its number within the writer."""
        return int(self.chunk.entries[self.columns[at]])


class Amounts:
    """The amounts of one value: `held` derivatives give what is carried, `real` ones the effects."""

    def __init__(self, held: HeldPass, value: float, carry: Derivatives, real: Callable[[], Derivatives]) -> None:
        self.held, self.value, self.carry, self._real = held, value, carry, real
        self.error, self._allowed = 0.0, 0.0

    @cached_property
    def effect(self) -> Derivatives:
        return self._real()

    def check(self, span: float, close: float) -> None:
        """Raise `UnsupportedArchitecture`, with the place, unless the sources add up to the value."""
        firsts = (a.hidden * g for a, g in zip(self.held.arrivals, self.carry.arrivals, strict=True) if a.first)
        written = (w.value * g for w, g in zip(self.held.written, self.carry.written, strict=True))
        total = sum(float(part.detach().sum()) for part in (*firsts, *written)) + sum(self.carry.constants.values())
        self.error, self._allowed = abs(total - self.value) / (span or 1.0), close * (span or 1.0)
        if not self.error <= close:
            raise UnsupportedArchitecture(
                f"{self.held.subject.kind}: what its sources carry does not add up to the value (off by "
                f"{self.error:.2g} of the range of the logits, {close:g} is allowed), most of it in {self._place()}, "
                "so that no explanation is given. In float32, model.double() tells rounding from an unknown part"
            )

    def _place(self) -> str:
        """Where most of the difference arises: each layer must pass on what arrives, plus what it writes."""
        missing: dict[str, float] = {}
        for prefix, half in self.held.halves.items():
            here = [(a, g) for a, g in zip(self.held.arrivals, self.carry.arrivals, strict=True) if a.prefix == prefix]
            amounts = [float((a.hidden.detach() * g).sum()) for a, g in here]
            if prefix not in self.held.ends:
                continue
            amounts.append(float((self.held.ends[prefix].detach() * self.carry.ends[prefix]).sum()))
            for number, (arrival, _) in enumerate(here):
                place = prefix, arrival.layer
                gained = (
                    amounts[number + 1] - amounts[number] - self.carry.constants.get(f"{prefix}.{arrival.layer}", 0)
                )
                pairs = zip(self.held.written, self.carry.written, strict=True)
                gained -= sum(float((w.value * g).sum()) for w, g in pairs if (w.prefix, w.layer) == place)
                for attention, table in zip(self.held.attentions, self._edges(self.carry), strict=True):
                    if attention.site.kind == "cross" and (attention.site.layers, attention.layer) == place:
                        gained -= float(table().sum())
                missing[f"{half} layer {arrival.layer}".strip()] = abs(gained)
            if not half:
                last = self.value - amounts[-1] - self.carry.constants.get("", 0.0)
                missing["what follows the last layer"] = abs(last)
        return max(missing, key=lambda place: missing[place])

    # -------- edges

    def _edges(self, derivatives: Derivatives) -> list[Callable[[], Tensor]]:
        """For each attention, a function that computes its amounts [heads, queries, keys]."""

        def table(attention: HeldAttention, grad: Tensor) -> Callable[[], Tensor]:
            return lambda: attention.weights * (grad[0].transpose(0, 1) @ attention.values.mT)

        return [table(a, g) for a, g in zip(self.held.attentions, derivatives.attentions, strict=True)]

    def edges(self, allowed: Sequence[Tensor]) -> tuple[list[Edge], tuple[Edge, ...], Tensor, float]:
        """The strongest edges, those through forbidden pairs, what heads carry, and the sum of all absolute amounts.

        `allowed` are the pairs of the declared order, of all layers or of each; none if it is not known.
        """
        found, leaks, moved = list[Edge](), list[Edge](), 0.0
        own = [a for a in self.held.attentions if not a.kind]
        depth = 1 + max((a.layer for a in own), default=-1)
        heads = torch.zeros(depth, max((a.first_head + len(a.weights) for a in own), default=0))
        most, telling = Strongest(_EDGES), Strongest(_EDGES // 3)
        pairs = zip(self.held.attentions, self._edges(self.carry), self._edges(self.effect), strict=True)
        for attention, carry, effect in pairs:
            carried, effects = carry(), effect()
            if attention.kind != "cross":  # what a token keeps for itself does not move
                carried.diagonal(dim1=1, dim2=2).zero_()
                effects.diagonal(dim1=1, dim2=2).zero_()
            sizes = carried.abs()
            moved += float(sizes.sum())
            if not attention.kind:
                heads[attention.layer, attention.first_head :][: len(carried)] += carried.sum((1, 2)).cpu()
            places = torch.cat([most.places(sizes), telling.places(effects.abs())]).unique()
            if not attention.kind and allowed:
                allow = allowed[min(attention.layer, len(allowed) - 1)].to(sizes.device)
                wrong = (sizes.ne(0) & ~allow).flatten().nonzero().flatten()
                leaks += self._found(attention, carried, effects, wrong)
            found += self._found(attention, carried, effects, places)
        by_carried = sorted(found, key=lambda edge: -abs(edge.carried))
        by_effect = sorted(found, key=lambda edge: -abs(edge.effect))[: _EDGES // 3]
        kept = {id(edge): edge for edge in (*by_carried[:_EDGES], *by_effect)}
        listed = sorted(kept.values(), key=lambda edge: -abs(edge.carried))
        return listed, tuple(sorted(leaks, key=lambda edge: -abs(edge.carried))[:_EDGES]), heads, moved

    def _found(self, attention: HeldAttention, carried: Tensor, effects: Tensor, places: Tensor) -> Iterator[Edge]:
        added = attention.added
        heads, queries, keys = (axis.tolist() for axis in torch.unravel_index(places, effects.shape))
        columns = (table.flatten()[places].tolist() for table in (carried, effects, attention.weights))
        for head, query, key, amount, effect, weight in zip(heads, queries, keys, *columns, strict=True):
            if amount or effect:
                bias = None if added is None else float(added[0, head % added.shape[1], query % added.shape[2], key])
                place = (attention.layer, attention.first_head + head, query, key, attention.kind)
                yield Edge(*place, weight, amount, effect, bias=bias)

    def answering(self) -> list[int]:
        """The tokens whose vectors the head reads after the last layer."""
        grads = [g for p, g in self.carry.ends.items() if not self.held.halves[p]]
        return _by_token(grads[-1].abs()).nonzero().flatten().tolist()

    # -------- sources

    def _chunks(self, entries: Entries) -> Iterator[tuple[Writer, Written, Chunk, Tensor]]:
        """Each chunk of entries that wrote something, with the held derivative of its rows."""
        for written, grad in zip(self.held.written, self.carry.written, strict=True):
            if not written.whole:
                for chunk in entries.writers[written.path].chunks(written.call, entries.readings):
                    yield entries.writers[written.path], written, chunk, grad.flatten(0, -2)[chunk.rows]

    def of(self, entries: Entries, sources: Sequence[Source]) -> Iterator[tuple[Source, float]]:
        """What some tokens and entries carry."""
        for source in sources:
            if source.kind == "token":
                firsts = zip(self.held.arrivals, self.carry.arrivals, strict=True)
                for arrival, grad in firsts:
                    if arrival.first and self.held.halves[arrival.prefix] == source.half:
                        at = source.position
                        yield source, float(_by_token(arrival.hidden.detach() * grad)[at])
        for writer, written, chunk, grad in self._chunks(entries):
            for source in sources:
                here = written.layer, self.held.halves[written.prefix], writer.letter
                if source.kind == "entry" and here == (source.layer, source.half, source.letter):
                    columns = (chunk.entries + writer.offset == source.neuron).nonzero().flatten()
                    rows = (chunk.positions == source.position).nonzero().flatten()
                    if len(columns) and len(rows):
                        row, column = int(rows[0]), int(columns[0])
                        yield source, float(chunk.weights[row, column] * (chunk.values[column] @ grad[row]))

    def sources(self, entries: Entries) -> tuple[list[Source], float]:
        """All sources, single entries for the strongest; and the sum of the absolute amounts of all entries."""
        held, found = self.held, list[Source]()
        for arrival, grad, real in zip(held.arrivals, self.carry.arrivals, self.effect.arrivals, strict=True):
            if arrival.first:
                half = held.halves[arrival.prefix]
                found += [Source("token", None, n, half, None, c, e) for n, c, e in _rows(arrival.hidden, grad, real)]
        constants = [sum(derived.constants.values()) for derived in (self.carry, self.effect)]
        singles, rest, sums, written = self._single(entries)
        for part, grad, real in zip(held.written, self.carry.written, self.effect.written, strict=True):
            half, named = held.halves[part.prefix], {"sublayer": part.value} if part.whole else entries.beside(part)
            for kind, value in named.items():
                rows = _rows(value, grad, real)
                found += [Source(cast(SourceKind, kind), part.layer, n, half, None, c, e) for n, c, e in rows if c or e]
            if not part.whole:
                left = part.value - sum(named.values())
                self._check_entries(entries.writers[part.path], part.call, left, grad, sums[id(part)][0])
                for place, derivative in enumerate((grad, real)):
                    constants[place] += float((left * derivative).sum()) - sums[id(part)][place]
        others = [Source("other entries", at, None, half, None, c, e) for (half, at), (c, e) in rest.items()]
        constant = Source("constant", None, None, "", None, constants[0], constants[1])
        return [*found, *singles, *others, constant], written

    def _check_entries(self, writer: Writer, call: Call, left: Tensor, grad: Tensor, carried: float) -> None:
        """Raise unless the entries of one call, and its bias, are what it wrote beside the rest."""
        constant, wrote = writer.constant(call), float((left * grad).sum())
        beside = 0.0 if constant is None else float((grad.flatten(0, -2) * constant.detach()).sum())
        off = abs(wrote - beside - carried)
        if not off <= self._allowed:
            raise UnsupportedArchitecture(
                f"{self.held.subject.kind}: the entries of {writer.path} do not add up to what it wrote (off by "
                f"{off:.2g}, {self._allowed:.2g} is allowed), so that no explanation is given: a hook may change it"
            )

    def _single(
        self, entries: Entries
    ) -> tuple[list[Source], dict[tuple[str, int], list[float]], dict[int, list[float]], float]:
        """The strongest entries; what is left by half and layer; the sums of each call of a writer; and their size."""
        tables: list[Candidates] = []
        rest: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
        sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        size, most, telling = 0.0, Strongest(_ENTRIES), Strongest(_ENTRIES)
        real = {id(w): g for w, g in zip(self.held.written, self.effect.written, strict=True)}
        for writer, written, chunk, grad in self._chunks(entries):
            towards = real[id(written)].flatten(0, -2)[chunk.rows]
            carried = chunk.weights * (grad @ chunk.values.T)
            effects = chunk.weights * (towards @ chunk.values.T)
            sizes, half = carried.abs(), self.held.halves[written.prefix]
            size += float(sizes.sum())
            for place, table in enumerate((carried, effects)):
                total = float(table.sum())
                sums[id(written)][place] += total
                rest[half, written.layer][place] += total
            if carried.numel():
                places = torch.cat([telling.places(effects.abs()), most.places(sizes)]).unique()
                places = places[chunk.weights.flatten()[places] != 0]
                row, column = torch.unravel_index(places, carried.shape)
                numbers = (carried.flatten()[places], effects.flatten()[places], chunk.weights.flatten()[places])
                tables.append(Candidates(writer, written, chunk, row, column, *numbers))
        chosen = _strongest(tables)
        texts = [entries.texts(table.writer, [table.entry(at)])[0] for table, at in chosen]
        named = [
            place
            for place in range(min(_NAMED, len(chosen)))
            if not texts[place] or chosen[place][0].writer.letter == "T"
        ]
        vectors = [table.value(at) for table, at in map(chosen.__getitem__, named)]
        promoted = dict(zip(named, self.promoted(vectors), strict=False))
        singles: list[Source] = []
        for place, (table, at) in enumerate(chosen):
            layer, half = table.written.layer, self.held.halves[table.written.prefix]
            carried, effect = float(table.carried[at]), float(table.effects[at])
            rest[half, layer][0] -= carried
            rest[half, layer][1] -= effect
            position, entry = int(table.chunk.positions[table.rows[at]]), table.entry(at) + table.writer.offset
            about = float(table.weights[at]), texts[place], promoted.get(place, ())
            letter = table.writer.letter
            singles.append(Source("entry", layer, position, half, entry, carried, effect, *about, letter=letter))
        return singles, rest, sums, size

    def promoted(self, vectors: Sequence[Tensor]) -> list[tuple[str, ...]]:
        """The tokens whose logits each raises most through the final norm alone; none without an unembedding."""
        head = getattr(self.held.subject.model, "get_output_embeddings", lambda: None)()
        table, norm = getattr(head, "weight", None), self.held.final_norm
        if not vectors or not isinstance(table, Tensor) or norm is None:
            return []
        if {table.shape[-1], norm.gain.numel()} != {len(vector) for vector in vectors}:
            return []
        with torch.no_grad():
            directions = norm.gain.flatten() * norm.reduced(torch.stack(list(vectors)).to(norm.gain))
            best = (directions @ table.detach().to(directions).T).topk(_PROMOTED).indices
        return [tuple(self.held.subject.texts(row)) for row in best.tolist()]

    def explanation(self, entries: Entries, allowed: Sequence[Tensor] = (), **about: Any) -> Explanation:
        edges, leaks, heads, moved = self.edges(allowed)
        sources, written = self.sources(entries)
        own = [(a.hidden, g) for a, g in zip(self.held.arrivals, self.carry.arrivals, strict=True)
               if not self.held.halves[a.prefix]]  # fmt: skip
        ends = [(self.held.ends[p], g) for p, g in self.carry.ends.items() if not self.held.halves[p]][-1:]
        arrived = [_by_token(x.detach() * g) for x, g in (*own, *ends)]
        length = len(arrived[0])
        return Explanation(
            value=self.value, sources=tuple(self._named(sources, about)), edges=tuple(edges), leaks=leaks, heads=heads,
            arrived=torch.stack([row for row in arrived if len(row) == length]).cpu(), moved=moved, written=written,
            error=self.error, **about,
        )  # fmt: skip

    def _named(self, sources: Sequence[Source], about: dict[str, Any]) -> Iterator[Source]:
        """Tokens with their texts, entries by the size of their effect."""
        order = {"token": 0, "entry": 1}
        for source in sorted(sources, key=lambda s: (order.get(s.kind, 2), -abs(s.effect) if s.kind == "entry" else 0)):
            if source.kind == "token" and source.position is not None:
                texts = about["encoder_texts"] if source.half and about["encoder_texts"] else about["texts"]
                yield Source("token", None, source.position, source.half, None, source.carried, source.effect,
                             text=texts[source.position])  # fmt: skip
            else:
                yield source


def _rows(value: Tensor, grad: Tensor, real: Tensor) -> list[tuple[int, float, float]]:
    """For each position, what its vector carries, and its effect."""
    value = value.detach()
    carried, effects = (_by_token(value * g).tolist() for g in (grad, real))
    return list(zip(range(len(carried)), carried, effects, strict=True))


def _by_token(amounts: Tensor) -> Tensor:
    """Sum amounts [..., tokens, width] over all axes but that of tokens: some models carry several streams."""
    return amounts.sum(-1).reshape(-1, amounts.shape[-2]).sum(0)


def _strongest(tables: Sequence[Candidates]) -> list[tuple[Candidates, int]]:
    """The places in these tables with the largest effects, and those that carry most."""
    chosen: dict[tuple[int, int], tuple[Candidates, int]] = {}
    starts = torch.tensor([0, *(len(table.rows) for table in tables)]).cumsum(0)
    for name in ("effects", "carried") if tables else ():
        sizes = torch.cat([getattr(table, name).abs().cpu() for table in tables])
        for at in sizes.topk(min(_ENTRIES, len(sizes))).indices.tolist():
            number = int(torch.searchsorted(starts, at, right=True)) - 1
            chosen[number, at - int(starts[number])] = (tables[number], at - int(starts[number]))
    return list(chosen.values())
