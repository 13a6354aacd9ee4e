"""Finds where a model is edited and what its layers must add there."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from attnflow._core.progress import Progress
from attnflow.knowledge.editing.facts import Fact
from attnflow.knowledge.layered import EntryValues
from attnflow.models.passes.watching import Call, Watch, calls_of
from attnflow.models.subject import Subject

Layers = Mapping[int, EntryValues]

_WINDOW: Final = 256  # tokens of a piece of text
_UNREAD: Final = 512  # tokens of text, at most, at which an edit's cost is seen
_LEADS: Final = 1  # sentence openings put before each prompt
_LEAD: Final = 5  # words of one
_RIDGE: Final = 1e-3  # of the mean of the diagonal: what is added to a moment
_ABOUT: Final = " is a"  # after a subject: what the model says about it otherwise should stay
_DECAY: Final = 0.02  # weight of the squared norm of what is added, in units of what a layer adds
_KEEP: Final = 0.1  # weight of the divergence from other statements about the subject (ROME's essence drift)
_ALIKE: Final = 1e-4  # of the largest logit: by how much a continued pass may differ from a whole one
_TOGETHER: Final = 8  # facts whose passes are shared
_ENOUGH: Final = 0.95  # probability of the answer, the least over all prompts, at which the descent ends


class Answers(NamedTuple):
    scores: Float[Tensor, " pairs"]  # the mean log-probability of the tokens of each answer, in nats, float32
    first: Bool[Tensor, " pairs"]  # whether each of its tokens is the model's most likely one
    rows: Float[Tensor, "pairs vocabulary"]  # logits of the token after each prompt, float32


@dataclass(frozen=True)
class Method:
    steps: int = 20  # of Adam, at most
    rate: float = 0.15  # its step, in units of the norm of what a layer adds at the place
    ridge: float = 0.2  # of `least_change`, with whitened weights of length 1: one place alone gets 1 / (1 + ridge)
    mean: bool = False  # take the mean of the weights over the places of a fact, as ROME does, in place of all


def token_ids(tokenizer: Any, text: str, *, answer: bool = False) -> list[int]:
    if answer:
        return cast("list[int]", tokenizer(f" {text.strip()}", add_special_tokens=False)["input_ids"])
    return cast("list[int]", tokenizer(text)["input_ids"])


def run(subject: Subject, rows: Sequence[Sequence[int]], **options: object) -> Any:
    """Run sequences of ids, padded on the right, in one differentiable pass."""
    device = subject.device
    lengths = torch.tensor([len(row) for row in rows], device=device)
    ids = pad_sequence([torch.tensor(list(row), device=device) for row in rows], batch_first=True)
    mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
    arguments = {"input_ids": ids, "attention_mask": mask.long(), "use_cache": False, **options}
    return cast(Any, subject.model)(**arguments)


def answers_of(subject: Subject, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Answers:
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    return answers_in(run(subject, rows).logits, prompts, answers)


def answers_in(
    logits: Float[Tensor, "pairs tokens vocabulary"], prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> Answers:
    scores, first, rows = list[Tensor](), list[Tensor](), list[Tensor]()
    for row, prompt, answer in zip(logits, prompts, answers, strict=True):
        answered = row[len(prompt) - 1 : len(prompt) + len(answer) - 1].float()
        wanted = torch.tensor(list(answer), device=row.device)
        scores.append(answered.log_softmax(dim=-1).gather(-1, wanted[:, None]).mean())
        first.append((answered.detach().argmax(dim=-1) == wanted).all())
        rows.append(answered[0])
    return Answers(torch.stack(scores), torch.stack(first), torch.stack(rows))


@torch.no_grad()
def loss_on(subject: Subject, ids: Sequence[int]) -> float | None:
    """Compute the mean loss of next tokens, in nats; None for fewer than two tokens."""
    window = min(_WINDOW, longest(subject) or _WINDOW)
    pieces = [ids[start : start + window] for start in range(0, len(ids), window)]
    losses = [
        functional.cross_entropy(
            run(subject, [piece]).logits[0, :-1].float(), torch.tensor(piece[1:]).to(subject.device)
        )
        for piece in pieces
        if len(piece) > 1
    ]
    return float(torch.stack(losses).mean()) if losses else None


@dataclass(frozen=True)
class Spot:
    ids: tuple[int, ...]  # of the prompt
    position: int  # of the token
    answer: tuple[int, ...] = ()  # ids of the answer that should follow; () if only the weights are needed


@dataclass(frozen=True, eq=False)
class Moments:
    """Second moments E[k k^T] of the weights of layers' entries on a text, float64, with a little of the identity."""

    layers: Mapping[int, Tensor]  # one matrix [entries, entries] for each
    tokens: int  # that were read
    openings: tuple[str, ...] = ()  # of sentences of the text
    unread: tuple[int, ...] = ()  # ids of a part of the text that was not read: what an edit does to text is seen there


def places_of(subject: Subject, fact: Fact, leads: Sequence[str]) -> list[Spot]:
    tokenizer, limit = subject.tokenizer, longest(subject)
    answer = tuple(token_ids(tokenizer, fact.answer, answer=True))
    places: list[Spot] = []
    for prompt in fact.prompts:
        for lead in ("", *leads):
            place = spot_of(tokenizer, f"{lead}{prompt}", len(lead) + prompt.rfind(fact.subject), fact.subject, answer)
            if limit is None or len(place.ids) + len(answer) <= limit:
                places.append(place)
            elif not lead:
                raise ValueError(
                    f"the prompt {prompt[:40]!r} has {len(place.ids)} tokens and an answer of {len(answer)}, but the "
                    f"model reads at most {limit}"
                )
    if fact.subject:
        places += [spot_of(tokenizer, f"{lead}{fact.subject}", len(lead), fact.subject) for lead in leads]
    return places


def spot_of(tokenizer: Any, text: str, start: int, subject: str, answer: tuple[int, ...] = ()) -> Spot:
    """Find the last token of the subject that starts at a character, or without a subject the last of the text."""
    if not subject:
        ids = token_ids(tokenizer, text)
        return Spot(tuple(ids), len(ids) - 1, answer)
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not map tokens to characters, so the subject {subject!r} cannot be "
            "found: load a fast tokenizer, or leave the subject out"
        )
    encoded = tokenizer(text, return_offsets_mapping=True)
    spans = cast("list[tuple[int, int]]", encoded["offset_mapping"])
    last = start + len(subject) - 1
    position = next(index for index, (first, end) in enumerate(spans) if first <= last < end)
    return Spot(tuple(cast("list[int]", encoded["input_ids"])), position, answer)


def leads_of(text: str, count: int) -> list[str]:
    """Take sentence openings from all over a text, to put before prompts."""
    words = text.split()
    starts = [len(words) * place // count for place in range(count)] if words else []
    return [" ".join(words[start : start + _LEAD]).rstrip(".,;:!?") + ". " for start in starts]


@torch.no_grad()
def sampled_text(subject: Subject, tokens: int) -> str:
    """Let the model write text, from nothing and always the same: what is likely to it, in its own languages.

    Pieces of `_WINDOW // 2` tokens are sampled together, at temperature 1.
    """
    tokenizer, width = cast(Any, subject.tokenizer), _WINDOW // 2
    marks = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    embedding = subject.embedding
    known = [mark for mark in marks if mark is not None and (embedding is None or mark < embedding.num_embeddings)]
    begin = known[0] if known else 0
    if not hasattr(subject.model, "generate"):
        raise ValueError(
            f"{type(subject.model).__name__} cannot write text of its own: pass text=, some text to preserve"
        )
    first = torch.full((max(tokens // width, 1), 1), begin, device=subject.device)
    devices = [subject.device] if subject.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        settings = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "repetition_penalty": 1.0}
        lengths = {"min_new_tokens": width, "max_new_tokens": width, "pad_token_id": begin}
        rows = cast(Any, subject.model).generate(first, attention_mask=torch.ones_like(first), **settings, **lengths)
    return "\n\n".join(tokenizer.decode(row, skip_special_tokens=True) for row in rows)


@torch.no_grad()
def read_moments(subject: Subject, layers: Layers, text: str, tokens: int, progress: Progress | None = None) -> Moments:
    ids = token_ids(subject.tokenizer, text)
    if not ids:
        raise ValueError("the text is empty: pass some text that the edit should leave unchanged")
    read = min(tokens, len(ids) - len(ids) // 8)
    ids, unread = ids[:read], ids[read : read + _UNREAD]
    sums = {layer: torch.zeros((values.num_entries,) * 2, dtype=torch.float64) for layer, values in layers.items()}
    window = min(_WINDOW, longest(subject) or _WINDOW)

    def add(call: Call) -> None:
        rows = call.first.flatten(0, -2).float()
        sums[call.name].add_((rows.T @ rows).double().cpu())

    with Watch(layers, add):
        for start in range(0, len(ids), window):
            piece = ids[start : start + window]
            run(subject, [piece], **subject.sparing)
            if progress is not None:
                progress(start + len(piece), len(ids), "tokens of text")
    for moment in sums.values():
        moment /= len(ids)
        moment.diagonal().add_(max(_RIDGE * float(moment.diagonal().mean()), torch.finfo(torch.float64).tiny))
    return Moments(sums, len(ids), tuple(leads_of(text, _LEADS)), tuple(unread))


def longest(subject: Subject) -> int | None:
    return cast("int | None", getattr(subject.config, "max_position_embeddings", None))


def _adding(layers: Layers, added: Mapping[int, Tensor], columns: Sequence[int]) -> Watch:
    """Add to each layer's output a row of `added`, [rows or 1, model_dim], at one column of each row."""

    def add(call: Call, output: Tensor) -> Tensor:
        table = _by_row(output, len(columns))
        where = torch.zeros(table.shape[:2], dtype=output.dtype, device=output.device)
        where[torch.arange(len(columns)), list(columns)] = 1
        return (table + where[..., None] * added[call.name].to(output.dtype)[:, None]).view_as(output)

    return Watch(layers, leave=add)


def _by_row(table: Tensor, count: int) -> Float[Tensor, "rows tokens width"]:
    """Some models flatten a batch before its shared experts."""
    return table.reshape(count, -1, table.shape[-1])


class _Continued:
    """Rows of ids that are run many times from one column on; what stands before it is computed once, and kept.

    Where a model does not take up its cache as it would compute it, every run is whole. `columns` are the places in
    each row of what a run returns that stand for the row's `position`.
    """

    def __init__(self, subject: Subject, rows: Sequence[Sequence[int]], positions: Sequence[int]) -> None:
        self._subject, self._rows, self._positions = subject, rows, positions
        self.columns, self._cache = list(positions), None
        with torch.no_grad():
            self.whole = cast(Tensor, run(subject, rows).logits)
            if max(positions) and subject.takes_use_cache and subject.accepts("position_ids"):
                self._prepare()

    def _prepare(self) -> None:
        device, width = self._subject.device, max(self._positions)
        starts = torch.tensor(self._positions, device=device)
        before = [torch.tensor(row[:start]).flip(0) for row, start in zip(self._rows, self._positions, strict=True)]
        after = [torch.tensor(row[start:]) for row, start in zip(self._rows, self._positions, strict=True)]
        read = pad_sequence([ids.long() for ids in before], batch_first=True).flip(1).to(device)  # on the left
        self._ids = pad_sequence(after, batch_first=True).to(device)
        places = torch.arange(width, device=device) - (width - starts)[:, None]
        length = torch.tensor([len(ids) for ids in after], device=device)
        columns = torch.arange(self._ids.shape[1], device=device)
        self._mask = torch.cat([places >= 0, columns < length[:, None]], dim=1).long()
        self._places = starts[:, None] + columns.minimum(length[:, None] - 1)  # padding has no place of its own
        mask = self._mask[:, :width]
        model = cast(Any, self._subject.model)
        out = model(input_ids=read, attention_mask=mask, position_ids=places.clamp_min(0), use_cache=True)
        self._cache = getattr(out, "past_key_values", None)
        if self._cache is not None:
            continued, range_ = self(), float(self.whole.abs().max())
            apart = [
                (continued[row, : len(ids)] - self.whole[row, start : start + len(ids)]).abs().max()
                for row, (ids, start) in enumerate(zip(after, self._positions, strict=True))
            ]
            if float(torch.stack(apart).max()) <= _ALIKE * range_:
                self.columns = [0] * len(self._rows)
            else:
                self._cache = None

    def __call__(self) -> Float[Tensor, "rows columns vocabulary"]:
        """Run the rows, differentiably in what hooks add; the cache that is kept stays as it is."""
        if self._cache is None:
            return cast(Tensor, run(self._subject, self._rows).logits)
        arguments = {"input_ids": self._ids, "attention_mask": self._mask, "position_ids": self._places}
        return cast(Any, self._subject.model)(
            **arguments, past_key_values=copy.deepcopy(self._cache), use_cache=True
        ).logits


@torch.enable_grad()
def _descend(
    subject: Subject, layers: Layers, wanted: Sequence[tuple[Sequence[Spot], Sequence[Spot]]], method: Method
) -> list[dict[int, Tensor]]:
    """Find by Adam what each layer must add at the places of each fact, [model_dim], so that the answers follow.

    The facts share passes and nothing else. The loss of one is the mean of -log p(answer | prompt), a divergence on
    the subject, and the squared size of what is added.
    """
    answered = [[place for place in places if place.answer] for places, _ in wanted]
    spots = [spot for places, (_, about) in zip(answered, wanted, strict=True) for spot in [*places, *about]]
    owner = torch.tensor([index for index, (_, about) in enumerate(wanted) for _ in [*answered[index], *about]])
    frozen = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        ids = [[*spot.ids, *spot.answer[:-1]] for spot in spots]  # of the last token only the logits before it are read
        rows = _Continued(subject, ids, [spot.position for spot in spots])
        first = [int((owner == index).nonzero()[0]) for index in range(len(wanted))]
        norms = {
            call.name: _by_row(call.output, len(ids))[first, [rows.columns[row] for row in first]]
            .double()
            .norm(dim=-1, keepdim=True)
            for call in calls_of(layers, rows)
        }
        free = {
            layer: torch.zeros(len(wanted), len(values.weight), requires_grad=True) for layer, values in layers.items()
        }
        optimiser = torch.optim.Adam(free.values(), lr=method.rate)
        owner = owner.to(subject.device)
        found: list[dict[int, Tensor] | None] = [None] * len(wanted)
        for step in range(method.steps + 1):
            # A coordinate of a vector of norm 1 is d^-1/2 large: so Adam's step is `rate` norms long.
            added = {layer: norms[layer].float() * unit.shape[1] ** -0.5 * unit for layer, unit in free.items()}
            with _adding(layers, {layer: rows_of[owner] for layer, rows_of in added.items()}, rows.columns):
                logits = rows()
            loss = torch.zeros(())
            for index, (places, (_, about)) in enumerate(zip(answered, wanted, strict=True)):
                if found[index] is not None:
                    continue
                score, done = _judged(logits, rows, first[index], places, about)
                loss = loss + score
                if not bool(torch.isfinite(score)):
                    raise ValueError("the loss is NaN or infinite: check the weights of the model")
                if done or step == method.steps:
                    found[index] = {layer: vectors[index].detach().clone() for layer, vectors in added.items()}
            if all(vectors is not None for vectors in found):
                break
            loss = loss + _DECAY * torch.stack([unit.square().mean(dim=1).sum() for unit in free.values()]).sum()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
    return [vectors for vectors in found if vectors is not None]


def _judged(
    logits: Tensor, rows: _Continued, start: int, places: Sequence[Spot], about: Sequence[Spot]
) -> tuple[Tensor, bool]:
    """Compute the loss of the fact whose rows begin at `start`, and whether its answers are reached."""
    shifted = [[0] * (rows.columns[start + i] + len(spot.ids) - spot.position) for i, spot in enumerate(places)]
    now = answers_in(logits[start : start + len(places)], shifted, [spot.answer for spot in places])
    loss = -now.scores.mean()
    for row, spot in enumerate(about, start + len(places)):
        last = rows.columns[row] + len(spot.ids) - 1 - spot.position
        before = rows.whole[row, len(spot.ids) - 1].float().log_softmax(dim=-1)
        after = logits[row, last].float().log_softmax(dim=-1)
        loss = loss + _KEEP * functional.kl_div(after, before, log_target=True, reduction="sum")
    return loss, float(now.scores.detach().min().exp()) > _ENOUGH and bool(now.first.all())


Targets = Mapping[int, tuple[Tensor, Tensor]]  # of each layer, weights at the places, and what is added there


def targets(
    subject: Subject,
    layers: Layers,
    facts: Sequence[Fact],
    places: Sequence[Sequence[Spot]],
    leads: Sequence[str],
    method: Method,
    progress: Progress | None = None,
) -> Targets:
    """Compute, for each layer, the weights [places, entries] and what must be added there [places, model_dim]."""
    parts: dict[int, dict[int, tuple[Tensor, Tensor]]] = {layer: {} for layer in layers}
    # Facts share passes with those that have as much behind their subjects: what is padded is computed, too.
    order = sorted(range(len(facts)), key=lambda index: max(len(spot.ids) - spot.position for spot in places[index]))
    for start in range(0, len(facts), _TOGETHER):
        some = order[start : start + _TOGETHER]
        wanted = [(places[index], _about(subject, facts[index], leads)) for index in some]
        for index, added in zip(some, _descend(subject, layers, wanted, method), strict=True):
            columns, ids = [spot.position for spot in places[index]], [spot.ids for spot in places[index]]
            with _adding(layers, {layer: vector[None] for layer, vector in added.items()}, columns):
                calls = calls_of(layers, lambda ids=ids: run(subject, ids, **subject.sparing))
            for call in calls:
                rows = _by_row(call.first, len(ids))[torch.arange(len(ids)), columns].double().cpu()
                kept = rows.mean(dim=0, keepdim=True) if method.mean else rows
                parts[call.name][index] = kept, added[call.name].double().cpu().expand(len(kept), -1)
        if progress is not None:
            progress(start + len(some), len(facts), "facts")
    ranked = {layer: [found[index] for index in range(len(facts))] for layer, found in parts.items()}
    return {layer: (torch.cat([w for w, _ in some]), torch.cat([x for _, x in some])) for layer, some in ranked.items()}


def _about(subject: Subject, fact: Fact, leads: Sequence[str]) -> list[Spot]:
    if not fact.subject or not leads:
        return []
    return [spot_of(subject.tokenizer, f"{leads[0]}{fact.subject}{_ABOUT}", len(leads[0]), fact.subject)]
