"""Running a model without some edges or entries, to measure what that changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.explain.entries import Entries, Writer
from attnflow.explain.explanation import Edge, Source
from attnflow.models.anatomy.sites import Site, models_around
from attnflow.models.passes.beside import beside
from attnflow.models.passes.evaluation import still
from attnflow.models.passes.held import HeldAttention, HeldPass
from attnflow.models.passes.interception import AttentionCall, Output, Proceed, intercept
from attnflow.models.passes.watching import Call, Watch
from attnflow.models.subject import Subject


def value_without(
    subject: Subject,
    inputs: Mapping[str, Tensor],
    entries: Entries,
    removed: Sequence[Edge | Source],
    value: Callable[[Any], Tensor],
    held: HeldPass,
) -> float:
    """Run the model without what some edges carry and some entries write."""
    removed = list({_place(item): item for item in removed}.values())
    for item in removed:
        _check(item, held, entries)
    again = next((item for item in removed if not any(_layers(held, item))), None)
    if again is not None:
        raise UnsupportedArchitecture(
            f"{again.name} lies in a layer that runs more than once, so it cannot be taken out"
        )
    edges: dict[Site, list[Edge]] = {}
    for item in removed:
        if isinstance(item, Edge):
            attention = attention_of(held, item)
            edges.setdefault(attention.site, []).append(replace(item, head=item.head - attention.first_head))
    taken: dict[str, list[Source]] = {}
    for item in removed:
        if isinstance(item, Source):
            taken.setdefault(entries.find(item, held).path, []).append(item)
    options = {name: option for name, option in subject.sparing.items() if name != "logits_to_keep"}
    with still(subject.model), torch.no_grad(), ExitStack() as stack:
        sites = list(edges)
        if sites:
            interceptors = {site.module: partial(_without_edges, edges[site]) for site in sites}
            stack.callback(intercept(models_around(sites), interceptors, role="look").remove)
        stack.enter_context(entries.observed())
        modules = {path: entries.writers[path].module for path in taken}
        stack.enter_context(Watch(modules, leave=partial(_without_entries, entries, taken)))
        output = cast(Callable[..., Any], subject.model)(**inputs, **options)
        return float(value(output))


def _place(item: Edge | Source) -> tuple[object, ...]:
    """The same item may have been explained twice, with other amounts."""
    of = (item.head, item.query, item.key) if isinstance(item, Edge) else (item.entry, item.position)
    return type(item), item.half, item.layer, *of


def _check(item: Edge | Source, held: HeldPass, entries: Entries) -> None:
    if isinstance(item, Source):
        entries.find(item, held)
        return
    attention = attention_of(held, item)
    _, queries, keys = attention.weights.shape
    if not (0 <= item.query < queries and 0 <= item.key < keys):
        raise ValueError(f"expected an edge of this pass, got {item.name} from {item.key} to {item.query}")


def _layers(held: HeldPass, item: Edge | Source) -> list[str]:
    """The paths of the layers with the number of an item."""
    half = "" if item.half == "cross" else item.half
    paths = [f"{prefix}.{item.layer}" for prefix, other in held.halves.items() if other == half]
    names = {name for name, _ in held.subject.model.named_modules()}
    return [path for path in paths if path in names]


def attention_of(held: HeldPass, edge: Edge) -> HeldAttention:
    """The attention of the pass that an edge belongs to."""
    for attention in held.attentions:
        heads = range(attention.first_head, attention.first_head + len(attention.weights))
        if (attention.kind, attention.layer) == (edge.half, edge.layer) and edge.head in heads:
            return attention
    raise ValueError(f"expected an edge of this pass, got {edge.name}")


def _without_edges(edges: Sequence[Edge], call: AttentionCall, proceed: Proceed) -> Output:
    """Attention less what some keys give, which the values of each of those keys alone show, in the same call."""
    keys = sorted({edge.key for edge in edges})
    alone = [torch.zeros_like(call.value) for _ in keys]
    for key, value in zip(keys, alone, strict=True):
        value[:, :, key] = call.value[:, :, key]
    whole, *given = beside(call, proceed, alone)
    whole = whole.clone()
    for edge in edges:
        whole[:, edge.query, edge.head] -= given[keys.index(edge.key)][:, edge.query, edge.head]
    return whole, None


def _without_entries(entries: Entries, taken: Mapping[str, Sequence[Source]], call: Call, output: Tensor) -> Tensor:
    writer: Writer = entries.writers[str(call.name)]
    left = output.clone(memory_format=torch.contiguous_format)
    flat = left.view(-1, left.shape[-1])
    for chunk in writer.chunks(call, entries.readings):
        for source in taken[writer.path]:
            columns = (chunk.entries + writer.offset == source.entry).nonzero().flatten()
            rows = chunk.rows[chunk.positions == source.position]
            if len(columns) and len(rows):
                at = int((chunk.rows == rows[0]).nonzero()[0])
                flat[rows[0]] -= (chunk.weights[at, columns[0]] * chunk.values[columns[0]]).to(flat.dtype)
    return left
