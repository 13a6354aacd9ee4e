"""The entries of a model in one pass: what each read with which weight, what it wrote, and where.

Feed-forward layers, packed experts, converted and modular layers, and readers of a store all write sums of entries,
sum_e a_e v_e. A `Writer` gives, for one call, the weights a and the values v in chunks of one set of rows.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.explain.explanation import Source
from attnflow.explain.tables import Look, TableRows
from attnflow.knowledge.layered import EntryScores, ExpertEntries, LayerReader, SharedReader, covered, observed
from attnflow.knowledge.reader import LayerReading, distinct
from attnflow.knowledge.store.source import EntrySource
from attnflow.models.anatomy.feed_forward import FeedForward, PackedExperts, applied, by_expert, neuron_weights
from attnflow.models.passes.held import HeldPass, Written
from attnflow.models.passes.watching import Call
from attnflow.models.subject import Subject

Readings = dict[LayerReader | TableRows, list[Any]]  # `LayerReading` or `Look`: of one pass, in the order of calls


class Chunk(NamedTuple):
    """Some rows of a writer's output, flattened to [rows, width], as sums of the same entries."""

    rows: Tensor  # int64[n]
    positions: Tensor  # int64[n], of their tokens
    entries: Tensor  # int64[entries], numbers within the writer
    weights: Tensor  # [n, entries]
    values: Tensor  # [entries, width]


class Writer:
    """One module that writes entries; `offset` is the number of the first of them within the layer."""

    def __init__(
        self, path: str, module: nn.Module, site: FeedForward | PackedExperts | LayerReader | TableRows
    ) -> None:
        self.path, self.module, self.site, self.offset = path, module, site, 0
        self.letter = site.letter if isinstance(site, LayerReader | TableRows) else "N"

    @property
    def num_entries(self) -> int:
        if isinstance(self.site, FeedForward):
            return len(self.values)
        if isinstance(self.site, PackedExperts):
            return self.site.num_experts * self.site.neurons
        if isinstance(self.site, TableRows):
            return self.site.num_entries
        return self.site.span * len(self.site.values(self.site.every()[:1]))  # of each head

    @cached_property
    def values(self) -> Tensor:
        """Those of a feed-forward layer."""
        return applied(self.module).T

    def constant(self, call: Call) -> Tensor | None:
        """What one call adds beside entries: the output bias, of experts those of the chosen, [*rows, width]."""
        form, module = self.site, self.module
        if isinstance(form, ExpertEntries):
            form, module = form.form, form.own
        if not isinstance(form, PackedExperts):
            return form.output_bias if isinstance(form, LayerReader) else cast("Tensor | None", module.bias)
        bias, (tokens, routing) = form.output_bias(module), _routed(module, call)
        if bias is None or form.sorted or len(routing) < 2:
            return None if bias is None else bias.repeat_interleave(len(tokens) // form.num_experts, 0)
        index, shares = routing
        table = shares.new_zeros(len(tokens), form.num_experts + 1)  # the last column is of no expert
        return table.scatter_add(1, index.clamp(max=form.num_experts), shares)[:, :-1] @ bias

    def chunks(self, call: Call, readings: Readings) -> Iterator[Chunk]:
        """Split one call of the module."""
        with torch.no_grad():
            if isinstance(self.site, FeedForward):
                weights = cast(Tensor, call.first).detach().flatten(0, -2)
                rows = torch.arange(len(weights), device=weights.device)
                entries = torch.arange(weights.shape[1], device=weights.device)
                yield Chunk(rows, rows, entries, weights, self.values)
            elif isinstance(self.site, PackedExperts):
                yield from self._experts(self.site, call)
            elif isinstance(self.site, TableRows):
                yield from self._looked_up(readings[self.site][call.number])
            else:
                yield from self._read(self.site, readings[self.site][call.number])

    def _experts(self, form: PackedExperts, call: Call) -> Iterator[Chunk]:
        (tokens, routing), values = _routed(self.module, call), form.values(self.module).detach()
        numbers = torch.arange(form.neurons, device=tokens.device)
        if form.sorted or len(routing) < 2:
            count = len(tokens) // form.num_experts
            at = torch.arange(count, device=tokens.device)
            for expert in range(form.num_experts):
                mine = tokens[expert * count : (expert + 1) * count]
                weights = neuron_weights(self.module, form, expert, mine)
                yield Chunk(expert * count + at, at, expert * form.neurons + numbers, weights, values[expert])
            return
        index, shares = routing
        for expert, rows, places in by_expert(index, form.num_experts):
            weights = neuron_weights(self.module, form, expert, tokens[rows]) * shares[rows, places, None]
            yield Chunk(rows, rows, expert * form.neurons + numbers, weights, values[expert])

    def _looked_up(self, look: Look) -> Iterator[Chunk]:
        """Chunks in which each row of the table stands once, as its gate differs from token to token."""
        if look is None:
            return
        ids, values = look[0].flatten(), (look[1] @ self.values).flatten(0, -2)
        turns: dict[int, list[int]] = {}
        times = Counter[int]()
        for row, token in enumerate(ids.tolist()):
            turns.setdefault(times[token], []).append(row)
            times[token] += 1
        for listed in turns.values():
            rows = torch.tensor(listed, device=ids.device)
            yield Chunk(rows, rows, ids[rows], torch.eye(len(rows)).to(values), values[rows])

    def _read(self, reader: LayerReader, reading: LayerReading) -> Iterator[Chunk]:
        weights = reading.weights.detach().flatten(0, -3)  # [rows, heads, read]
        rows = torch.arange(len(weights), device=weights.device)
        every = reader.every().to(weights.device)
        if reading.ids is not None:
            ids = reading.ids.flatten(0, -3)
            places, columns = distinct(ids)
            table = weights.new_zeros(*weights.shape[:2], len(places))
            if len(places):
                table.scatter_add_(-1, columns, torch.where(ids >= 0, weights, 0))
            weights, every = table, places
        values = reader.values(every).detach().to(weights)
        for head in range(weights.shape[1]):
            yield Chunk(rows, rows, head * reader.span + every, weights[:, head], values[head])


def _routed(experts: nn.Module, call: Call) -> tuple[Tensor, list[Tensor]]:
    """What packed experts were called with: tokens [rows, width], and the router's index and weights [rows, places]."""
    given = inspect.signature(experts.forward).bind(*call.args, **call.kwargs).arguments.values()
    tokens, *routing = [part.detach().flatten(0, -2) for part in list(given)[:3]]
    return tokens, routing


@dataclass(eq=False)
class Entries:
    """All writers of a model by path, and what the layers that read entries reported in the held pass."""

    writers: dict[str, Writer]
    scores: dict[str, tuple[str, ...]]  # by path of a writer: the modules that score its entries
    readings: Readings = field(default_factory=lambda: Readings())

    @staticmethod
    def of(subject: Subject) -> Entries:
        model, writers, scores = subject.model, dict[str, Writer](), dict[str, tuple[str, ...]]()
        hidden = covered(model)
        for path, module in model.named_modules():
            if isinstance(module, LayerReader) and not f"{path}.".startswith(hidden):
                writers[path] = Writer(path, cast(nn.Module, module), module)
                mine = [p for p, m in model.named_modules() if isinstance(m, EntryScores) and m.values is module]
                mine += [f"{path.rpartition('.')[0]}.{place}" for place in module.covers]
                scores[path] = tuple(mine or ([path] if module.letter == "F" else []))
        with suppress(UnsupportedArchitecture):  # no known layers: they are sources as a whole
            for site in subject.feed_forward:
                path = f"{site.name}.{site.last}".strip(".") if isinstance(site, FeedForward) else site.name
                if f"{path}.".startswith(hidden):
                    continue
                table = None
                if isinstance(site, FeedForward):
                    scores[path] = tuple(f"{site.name}.{first}".strip(".") for first in site.first)
                    table = TableRows.of(subject, site)
                writers.setdefault(path, Writer(path, model.get_submodule(path), table or site))
        return Entries(writers, scores)

    def modules(self) -> dict[str, nn.Module]:
        return {path: writer.module for path, writer in self.writers.items()}

    @contextmanager
    def observed(self, readings: Readings) -> Generator[None]:
        """Note in `readings` what layers of entries read inside; their own observers see nothing of it."""
        sites = [writer.site for writer in self.writers.values()]
        readings |= {site: [] for site in sites if isinstance(site, LayerReader | TableRows)}
        readers = [(site, readings[site].append) for site in sites if isinstance(site, LayerReader)]
        with observed(readers), ExitStack() as stack:
            for site in sites:
                for watch in site.watch(readings[site]) if isinstance(site, TableRows) else ():
                    stack.enter_context(watch)
            yield

    def scorers(self, model: nn.Module) -> dict[str, nn.Module]:
        return {path: model.get_submodule(path) for paths in self.scores.values() for path in paths}

    def number(self, held: HeldPass) -> None:
        """Number the entries within each layer, writer after writer in the order of the model's modules."""
        taken: dict[tuple[str, int, str], int] = {}
        for path, writer in self.writers.items():
            if prefix := held.prefix(path):
                layer = prefix, held.number(path), writer.letter
                writer.offset = taken.get(layer, 0)
                taken[layer] = writer.offset + writer.num_entries

    def find(self, source: Source, held: HeldPass) -> Written:
        """The call of the writer of an entry; `ValueError` if there is none."""
        for written in held.written:
            writer, here = self.writers.get(written.path), (held.halves[written.prefix], written.layer)
            if writer and (*here, writer.letter) == (source.half, source.layer, source.letter):
                if None in (source.neuron, source.position):
                    break
                stream = next(a.hidden for a in held.arrivals if a.prefix == written.prefix)
                number, at = cast(int, source.neuron) - writer.offset, cast(int, source.position)
                if 0 <= number < writer.num_entries and 0 <= at < stream.shape[-2]:
                    return written
        raise ValueError(f"expected an entry of this pass, got {source.name} at position {source.position}")

    def score(self, held: HeldPass, source: Source) -> tuple[Tensor, float]:
        """The score of an entry at its token, before the activation, in the graph of the pass, without its bias."""
        written = self.find(source, held)
        writer = self.writers[written.path]
        entry, at = cast(int, source.neuron) - writer.offset, cast(int, source.position)
        if isinstance(writer.site, PackedExperts):
            call = written.call
            form, (expert, neuron) = writer.site, divmod(entry, writer.site.neurons)
            tokens = cast(Tensor, call.first).flatten(0, -2)
            tokens = tokens.unflatten(0, (form.num_experts, -1))[expert] if form.sorted else tokens
            thresholds = form.thresholds(writer.module)
            bias = 0.0 if thresholds is None else float(thresholds[expert, 0, neuron].detach())
            return tokens[at] @ form.keys(writer.module)[expert, 0, neuron].detach(), bias
        paths = self.scores.get(writer.path)
        if not paths or isinstance(writer.site, TableRows) or (paths[0], written.layer) not in held.scored:
            raise ValueError(f"{source.name} has no score that is one product: choose an entry of a feed-forward layer")
        call = held.scored[paths[0], written.layer]
        hidden = cast(Tensor, call.first).flatten(0, -2)[at]
        if isinstance(writer.site, LayerReader):
            place = torch.tensor([entry], device=hidden.device)
            key, bias = writer.site.keys(place)[0, 0, 0], writer.site.thresholds(place)[0, 0, 0]
            return hidden @ key.detach().to(hidden), float(bias.detach())
        bias = cast("Tensor | None", getattr(call.module, "bias", None))
        return hidden @ applied(call.module)[entry], 0.0 if bias is None else float(bias[entry].detach())

    def beside(self, written: Written) -> Mapping[str, Tensor]:
        """What a call wrote beside its entries and biases, by the kind of source."""
        writer = self.writers[written.path]
        if isinstance(writer.site, LayerReader):
            return cast(LayerReading, self.readings[writer.site][written.call.number]).beside
        if not isinstance(writer.site, TableRows):
            return {}
        look = cast(Look, self.readings[writer.site][written.call.number])
        looked = 0 if look is None else (look[1] @ writer.values).detach()
        return {"projection": written.value - looked}

    def texts(self, writer: Writer, entries: list[int]) -> list[str]:
        """The texts of a store's entries, and the tokens of a table's; "" for others."""
        if isinstance(writer.site, TableRows):
            return writer.site.subject.texts(entries)
        if not isinstance(writer.site, SharedReader) or not isinstance(source := writer.site.current(), EntrySource):
            return [""] * len(entries)
        return [entry.text or "" for entry in source.store.get([number % writer.site.span for number in entries])]
