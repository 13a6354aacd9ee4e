"""`entry`: looks at one entry of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from attnflow._core import checks
from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.progress import Progress
from attnflow.knowledge.convert import from_ffn
from attnflow.knowledge.layered import (
    LayerEntries,
    LayerReader,
    model_layers,
    numbering,
    observed,
    readers,
    reads_entries,
    unobserved,
)
from attnflow.knowledge.reader import LayerReading
from attnflow.knowledge.reading.ablation import LocatedEntry, logits_without
from attnflow.knowledge.reading.direct_effect import Stream, directions, wide
from attnflow.knowledge.reading.results import Chance, EntryRemoval, EntryReport, Example, Near, Pushed
from attnflow.models.passes.evaluation import evaluating
from attnflow.models.subject import Loaded, Subject, Text

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_AROUND: Final = 12  # tokens of an example on each side
_LONGEST: Final = 512  # tokens of a text that are read
_BATCH: Final = 1 << 11  # tokens of a batch, padding included
_BLOCK: Final = 1 << 14  # entries that are compared at once
_WORDS: Final = 3  # tokens that name a near entry


def entry(
    model: nn.Module | Loaded,
    id: int | str,
    *,
    layer: int | None = None,
    head: int = 0,
    texts: Sequence[str | Sequence[int]] = (),
    count: int = 8,
    ablate: Text | None = None,
    position: int = -1,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
) -> EntryReport:
    """Look at one entry: the tokens that it raises and lowers, the texts that make it fire, and the entries near it.

    Args:
        model: any model, or what `af.load_model` returned. If it is not converted, a converted copy is read; convert it
            with `af.knowledge.from_ffn` to look at several entries.
        id: its id, or its name such as "L24N1005", as a trace and an explanation print it.
        layer: the model's layer that reads an id; needed only where several read one store or base.
        head: the head that reads an id, where cross-attention has several.
        texts: the corpus, texts or token ids, in which to look for the places where it fires. Of each the first 512
            tokens are read.
        count: how many tokens, examples and near entries to list.
        ablate: a text, token ids [tokens] or [1, tokens], or the model's named inputs for one sequence: run it with the
            entry and without it (its value is zero at all tokens), and compare what the model says next, `.removal`.
        position: of the token of that text after which it speaks, -1 for the last one.
        tokenizer: needed for texts unless `model` has one; for token ids, it names the tokens.
        progress: called as progress(done, total, what) while texts are read.

    Returns:
        The report; `print` and `af.report.figure` show it, and its `removal`.

    Raises:
        ValueError: there is no such entry, layer, head or position; a text without a tokenizer.
        UnsupportedArchitecture: an encoder-decoder model, or one with unknown feed-forward layers.

    Cost: one forward pass of a few tokens, a comparison with all entries of that width, and for the texts a forward
    pass up to the entry's layer.

    >>> import attnflow as af
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = af.knowledge.from_ffn(LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)))
    >>> found = entry(model, 30, texts=[[5, 6, 7], [8, 9]], count=3, ablate=[5, 6, 7])
    >>> found.layer, len(found.raised), len(found.examples), len(found.near_by_key)
    (1, 3, 2, 3)
    >>> len(found.removal.chances) >= 3
    True
    """
    subject = Subject.of(model, tokenizer).inside
    subject.require_weights("entry")
    checks.integer("count", count, 1)
    if subject.encodes_and_decodes:
        raise UnsupportedArchitecture(f"entry needs a model with one stack, but {subject.kind} has two")
    if not reads_entries(subject.model):
        subject = Subject(from_ffn(subject.model), subject.tokenizer)
    model = subject.model
    located = _located(subject, id, layer, head)
    reader, head = located.reader, located.head or 0
    with evaluating(model), torch.no_grad():
        place = torch.tensor([located.place], device=subject.device)
        value = reader.values(place)[head]
        named = _Names(subject)
        raised, lowered = named.pushed(value, count)[0]
        examples, read, active = _examples(subject, located, texts, count, progress)
        by_value, by_key = _nearest(subject, located, head, count, named)
        threshold = float(reader.thresholds(place)[0, head, 0])
    name, in_layer, neuron = located.numbered(named.numbers)
    return EntryReport(
        model=subject.name,
        name=name,
        layer=in_layer,
        neuron=neuron,
        reader=reader.layer,
        entry=(number := int(reader.ids(place)[0])),
        head=head,
        expert=reader.base.expert_of([number])[0] if isinstance(reader, LayerEntries) else None,
        path=Stream(model, []).paths[reader.layer],
        norm=float(value.norm()),
        threshold=threshold,
        raised=raised,
        lowered=lowered,
        without=named.without,
        examples=examples,
        tokens_read=read,
        active=active,
        near_by_value=by_value,
        near_by_key=by_key,
        removal=None if ablate is None else _removal(subject, located, ablate, position, count),
    )


def removal(
    model: Loaded, id: int, text: Text, *, position: int, layer: int | None = None, head: int = 0
) -> EntryRemoval:
    """`entry(model, id, ablate=text).removal` alone, of a model that reads entries."""
    subject = Subject.of(model).inside
    return _removal(subject, _located(subject, id, layer, head), text, position, 8)


def _named(model: nn.Module, name: str) -> LocatedEntry:
    for reader, (block, offset) in Stream(model, []).numbers.items():
        before, found, number = name.partition(f"L{block}{reader.letter}")
        if found and not before and number.isdecimal() and int(number) >= offset:
            head, place = divmod(int(number) - offset, max(1, reader.span))
            if head < len(reader.values(reader.every()[:1])) and place in reader.every():
                return LocatedEntry(reader, place, head)
    raise ValueError(f"no entry {name!r}: expected an id, or a name as a trace prints it")


def _located(subject: Subject, id: int | str, layer: int | None, head: int) -> LocatedEntry:
    if isinstance(id, str):
        if layer is not None or head:
            raise ValueError(f"{id} says the layer and the head: leave them out")
        return _named(subject.model, id)
    checks.integer("id", id)
    numbers, every = numbering(subject.model), readers(subject.model)
    layers = list(dict.fromkeys(numbers[reader][0] for reader in every))
    those = [reader for reader in every if layer in (None, numbers[reader][0])]
    if not those:
        raise ValueError(f"layer must be one of {layers}, which read entries, got {layer}")
    own = [reader for reader in every if isinstance(reader, LayerEntries)]
    if own and (layer is None or all(reader in own for reader in those)):
        base = own[0].base
        try:
            at = base.layer_of([id])[0]
        except KeyError:
            raise ValueError(f"no entry {id}: the {base.num_entries:,} ids go from {int(base.ids.min())} to "
                             f"{int(base.ids.max())}, as a trace prints them") from None  # fmt: skip
        there = model_layers(subject.model)[at]
        if layer not in (None, there):
            raise ValueError(f"entry {id} belongs to layer {there}, got layer={layer}: leave it out")
        those = [reader for reader in own if reader.layer == at]
        if not those:
            raise ValueError(
                f"layer {there} reads features in place of entry {id}: pass the name of one, as in a trace"
            )
    if layer is None and len(those) > 1:
        raise ValueError(f"layers {layers} all read entry {id}: pass layer=..., the one to look at")
    reader = those[0]
    places = reader.every().to(subject.device)
    place = places[reader.ids(places) == id][:1]
    if not len(place):
        raise ValueError(f"no entry {id}: layer {numbers[reader][0]} reads {reader.num_entries:,} entries")
    checks.integer("head", head, 0, len(reader.values(place)) - 1)
    return LocatedEntry(reader, int(place), head)


class _Names:
    """Names the tokens whose logits a value raises or lowers; `without` says why it cannot."""

    def __init__(self, subject: Subject) -> None:
        model = subject.model
        ids = torch.tensor([subject.ordinary_tokens(2)], device=subject.device)
        run = partial(cast(Any, model), input_ids=ids, **subject.sparing)
        with unobserved(model):
            frozen = directions(stream := Stream(model, [1]), run, lambda _: [0])
        self._directions, self.without = (None, frozen) if isinstance(frozen, str) else (frozen, "")
        self._subject, self.numbers = subject, stream.numbers

    def pushed(self, values: Tensor, count: int) -> list[tuple[tuple[Pushed, ...], tuple[Pushed, ...]]]:
        if self._directions is None:
            return [((), ())] * len(values)
        pushes = self._directions.pushes(values)
        pushes = (pushes - pushes.mean(dim=-1, keepdim=True)) / pushes.std(dim=-1, keepdim=True).clamp(min=1e-30)
        count = min(count, pushes.shape[-1])
        raised, lowered = (
            [tuple(map(Pushed, self._subject.texts(ids), ids, strengths)) for strengths, ids in zip(*top, strict=True)]
            for top in (map(Tensor.tolist, pushes.topk(count, largest=largest)) for largest in (True, False))
        )
        return list(zip(raised, lowered, strict=True))


class _Read(Exception):
    """The layer was read: the rest of the forward pass is not needed."""


def _examples(
    subject: Subject, entry: LocatedEntry, texts: Sequence[str | Sequence[int]], count: int, progress: Progress | None
) -> tuple[tuple[Example, ...], int, int]:
    """Find the texts where an entry has its largest weights; also count tokens, and those with a positive score."""
    if isinstance(texts, str):
        raise ValueError("texts must be a list of texts, got one text: put it in a list")
    rows = [subject.read(text, ids=True)["input_ids"][0, :_LONGEST] for text in texts]
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    firing: list[tuple[float, int, Tensor]] = []
    read = active = done = 0
    while done < len(order):
        size = 1
        while done + size < len(order) and (size + 1) * len(rows[order[done + size]]) <= _BATCH:
            size += 1
        some = order[done : done + size]
        weights, scores = _read_batch(subject, entry, [rows[index] for index in some])
        for index, weight, score in zip(some, weights, scores, strict=True):
            length = len(rows[index])
            read, active = read + length, active + int((score[:length] > 0).sum())
            if (largest := float(weight[:length].abs().max())) > 0:
                firing.append((largest, index, weight[:length].cpu()))
        done += size
        if progress is not None:
            progress(done, len(order), "reading texts")
    best = sorted(firing, key=lambda text: (-text[0], text[1]))[:count]
    return tuple(_example(index, rows[index], weight, subject) for _, index, weight in best), read, active


def _example(index: int, ids: Tensor, weights: Tensor, subject: Subject) -> Example:
    at = int(weights.abs().argmax())
    first = max(0, at - _AROUND)
    shown = slice(first, at + _AROUND + 1)
    tokens = subject.texts_in_sequence(ids[shown].tolist())
    return Example(index, at, float(weights[at]), first, tuple(tokens), tuple(weights[shown].tolist()))


def _read_batch(subject: Subject, entry: LocatedEntry, rows: Sequence[Tensor]) -> list[Tensor]:
    """Return an entry's weights and scores at each token of texts, [texts, longest]; 0 where it was not read."""
    ids = pad_sequence([*rows], batch_first=True)
    tables: list[Tensor] = []

    def see(reading: LayerReading) -> None:
        columns = (entry.column(reading, table)[:, entry.heads] for table in (reading.weights, reading.scores[0]))
        tables.extend(column.reshape(ids.shape).to(wide(column.dtype)) for column in columns)
        raise _Read

    masks = [torch.ones_like(row) for row in rows]
    masked = {"attention_mask": pad_sequence(masks, batch_first=True)} if subject.accepts("attention_mask") else {}
    with unobserved(subject.model), observed([(entry.reader, see)]), suppress(_Read):
        cast(Any, subject.model)(input_ids=ids, **masked, **subject.sparing)
    return tables


def _nearest(subject: Subject, entry: LocatedEntry, head: int, count: int, names: _Names) -> Iterator[tuple[Near, ...]]:
    def values(reader: LayerReader, places: Tensor) -> Tensor:
        return reader.values(places)[head]

    def keys(reader: LayerReader, places: Tensor) -> Tensor:
        return reader.keys(places)[0, head]

    here = torch.tensor([entry.place], device=subject.device)
    width = values(entry.reader, here).shape[-1]
    layers = [
        layer
        for layer in readers(subject.model)
        if isinstance(layer, LayerEntries) and layer.letter == entry.reader.letter
    ]
    alike = [layer for layer in layers if layer.layout.model_dim == width] or [entry.reader]
    for vectors in (values, keys):
        vector = vectors(entry.reader, here)[0]
        vector = functional.normalize(vector.to(wide(vector.dtype)), dim=-1)
        best: list[tuple[float, Tensor, LayerReader]] = []
        for reader in alike:
            for places in reader.every().to(here.device).split(_BLOCK):
                cosines = functional.normalize(vectors(reader, places).to(vector), dim=-1) @ vector
                if reader is entry.reader:
                    cosines[places == entry.place] = -torch.inf
                top = cosines.topk(min(count, len(cosines)))
                rows = zip(top.values.tolist(), places[top.indices].split(1), strict=True)
                best += [(cosine, place, reader) for cosine, place in rows if cosine > -torch.inf]
        best = sorted(best, key=lambda near: -near[0])[:count]
        listed = [values(reader, place) for _, place, reader in best]
        pushed = names.pushed(torch.cat(listed), _WORDS) if listed else []
        yield tuple(
            Near(
                *LocatedEntry(reader, int(place), head).numbered(names.numbers),
                *(reader.layer, int(reader.ids(place)[0]), cosine),
                tuple(token.token for token in raised),
            )
            for (cosine, place, reader), (raised, _) in zip(best, pushed, strict=True)
        )


def _removal(subject: Subject, entry: LocatedEntry, text: Text, position: int, count: int) -> EntryRemoval:
    model, arguments = subject.model, subject.read(text, ids=True)
    ids = arguments["input_ids"][0]
    if len(arguments["input_ids"]) > 1:
        raise ValueError(f"expected one sequence, got {len(arguments['input_ids'])}")
    position = checks.integer("position", position, -len(ids), len(ids) - 1) % len(ids)
    with evaluating(model), torch.no_grad(), unobserved(model):
        logits, changed = logits_without(model, arguments, [entry], position)
    before, after = logits.log_softmax(dim=-1), changed[0].log_softmax(dim=-1)
    kl = float((before.exp() * (before - after)).nan_to_num(nan=0).sum())
    count = min(count, len(before))
    likely = dict.fromkeys(before.topk(count).indices.tolist() + after.topk(count).indices.tolist())
    listed: list[int] = sorted(likely, key=lambda token: -float(before[token]))
    texts = subject.texts(listed)
    chances = zip(texts, listed, before[listed].exp().tolist(), after[listed].exp().tolist(), strict=True)
    name, layer, neuron = entry.numbered(Stream(model, []).numbers)
    return EntryRemoval(
        model=subject.name,
        name=name,
        layer=layer,
        neuron=neuron,
        entry=int(entry.reader.ids(torch.tensor([entry.place], device=ids.device))[0]),
        head=cast(int, entry.head),
        tokens=tuple(subject.texts_in_sequence(ids.tolist())),
        position=position,
        kl=max(0.0, kl),
        chances=tuple(Chance(*chance) for chance in chances),
    )
