"""Running a model without some edges or entries, to measure what that changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor

from attnflow.explain.entries import Entries, Readings, Writer
from attnflow.explain.explanation import Edge, Explanation, Removal, Source
from attnflow.models.anatomy.sites import Site, models_around
from attnflow.models.passes.beside import beside
from attnflow.models.passes.evaluation import still
from attnflow.models.passes.held import HeldAttention, HeldPass
from attnflow.models.passes.interception import AttentionCall, Output, Proceed, intercept
from attnflow.models.passes.watching import Call, Watch


def value_without(
    entries: Entries, removed: Sequence[Edge | Source], value: Callable[[Any], Tensor], held: HeldPass
) -> float:
    """Run the model without what some edges carry and some entries write."""
    removed = list({_place(item): item for item in removed}.values())
    for item in removed:
        _check(item, held, entries)
    edges: dict[Site, list[tuple[int, Edge]]] = {}
    taken: dict[str, list[tuple[int, Source]]] = {}
    for item in removed:  # by the run that they belong to, as a layer may run more than once
        if isinstance(item, Edge):
            attention = attention_of(held, item)
            runs = [other for other in held.attentions if other.site is attention.site]
            edge = replace(item, head=item.head - attention.first_head)
            edges.setdefault(attention.site, []).append((runs.index(attention), edge))
        else:
            written = entries.find(item, held)
            taken.setdefault(written.path, []).append((written.call.number, item))
    readings = Readings()
    model = held.subject.model
    with still(model), torch.no_grad(), ExitStack() as stack:
        sites = list(edges)
        if sites:
            interceptors = {site.module: partial(_without_edges, edges[site], count()) for site in sites}
            stack.callback(intercept(models_around(sites), interceptors, role="look").remove)
        stack.enter_context(entries.observed(readings))
        modules = {path: entries.writers[path].module for path in taken}
        stack.enter_context(Watch(modules, leave=partial(_without_entries, entries, readings, taken)))
        return float(value(cast(Callable[..., Any], model)(**held.arguments)))


def with_removals(explained: Explanation, items: Sequence[Edge | Source], removal: Removal) -> Explanation:
    """The explanation with what removing each of these edges and entries of it costs."""
    lost = dict(zip(map(id, items), removal.alone, strict=True))

    def measured(item: Any) -> Any:
        return replace(item, removed=lost[id(item)]) if id(item) in lost else item

    edges, sources = (tuple(map(measured, part)) for part in (explained.edges, explained.sources))
    return replace(explained, edges=edges, sources=sources)


def _place(item: Edge | Source) -> tuple[object, ...]:
    """The same item may have been explained twice, with other amounts."""
    of = (item.head, item.query, item.key) if isinstance(item, Edge) else (item.letter, item.neuron, item.position)
    return type(item), item.half, item.layer, *of


def _check(item: Edge | Source, held: HeldPass, entries: Entries) -> None:
    if isinstance(item, Source):
        entries.find(item, held)
        return
    attention = attention_of(held, item)
    _, queries, keys = attention.weights.shape
    if not (0 <= item.query < queries and 0 <= item.key < keys):
        raise ValueError(f"expected an edge of this pass, got {item.name} from {item.key} to {item.query}")


def attention_of(held: HeldPass, edge: Edge) -> HeldAttention:
    """The attention of the pass that an edge belongs to."""
    for attention in held.attentions:
        heads = range(attention.first_head, attention.first_head + len(attention.weights))
        if (attention.kind, attention.layer) == (edge.half, edge.layer) and edge.head in heads:
            return attention
    raise ValueError(f"expected an edge of this pass, got {edge.name}")


def _without_edges(
    removed: Sequence[tuple[int, Edge]], runs: Iterator[int], call: AttentionCall, proceed: Proceed
) -> Output:
    """Attention less what some keys give, which the values of each of those keys alone show, in the same call."""
    run = next(runs)
    edges = [edge for number, edge in removed if number == run]
    keys = sorted({edge.key for edge in edges})
    alone = [torch.zeros_like(call.value) for _ in keys]
    for key, value in zip(keys, alone, strict=True):
        value[:, :, key] = call.value[:, :, key]
    whole, *given = beside(call, proceed, alone)
    whole = whole.clone()
    for edge in edges:
        whole[:, edge.query, edge.head] -= given[keys.index(edge.key)][:, edge.query, edge.head]
    return whole, None


def _without_entries(
    entries: Entries,
    readings: Readings,
    taken: Mapping[str, Sequence[tuple[int, Source]]],
    call: Call,
    output: Tensor,
) -> Tensor:
    writer: Writer = entries.writers[str(call.name)]
    sources = [source for run, source in taken[writer.path] if run == call.number]
    left = output.clone(memory_format=torch.contiguous_format)
    flat = left.view(-1, left.shape[-1])
    for chunk in writer.chunks(call, readings) if sources else ():
        for source in sources:
            columns = (chunk.entries + writer.offset == source.neuron).nonzero().flatten()
            rows = chunk.rows[chunk.positions == source.position]
            if len(columns) and len(rows):
                at = int((chunk.rows == rows[0]).nonzero()[0])
                flat[rows[0]] -= (chunk.weights[at, columns[0]] * chunk.values[columns[0]]).to(flat.dtype)
    return left
