"""Entries that contradict each other: keys that are near, values that disagree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from attnflow._core.checks import index_array, integer, number
from attnflow._core.markup import aligned, shorten
from attnflow._core.progress import Progress
from attnflow._core.results import Result
from attnflow.knowledge.answers import answers_of, token_ids
from attnflow.knowledge.monitor.pairs import Search, is_approximate, near_pairs
from attnflow.knowledge.monitor.reembedding import Encoder, same_width
from attnflow.knowledge.questions import FRAMES, PROMPT
from attnflow.knowledge.records import SEPARATOR, readable
from attnflow.knowledge.store import Store
from attnflow.models.evaluation import evaluating
from attnflow.models.loaded import Loaded

_CHUNK: Final = 1 << 16  # pairs whose values are compared at once


@dataclass(frozen=True)
class Contradiction:
    """Two entries about the same, with different values.

    Attributes:
        first: id of an entry.
        second: id of the other one, which is larger.
        key_cosine: of the embeddings of their keys.
        value_cosine: of the embeddings of their values.
        texts: of both, "key<tab>value".
        distinct: whether a model that has both before it answers their two questions differently, each by its own
            value, so that they are about different things; None: it was not asked.
    """

    first: int
    second: int
    key_cosine: float
    value_cosine: float
    texts: tuple[str, str]
    distinct: bool | None = None


@dataclass(frozen=True)
class Contradictions(Result):
    """Pairs of entries with keys that are near and values that disagree.

    Attributes:
        threshold: cosine of keys from which two entries are near.
        agreement: cosine of values from which they say the same.
        total: entries that were compared.
        without_value: entries near another one that have no value to compare.
        near: pairs of near keys (of an approximate search: those that it gave).
        pairs: those whose values disagree.
        listed: the pairs, the nearest keys first; at most as many as were asked for.
        approximate: whether an approximate index looked for near keys, which may miss some.
    """

    threshold: float
    agreement: float
    total: int
    without_value: int
    near: int
    pairs: int
    listed: tuple[Contradiction, ...]
    approximate: bool

    @property
    def ok(self) -> bool:
        """Whether no two entries contradict each other; pairs that a model keeps apart do not."""
        return self.pairs == sum(one.distinct is True for one in self.listed)

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each pair that is listed."""
        return [{**asdict(one), "texts": " | ".join(map(readable, one.texts))} for one in self.listed]

    @property
    def summary(self) -> str:
        """The numbers in one line."""
        how = "found by an approximate search, which may miss some" if self.approximate else "all pairs compared"
        judged = [one.distinct for one in self.listed if one.distinct is not None]
        asked = f"; of {len(judged):,} the model keeps {sum(judged):,} apart" if judged else ""
        return (
            f"{self.pairs:,} of {self.near:,} pairs of near keys (cosine {self.threshold:g} or more) among "
            f"{self.total:,} entries have values that disagree (cosine below {self.agreement:g}){asked}; {how}"
        )

    def __str__(self) -> str:
        head = ["ids", "keys", "values", "first", "second", ""]
        rows = [
            [
                f"{one.first}, {one.second}",
                f"{one.key_cosine:.3f}",
                f"{one.value_cosine:.3f}",
                *(shorten(readable(text), 50) for text in one.texts),
                "" if one.distinct is None else "distinct" if one.distinct else "contradict",
            ]
            for one in self.listed[:20]
        ]
        said = [self.summary, *([aligned([head, *rows], left=[0, 3, 4, 5])] if rows else [])]
        if self.pairs > len(rows):
            said.append(f"and {self.pairs - len(rows):,} more pairs")
        return "\n".join(said)


def contradictions(
    store: Store,
    encoder: Encoder,
    threshold: float = 0.9,
    agreement: float = 0.8,
    *,
    model: Loaded | None = None,
    most: int = 100,
    search: Search = "auto",
    progress: Progress | None = None,
) -> Contradictions:
    """Pairs of entries whose keys are near each other and whose values disagree.

    Values disagree where their texts differ (but for case and space) and their embeddings have a cosine below
    `agreement`. Near keys may be about different things, such as two neighbouring towns: a language model tells. It is
    given both entries in both orders and asked both questions; where it prefers one of the two values for both, it
    does not keep them apart, and the pair is a contradiction for it.

    Args:
        store: of keys and values, "key<tab>value".
        encoder: that made all of its entries, `TextEncoder.of(store)`; it embeds values that the store does not hold.
        threshold: cosine of keys in (0, 1].
        agreement: cosine of values in (-1, 1].
        model: with a tokenizer; None: do not ask.
        most: so many pairs are listed and asked for, those with the nearest keys.
        search: "exact" compares all pairs; "approximate" asks an index; "auto" does so where it would take minutes.
        progress: called as progress(done, total, what) after each block of entries.

    Raises:
        ValueError: entries without values, or of another encoder; a cosine out of range; a model without a tokenizer.

    Cost: entries^2 * dim / 2 multiplications in blocks, a copy of the keys' embeddings, the texts of one block's near
        pairs; embedding the values of near entries, once each, where the store holds keys alone. For each pair that a
        model is asked for, eight short sequences.
    """
    if not 0 < number("threshold", threshold) <= 1:
        raise ValueError(f"threshold must be a cosine in (0, 1], got {threshold}")
    if not -1 < number("agreement", agreement) <= 1:
        raise ValueError(f"agreement must be a cosine in (-1, 1], got {agreement}")
    integer("most", most, 1)
    if model is not None and model.tokenizer is None:
        raise ValueError("a model that is asked needs its tokenizer: pass what af.load_model returned")
    same_width(store, encoder)
    others = sum(count for name, count in store.stats().encoders.items() if name != encoder.version)
    if others:
        raise ValueError(
            f"{others:,} of {len(store):,} entries were not made by {encoder.version}, and their cosines do not "
            f"compare: `attnflow knowledge reembed {store.uri}`"
        )
    ids = torch.from_numpy(index_array("ids", store.ids()))
    vectors = torch.as_tensor(store.vectors(ids))
    total, half = len(ids), encoder.dim // 2 if getattr(encoder, "values", False) else encoder.dim
    present = vectors[:, :half].norm(dim=1) > 0
    ids, vectors = ids[present], vectors[present]
    unit = functional.normalize(vectors[:, :half], dim=1)
    values = _Values(store, encoder, ids, vectors[:, half:] if half < encoder.dim else None)
    near = pairs = 0
    listed = list[Contradiction]()
    approximate = is_approximate(search, *unit.shape)
    for done, first, second in near_pairs(unit, threshold, approximate):
        near += len(first)
        for one, other, cosine in values.disagreeing(first, second, agreement):
            pairs += len(one)
            keys = (unit[one] * unit[other]).sum(dim=1)
            best = keys.topk(min(most, len(keys))).indices
            listed += values.contradictions(one[best], other[best], keys[best], cosine[best])
        listed = sorted(listed, key=_place)[:most]
        if progress is not None:
            progress(done, len(unit), "entries")
    if near and not values.any_value:
        raise ValueError(
            f"the entries of {store.uri} have no values to compare: build a store of keys and values (.jsonl with "
            '"key" and "value")'
        )
    if model is not None:
        listed = [replace(one, distinct=_keeps_apart(model, one)) for one in listed]
    without = int(values.without.sum())
    return Contradictions(float(threshold), float(agreement), total, without, near, pairs, tuple(listed), approximate)


def _place(pair: Contradiction) -> tuple[float, int, int]:
    return -pair.key_cosine, pair.first, pair.second


class _Values:
    """Values of entries: texts as they are needed, embeddings from the store or, once each, by the encoder."""

    def __init__(self, store: Store, encoder: Encoder, ids: Tensor, stored: Tensor | None) -> None:
        self._store, self._encoder, self._ids, self._stored = store, encoder, ids, stored
        self.without, self.any_value = torch.zeros(len(ids), dtype=torch.bool), False
        self._places = dict[str, int]()  # of the distinct values that were embedded
        self._embedded = torch.zeros(0, encoder.dim)

    def disagreeing(self, first: Tensor, second: Tensor, agreement: float) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(first, second, cosine of values) of those pairs that disagree, in parts."""
        if not len(first):
            return
        members, place = torch.stack([first, second]).unique(return_inverse=True)
        texts = [entry.text or "" for entry in self._store.get(self._ids[members])]
        said = [text.partition(SEPARATOR)[2].strip() for text in texts]
        has = torch.tensor([bool(value) for value in said])
        self.without[members[~has]] = True
        self.any_value |= bool(has.any())
        codes: dict[str, int] = {}
        code = torch.tensor([codes.setdefault(" ".join(value.casefold().split()), len(codes)) for value in said])
        differ = has[place].all(dim=0) & (code[place[0]] != code[place[1]])
        if not bool(differ.any()):
            return
        unit = self._embeddings(members, said)
        for part in differ.nonzero().flatten().split(_CHUNK):
            cosine = (unit[place[0, part]] * unit[place[1, part]]).sum(dim=1)
            apart = cosine < agreement
            yield first[part[apart]], second[part[apart]], cosine[apart]

    def contradictions(self, first: Tensor, second: Tensor, keys: Tensor, values: Tensor) -> list[Contradiction]:
        """Pairs with their texts."""
        if not len(first):
            return []
        members, place = torch.stack([first, second]).unique(return_inverse=True)
        entries = self._store.get(self._ids[members])
        return [
            Contradiction(entries[i].id, entries[j].id, key, value, (entries[i].text or "", entries[j].text or ""))
            for i, j, key, value in zip(*place.tolist(), keys.tolist(), values.tolist(), strict=True)
        ]

    def _embeddings(self, members: Tensor, said: Sequence[str]) -> Tensor:
        if self._stored is not None:
            return functional.normalize(self._stored[members], dim=1)
        new = [value for value in dict.fromkeys(said) if value and value not in self._places]
        if new:
            self._places.update({value: len(self._embedded) + place for place, value in enumerate(new)})
            embedded = functional.normalize(self._encoder(new).detach().float().cpu(), dim=1)
            self._embedded = torch.cat([self._embedded, embedded])
        return self._embedded[torch.tensor([self._places.get(value, 0) for value in said])]


def _keeps_apart(model: Loaded, pair: Contradiction) -> bool:
    """Whether a model with both entries before it prefers, for each of their questions, the entry's own value."""
    facts = [text.partition(SEPARATOR) for text in pair.texts]
    (key, _, value), (other_key, _, other_value) = facts
    lines = [f"{name}: {said.strip()}\n" for name, _, said in facts]
    contexts = ["".join(lines), "".join(reversed(lines))]
    prompts = [
        context + PROMPT.format(FRAMES[0].format(key=asked)) for context in contexts for asked in (key, other_key)
    ]
    answers = [token_ids(model.tokenizer, said, answer=True) for said in (value, other_value)]
    asked = [token_ids(model.tokenizer, prompt) for prompt in prompts]
    with evaluating(model.model), torch.no_grad():
        scores = answers_of(model.model, [ids for ids in asked for _ in answers], answers * len(asked)).scores
    prefers = scores.view(2, 2, 2).mean(dim=0).diff(dim=-1)[:, 0].neg()  # of each question, the first value
    return bool(prefers[0] > 0) and bool(prefers[1] < 0)
