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
from attnflow.knowledge.layered import LayerEntries, LayerReader, observed, readers, reads_entries, unobserved
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
    id: int,
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
        id: its id, as a trace prints it.
        layer: the layer that reads it; needed only where several layers read one store or base.
        head: the head that reads it, where cross-attention has several.
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
    subject = Subject.of(model, tokenizer)
    subject.require_weights("entry")
    checks.integer("count", count, 1)
    if subject.encodes_and_decodes:
        raise UnsupportedArchitecture(f"entry needs a model with one stack, but {subject.kind} has two")
    if not reads_entries(subject.model):
        subject = Subject(from_ffn(subject.model), subject.tokenizer)
    model = subject.model
    one = _found(model, checks.integer("id", id), layer, head)
    with evaluating(model), torch.no_grad():
        place = torch.tensor([one.place], device=subject.device)
        value = one.reader.values(place)[head]
        named = _Names(subject)
        raised, lowered = named.pushed(value, count)[0]
        examples, read, active = _examples(subject, one, texts, count, progress)
        by_value, by_key = _nearest(model, one, head, count, named)
        threshold = float(one.reader.thresholds(place)[0, head, 0])
    return EntryReport(
        model=subject.name,
        entry=id,
        layer=one.reader.layer,
        head=head,
        expert=one.reader.base.expert_of([id])[0] if isinstance(one.reader, LayerEntries) else None,
        name=Stream(model, []).paths[one.reader.layer],
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
        removal=None if ablate is None else _removal(subject, one, ablate, position, count),
    )


def removal(
    model: Loaded, id: int, text: Text, *, position: int, layer: int | None = None, head: int = 0
) -> EntryRemoval:
    """`entry(model, id, ablate=text).removal` alone, of a model that reads entries."""
    return _removal(Subject.of(model), _found(model.model, id, layer, head), text, position, 8)


def _found(model: nn.Module, id: int, layer: int | None, head: int) -> LocatedEntry:
    every = readers(model)
    own = [one for one in every if isinstance(one, LayerEntries)]
    if own:
        base = own[0].base
        try:
            at = base.layer_of([id])[0]
        except KeyError:
            raise ValueError(f"no entry {id}: the {base.num_entries:,} ids go from {int(base.ids.min())} to "
                             f"{int(base.ids.max())}, as a trace prints them") from None  # fmt: skip
        if layer not in (None, at):
            raise ValueError(f"entry {id} belongs to layer {at}, got layer={layer}: leave it out")
        layer = at
    numbers = [one.layer for one in every]
    if layer is None and len(every) > 1:
        raise ValueError(f"layers {numbers} all read entry {id}: pass layer=..., the one to look at")
    reader = next((one for one in every if layer in (None, one.layer)), None)
    if reader is None:
        raise ValueError(f"layer must be one of {numbers}, which read entries, got {layer}")
    places = reader.every().to(Subject(model).device)
    place = places[reader.ids(places) == id][:1]
    if not len(place):
        raise ValueError(f"no entry {id}: layer {reader.layer} reads {reader.num_entries:,} entries")
    checks.integer("head", head, 0, len(reader.values(place)) - 1)
    return LocatedEntry(reader, int(place), head)


class _Names:
    """Names the tokens whose logits a value raises or lowers; `without` says why it cannot."""

    def __init__(self, subject: Subject) -> None:
        model = subject.model
        ids = torch.tensor([subject.ordinary_tokens(2)], device=subject.device)
        run = partial(cast(Any, model), input_ids=ids, **subject.sparing)
        with unobserved(model):
            found = directions(Stream(model, [1]), run, lambda _: [0])
        self._directions, self.without = (None, found) if isinstance(found, str) else (found, "")
        self._subject = subject

    def pushed(self, values: Tensor, count: int) -> list[tuple[tuple[Pushed, ...], tuple[Pushed, ...]]]:
        """Return the tokens that each value raises most, and those that it lowers most."""
        if self._directions is None:
            return [((), ())] * len(values)
        pushes = self._directions.pushes(values)
        pushes = (pushes - pushes.mean(dim=-1, keepdim=True)) / pushes.std(dim=-1, keepdim=True).clamp(min=1e-30)
        count = min(count, pushes.shape[-1])
        sides = [pushes.topk(count, largest=largest) for largest in (True, False)]

        def one(row: int, side: int) -> tuple[Pushed, ...]:
            ids = sides[side].indices[row].tolist()
            strengths = sides[side].values[row].tolist()
            return tuple(map(Pushed, self._subject.texts(ids), ids, strengths))

        return [(one(row, 0), one(row, 1)) for row in range(len(values))]


class _Read(Exception):
    """The layer was read: the rest of the forward pass is not needed."""


def _examples(
    subject: Subject,
    one: LocatedEntry,
    texts: Sequence[str | Sequence[int]],
    count: int,
    progress: Progress | None,
) -> tuple[tuple[Example, ...], int, int]:
    """Find the texts in which an entry has its largest weights; also count tokens, and those with a positive score."""
    if isinstance(texts, str):
        raise ValueError("texts must be a list of texts, got one text: put it in a list")
    rows = [subject.read(text, ids=True)["input_ids"][0, :_LONGEST] for text in texts]
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    found: list[tuple[float, int, Tensor]] = []
    read = active = done = 0
    while done < len(order):
        size = 1
        while done + size < len(order) and (size + 1) * len(rows[order[done + size]]) <= _BATCH:
            size += 1
        some = order[done : done + size]
        weights, scores = _read_batch(subject, one, [rows[index] for index in some])
        for index, weight, score in zip(some, weights, scores, strict=True):
            length = len(rows[index])
            read, active = read + length, active + int((score[:length] > 0).sum())
            found.append((float(weight[:length].abs().max()), index, weight[:length].cpu()))
        done += size
        if progress is not None:
            progress(done, len(order), "reading texts")
    best = sorted((each for each in found if each[0] > 0), key=lambda each: (-each[0], each[1]))[:count]
    return tuple(_example(index, rows[index], weight, subject) for _, index, weight in best), read, active


def _example(index: int, ids: Tensor, weights: Tensor, subject: Subject) -> Example:
    at = int(weights.abs().argmax())
    first = max(0, at - _AROUND)
    shown = slice(first, at + _AROUND + 1)
    tokens = subject.texts_in_sequence(ids[shown].tolist())
    return Example(index, at, float(weights[at]), first, tuple(tokens), tuple(weights[shown].tolist()))


def _read_batch(subject: Subject, one: LocatedEntry, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return an entry's weights and scores at each token of texts, [texts, longest]; 0 where it was not read."""
    ids, mask = (pad_sequence(each, batch_first=True) for each in ([*rows], [torch.ones_like(row) for row in rows]))
    seen: list[Tensor] = []

    def see(reading: LayerReading) -> None:
        columns = (one.column(reading, table)[:, one.heads] for table in (reading.weights, reading.scores[0]))
        seen.extend(column.reshape(ids.shape).to(wide(column.dtype)) for column in columns)
        raise _Read

    masked = {"attention_mask": mask} if subject.accepts("attention_mask") else {}
    with unobserved(subject.model), observed([(one.reader, see)]), suppress(_Read):
        cast(Any, subject.model)(input_ids=ids, **masked, **subject.sparing)
    return seen[0], seen[1]


def _nearest(model: nn.Module, one: LocatedEntry, head: int, count: int, names: _Names) -> Iterator[tuple[Near, ...]]:
    def values(reader: LayerReader, places: Tensor) -> Tensor:
        return reader.values(places)[head]

    def keys(reader: LayerReader, places: Tensor) -> Tensor:
        return reader.keys(places)[0, head]

    mine = torch.tensor([one.place], device=Subject(model).device)
    width = values(one.reader, mine).shape[-1]
    own = [reader for reader in readers(model) if isinstance(reader, LayerEntries) and reader.layout.model_dim == width]
    for vectors in (values, keys):
        asked = vectors(one.reader, mine)[0]
        asked = functional.normalize(asked.to(wide(asked.dtype)), dim=-1)
        best: list[tuple[float, int, LayerReader]] = []
        for reader in own or [one.reader]:
            for places in reader.every().to(mine.device).split(_BLOCK):
                cosines = functional.normalize(vectors(reader, places).to(asked), dim=-1) @ asked
                if reader is one.reader:
                    cosines[places == one.place] = -torch.inf
                top = cosines.topk(min(count, len(cosines)))
                best += [(c, int(places[at]), reader) for c, at in zip(*map(Tensor.tolist, top), strict=True)]
        best = sorted((each for each in best if each[0] > -torch.inf), key=lambda each: -each[0])[:count]
        found = [torch.tensor([place], device=mine.device) for _, place, _ in best]
        listed = [values(reader, place) for place, (_, _, reader) in zip(found, best, strict=True)]
        pushed = names.pushed(torch.cat(listed), _WORDS) if listed else []
        yield tuple(
            Near(int(reader.ids(place)[0]), reader.layer, cosine, tuple(each.token for each in raised))
            for place, (cosine, _, reader), (raised, _) in zip(found, best, pushed, strict=True)
        )


def _removal(
    subject: Subject,
    one: LocatedEntry,
    text: Text,
    position: int,
    count: int,
) -> EntryRemoval:
    """Run a text with an entry and without it."""
    model, arguments = subject.model, subject.read(text, ids=True)
    ids = arguments["input_ids"][0]
    if len(arguments["input_ids"]) > 1:
        raise ValueError(f"expected one sequence, got {len(arguments['input_ids'])}")
    position = checks.integer("position", position, -len(ids), len(ids) - 1) % len(ids)
    checks.integer("count", count, 1)
    with evaluating(model), torch.no_grad(), unobserved(model):
        logits, changed = logits_without(model, arguments, [one], position)
    before, after = (each.log_softmax(dim=-1) for each in (logits, changed[0]))
    kl = float((before.exp() * (before - after)).nan_to_num(nan=0).sum())
    count = min(count, len(before))
    likely = dict.fromkeys(before.topk(count).indices.tolist() + after.topk(count).indices.tolist())
    listed: list[int] = sorted(likely, key=lambda token: -float(before[token]))
    texts = subject.texts(listed)
    chances = zip(texts, listed, before[listed].exp().tolist(), after[listed].exp().tolist(), strict=True)
    reader = one.reader
    return EntryRemoval(
        model=subject.name,
        layer=reader.layer,
        entry=int(reader.ids(torch.tensor([one.place], device=ids.device))[0]),
        head=cast(int, one.head),
        tokens=tuple(subject.texts_in_sequence(ids.tolist())),
        position=position,
        kl=max(0.0, kl),
        chances=tuple(Chance(*each) for each in chances),
    )
