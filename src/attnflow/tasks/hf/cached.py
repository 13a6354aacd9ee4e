"""Passes of a model over the rows that texts need next, with one cache, and the choice of tokens from its logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from attnflow._core.checks import IntArray, integer, number
from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.markup import plural
from attnflow.masks.hf.selfcheck import check_stack
from attnflow.models.anatomy.sites import mixers_beside
from attnflow.models.arguments import CACHES
from attnflow.models.subject import Subject
from attnflow.tasks.embedding import additive, embed, require_runnable
from attnflow.tasks.writing import BoolArray, Branch, Feed, Writing


class CachedPasses:
    """A model with a cache, whose slots hold a position of each text, or -1 for what only padding may read."""

    def __init__(self, model: PreTrainedModel, texts: Sequence[Writing]) -> None:
        subject = Subject(model)
        self.passes, self._model, self._texts = 0, model, texts
        self._table = model.get_input_embeddings()
        weight = next(self._table.parameters())
        self.vocabulary, self._device, self._dtype = len(weight), weight.device, weight.dtype
        self._cache, self._argument = DynamicCache(), cast(str, subject.accepted(*CACHES))
        self._keeps = subject.accepts("logits_to_keep")
        self._slots = np.zeros((len(texts), 0), dtype=np.int64)

    def run(self, feeds: Mapping[int, Feed]) -> Float[Tensor, "texts rows *heads vocabulary"]:
        """Logits of the last rows, from the first one on that predicts; a text's rows are the last ones of its own."""
        width = max(len(feed.rows) for feed in feeds.values())
        keep = max(len(feed.rows) - feed.keep for feed in feeds.values())
        wide = max(text.facts.ids.shape[1] for text in self._texts)
        past = self._slots.shape[1]
        ids = np.zeros((len(self._texts), width, wide), dtype=np.int64)
        ids[..., 1:] = -100
        places = np.zeros(ids.shape[:2], dtype=np.int64)
        allow = np.zeros((len(self._texts), width, past + width), dtype=np.bool_)
        allow[:, np.arange(width), past + np.arange(width)] = True  # padding reads itself
        for one, feed in feeds.items():
            text, rows = self._texts[one], slice(width - len(feed.rows), width)
            held = text.ids(feed)
            ids[one, rows, : held.shape[1]] = held
            places[one, rows] = text.facts.task.sequence.position[feed.rows]
            read = text.allow(feed, self._slots[one])
            allow[one, rows, :past], allow[one, rows, past + rows.start :] = read[:, :past], read[:, past:]
        tokens = torch.from_numpy(ids).to(self._device)
        arguments: dict[str, Any] = {
            **({"input_ids": tokens[..., 0]} if wide == 1 else {"inputs_embeds": embed(tokens, self._table)}),
            "position_ids": torch.from_numpy(places).to(self._device),
            "attention_mask": additive(torch.from_numpy(allow).to(self._device), self._dtype)[:, None],
            self._argument: self._cache,
            "use_cache": True,
        }
        if self._keeps:
            arguments["logits_to_keep"] = keep
        logits = cast(Tensor, self._model(**arguments).logits)
        self.passes += 1
        for facts in (text.facts for text in self._texts):
            heads = 1 if logits.ndim == 3 else logits.shape[2]
            if facts.head.max() >= heads:
                row = facts.row[facts.head >= heads][0]
                raise ValueError(
                    f"position {row} predicts {(facts.row == row).sum()} tokens, but the model gives it "
                    f"{plural(heads, 'row')} of logits: decode a family with a token per position, or a model with "
                    "logits [batch, n, heads, vocabulary]"
                )
        return logits[:, -keep:].cpu()

    def settle(self, kept: Mapping[int, tuple[Feed, BoolArray]]) -> None:
        """Enter the rows that stay and are read later into the slots; no room is kept for most of the others."""
        width = max(len(feed.rows) for feed, _ in kept.values())
        fresh = np.full((len(self._texts), width), -1)
        for one, (feed, final) in kept.items():
            stays = final & self._texts[one].read_later(feed.rows)
            fresh[one, width - len(final) :] = np.where(stays, feed.rows, -1)
        used = np.flatnonzero((fresh >= 0).any(axis=0))
        length = int(used[-1]) + 1 if len(used) else 0
        if length < width:
            self._cache.crop(length - width)
        if 2 * len(used) < length:  # a copy of the cache, where it at least halves what is new
            slots = np.append(np.arange(self._slots.shape[1]), self._slots.shape[1] + used)
            kept_slots = torch.from_numpy(slots).to(self._device)
            for layer in cast(Any, self._cache).layers:
                layer.keys, layer.values = (part.index_select(2, kept_slots) for part in (layer.keys, layer.values))
            fresh, length = fresh[:, used], len(used)
        self._slots = np.concatenate([self._slots, fresh[:, :length]], axis=1)


class Choice:
    """Chooses tokens: fills places by the surest ones (MaskGIT's schedule, arXiv:2202.04200), and verifies drafts."""

    def __init__(
        self, places: int | None, per_pass: int | None, threshold: float | None, temperature: float | None, seed: int
    ) -> None:
        self._per_pass = None if per_pass is None else integer("per_pass", per_pass, 1, places)
        self._threshold = None if threshold is None else number("threshold", threshold, 0.0)
        if threshold is not None and per_pass is None:
            raise ValueError("threshold needs per_pass, the least number of places that a pass fills")
        self._temperature = None if temperature is None else number("temperature", temperature)
        if self._temperature is not None and self._temperature <= 0:
            raise ValueError(f"temperature must be above 0, got {temperature}; leave it out to take the best token")
        self._generator = torch.Generator().manual_seed(integer("seed", seed))

    def advance(self, text: Writing, feed: Feed, logits: Tensor, wanted: IntArray) -> BoolArray:
        """Verify drafts, write tokens, and draft further ones; returns which rows stay in the cache."""
        facts, branch, written = text.facts, 0, dict[int, int]()
        while len(opened := text.opened(branch)):
            scores = _scores(text, feed, logits, branch, opened)
            drafts = [child for child, other in enumerate(text.branches) if child and other.parent == branch]
            if not drafts:
                tokens = zip(facts.data[opened].tolist(), self._fill(scores), strict=True)
                written = {place: token for place, token in tokens if token >= 0}
                break
            accepted, rest = self._verify([text.branches[child] for child in drafts], self._chances(scores[0]))
            if accepted is None:
                written = {int(facts.data[opened[0]]): self._draw(rest)}
                break
            branch = drafts[accepted]
        offers = dict[int, Tensor]()  # of the branch itself first: it has read the most
        for each in text.path(branch):
            ran = [feed.find(row, [each]) is not None for row in facts.row[feed.chosen[each]].tolist()]
            best = feed.chosen[each][np.array(ran, dtype=np.bool_)]
            best = best[facts.draft[best]]
            for place, row in zip(facts.data[best], _scores(text, feed, logits, branch, best), strict=True):
                offers.setdefault(int(place), row)
        kept, leaf = text.settle(feed, branch, written), 0
        while (place := text.next_place(leaf)) in offers and place in wanted:
            chances = self._chances(offers[place])
            leaf = text.grow(leaf, place, self._draw(chances), None if self._temperature is None else chances)
        return kept

    def _verify(self, drafts: Sequence[Branch], chances: Tensor) -> tuple[int | None, Tensor]:
        """Accept draft x of probability q(x) with min(1, p(x) / q(x)), else go on with max(p - q, 0), normalised.

        Together, and with a draw from the rest in the end, this is exactly p (Leviathan et al., arXiv:2211.17192).
        """
        for place, draft in enumerate(drafts):
            sure = torch.zeros_like(chances).index_fill_(0, torch.tensor(draft.token), 1)
            drawn = sure if draft.chances is None else draft.chances
            if float(torch.rand((), generator=self._generator)) < float(chances[draft.token] / drawn[draft.token]):
                return place, chances
            rest = (chances - drawn).clamp(min=0)
            chances = rest / rest.sum() if bool(rest.any()) else chances  # nothing is left where p = q up to rounding
        return None, chances

    def _chances(self, logits: Tensor) -> Tensor:
        if self._temperature is None:
            return torch.zeros_like(logits).index_fill_(0, logits.argmax(), 1)
        return (logits / self._temperature).softmax(dim=-1)

    def _draw(self, chances: Tensor) -> int:
        if self._temperature is None:
            return int(chances.argmax())
        return int(torch.multinomial(chances, 1, generator=self._generator))

    def _fill(self, logits: Float[Tensor, "places vocabulary"]) -> list[int]:
        """The tokens of the surest places, and -1 at the others."""
        if self._temperature is None:
            chances, drawn = logits.softmax(dim=-1), logits.argmax(dim=-1)[:, None]
        else:
            chances = (logits / self._temperature).softmax(dim=-1)
            drawn = torch.multinomial(chances, 1, generator=self._generator)
        sure = chances.gather(-1, drawn)[:, 0]
        now = sure.argsort(descending=True, stable=True).argsort() < (self._per_pass or len(sure))
        if self._threshold is not None:
            now |= sure >= self._threshold
        return torch.where(now, drawn[:, 0], -1).tolist()


def _scores(text: Writing, feed: Feed, logits: Tensor, branch: int, predictors: IntArray) -> Tensor:
    """The logits of predictors that ran in a branch or before it, [predictors, vocabulary], at least in float32."""
    path, facts = text.path(branch), text.facts
    rows = [cast(int, feed.find(row, path)) for row in facts.row[predictors].tolist()]
    chosen = logits[rows] if logits.ndim == 2 else logits[rows, facts.head[predictors]]
    return chosen.to(torch.promote_types(logits.dtype, torch.float32))


def decodable(subject: Subject) -> PreTrainedModel:
    """The model, if cached passes give what its merged tasks do; refused otherwise."""
    require_runnable(subject)
    model, name, sites = subject.model, subject.kind, subject.sites
    if not isinstance(model, PreTrainedModel) or subject.accepted(*CACHES) is None:
        raise UnsupportedArchitecture(f"decoding needs a cache of keys and values, which {name} does not take")
    mixers = mixers_beside(model, sites)
    moved = next((site for site in sites if check_stack(model, site.owner, sites).moved), None)
    if mixers or moved is not None:
        where = ", ".join(mixers[:4]) or type(cast(Any, moved).owner).__name__
        raise UnsupportedArchitecture(
            f"{name} moves information between positions outside its attention ({where}): no mask can keep masked "
            "positions from later ones, and such a state cannot be cropped as a cache can. Use a model whose positions "
            "exchange information through attention alone, or model.generate"
        )
    return model


def require_room(model: PreTrainedModel, texts: Sequence[Writing], wanted: Sequence[IntArray], name: str) -> None:
    """Refuse ids outside the vocabulary, tokens that cannot be written, and more positions than the model has."""
    size = len(next(model.get_input_embeddings().parameters()))
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    seen = set[tuple[int, bytes, bytes]]()
    for text, places in zip(texts, wanted, strict=True):
        facts, tokens = text.facts, text.tokens
        fixed = facts.ids[(facts.source[:, 0] < 0) & (facts.ids[:, 0] >= 0), 0]
        for what, ids in ((name, tokens[tokens >= 0]), ("mask_token", fixed)):
            if len(wrong := ids[ids >= size]):
                raise ValueError(
                    f"{what} must hold ids of the {size} entries of the model's vocabulary, got {wrong[0]}"
                )
        key = id(facts), (tokens >= 0).tobytes(), places.tobytes()
        if key in seen:
            continue
        seen.add(key)
        facts.require_writable(np.flatnonzero(tokens >= 0), places)
        inside = facts.below(facts.row[np.isin(facts.data, places) & ~facts.draft])
        positions = int(facts.task.sequence.position[inside].max(initial=-1)) + 1
        if isinstance(most, int) and 0 < most < positions:
            raise ValueError(
                f"{type(model).__name__} has {most} positions, but the text would take {positions}: ask for fewer "
                "tokens"
            )
