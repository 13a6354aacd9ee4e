"""A run of `fit_reader`: readers learn where to read, then to answer."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from attnflow._core.files import write_atomically
from attnflow._core.progress import Progress
from attnflow.knowledge.hf.attach import Attached
from attnflow.knowledge.hf.encoder import TextEncoder
from attnflow.knowledge.hf.store_reader import StoreReader
from attnflow.knowledge.memory_layer.reader import Reading
from attnflow.knowledge.questions import READ, Question, asked, made_up
from attnflow.knowledge.records import Record

_BATCH: Final = 16
_HELD_OUT: Final = 10  # one fact in so many is never trained
_EVALUATED: Final = 32
_POOLS: Final = (64, 1024)  # entries that compete, at the beginning of training and at its end
_ABSENT: Final = 0.2  # share of questions whose entry is taken out of the pool
_SAVE_EVERY: Final = 25
_READING_RATES: Final = {"query": 1e-3, "key": 2e-2, "constant": 2e-2, "own": 1e-2, "pooled_map": 1e-3}
_ANSWER_RATES: Final = {"query": 2e-4, "key": 4e-3, "constant": 1e-2, "own": 2e-3, "pooled_map": 2e-4, "value": 1e-3,
                        "gate": 3e-2, "focus": 1e-2}  # fmt: skip
_RIDGE: Final = 1.0
_WORDS: Final = 6000


@dataclass(frozen=True)
class Settings:
    """By which a run is recognised when it goes on."""

    facts: int
    reading_steps: int
    steps: int
    seed: int
    data: str
    encoder: str


class Run:
    """One training run."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        handle: Attached,
        encoder: TextEncoder,
        own: Sequence[Record],
        settings: Settings,
        place: Path,
        progress: Progress | None,
    ) -> None:
        self.model, self.tokenizer, self.encoder = model, tokenizer, encoder
        self.readers = cast("list[StoreReader]", handle.readers)
        self.settings, self.place, self.progress = settings, place, progress
        self.curve: list[dict[str, float]] = []
        self.count = sum(parameter.numel() for reader in self.readers for parameter in reader.parameters())
        self.weight = cast(Tensor, cast(Any, model).get_output_embeddings().weight).detach()
        draw = random.Random(settings.seed)
        self.words = _words(tokenizer, draw)
        self.records = [*own, *made_up(settings.facts, self.words, draw)]
        held = set(draw.sample(range(len(self.records)), max(1, len(self.records) // _HELD_OUT)))
        trained, other = asked(self.records, draw), asked(self.records, draw, held_out=True)
        self.questions = [one for one in trained if one.entry not in held]
        self.held = [one for one in (*trained, *other) if one.entry in held]
        draw.shuffle(self.held)

    def fit(self) -> None:
        """Both parts, or what is left of them."""
        self.entries = self._embedded([record.text for record in self.records]).to(self._device)
        state = self._resume()
        if state is None:
            hidden, pooled = self._states()
            self._start_values(hidden)
            self._learn_to_read(hidden, pooled)
            self._measure(0)
            self._save(0, None)
        self._learn_to_answer(state)

    @property
    def _device(self) -> torch.device:
        return self.readers[0].gate.device

    def _embedded(self, texts: Sequence[str]) -> Tensor:
        return self.encoder.encode(texts, self.progress).embeddings

    def _start_values(self, hidden: Sequence[Tensor]) -> None:
        """Least squares from embeddings of words to the directions that the unembedding reads.

        Embeddings keep their mean, which all entries share and which is thereby mapped to nothing. At gate 1 what is
        read is as large as a token of the layer: they grow from layer to layer, of SmolLM2-135M from 90 to 490.
        """
        half = self.encoder.dim // 2 if self.encoder.values else 0
        embedded = self._embedded(self.words)[:, half:].double()
        ids = [
            cast("list[int]", self.tokenizer(f" {word}", add_special_tokens=False)["input_ids"])[0]
            for word in self.words
        ]
        named = dict(self.model.named_modules())
        norm = next((named[n].weight for n in named if n.endswith((".norm", ".ln_f", ".final_layernorm"))), None)
        rows = self.weight[ids].double().cpu()
        rows = rows * (norm.detach().double().cpu() if isinstance(norm, Tensor) else 1)
        rows = functional.normalize(rows - rows.mean(dim=0), dim=1)
        square = embedded.T @ embedded + _RIDGE * torch.eye(embedded.shape[1], dtype=torch.float64)
        start = torch.linalg.solve(square, embedded.T @ rows)
        with torch.no_grad():
            for reader, tokens in zip(self.readers, hidden, strict=True):
                value, size = reader.attention.value, tokens.norm(dim=-1).median() / math.sqrt(tokens.shape[-1])
                value.zero_()
                value[:, half:] = start.to(value) * size / reader.attention.num_heads

    def _learn_to_read(self, hidden: Sequence[Tensor], pooled: Sequence[Tensor]) -> None:
        """The right entry against all others, on states that are computed once."""
        right = torch.tensor([one.entry for one in self.questions], device=self._device)
        groups = _groups(self.readers, _READING_RATES)
        optimiser = torch.optim.AdamW(groups, weight_decay=0.1)
        draw = torch.Generator().manual_seed(self.settings.seed)
        total = self.settings.reading_steps
        for step in range(total):
            pick = torch.randint(len(right), (128,), generator=draw)
            size = min(
                int(_POOLS[0] * (len(self.entries) / _POOLS[0]) ** min(1.0, 2 * step / total)), len(self.entries)
            )
            wanted = right[pick]
            pool, place = _pool(wanted, len(self.entries), size, draw)
            absent = torch.rand(len(pick), generator=draw).lt(_ABSENT).to(self._device)
            loss = torch.zeros((), device=self._device)
            for number, reader in enumerate(self.readers):
                x = reader.asked(hidden[number][pick], pooled[number][pick])
                entries = self.entries[pool]
                scores = reader.attention.score(x, entries, reader.attention.thresholds(entries))[0]
                loss = loss + _reading_loss(scores, place, absent) / len(self.readers)
            _rate(optimiser, groups, step, total)
            self._step(optimiser, loss, step, total, "reading")

    def _states(self) -> tuple[list[Tensor], list[Tensor]]:
        """What readers see at the end of each prompt: hidden states and pooled values, [questions, width] each."""
        hidden: list[list[Tensor]] = [[] for _ in self.readers]
        pooled: list[list[Tensor]] = [[] for _ in self.readers]

        def keep(number: int, tokens: Tensor, said: Tensor) -> None:
            hidden[number].append(tokens[:, -1].detach())
            pooled[number].append(said[:, -1].detach())

        order = sorted(range(len(self.questions)), key=lambda row: len(self.questions[row].prompt))
        try:
            for number, reader in enumerate(self.readers):
                reader.asking, reader.given = partial(keep, number), self.entries[:1]
            with torch.no_grad():
                for start in range(0, len(order), _BATCH):
                    ids, mask, _ = self._batch([self.questions[row] for row in order[start : start + _BATCH]], False)
                    cast(Any, self.model)(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
                    self._say(start, len(order), "states")
        finally:
            for reader in self.readers:
                reader.asking = reader.given = None
        back = torch.tensor(order).argsort()
        return [torch.cat(one)[back] for one in hidden], [torch.cat(one)[back] for one in pooled]

    def _batch(self, questions: Sequence[Question], answers: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(ids, mask, labels) of questions, padded on the left, with their answers and a line break or without."""
        rows, lengths = list[list[int]](), list[int]()
        for one in questions:
            prompt = cast("list[int]", self.tokenizer(one.prompt)["input_ids"])
            answer = self.tokenizer(f" {one.answer}\n", add_special_tokens=False)["input_ids"] if answers else []
            rows.append([*prompt, *cast("list[int]", answer)])
            lengths.append(len(prompt))
        width = max(map(len, rows))
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for at, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            ids[at, width - len(row) :] = torch.tensor(row)
            mask[at, width - len(row) :] = 1
            labels[at, width - len(row) + length :] = torch.tensor(row[length:])
        return ids.to(self._device), mask.to(self._device), labels.to(self._device)

    def _learn_to_answer(self, state: dict[str, Any] | None) -> None:
        groups = _groups(self.readers, _ANSWER_RATES)
        optimiser = torch.optim.AdamW(groups, weight_decay=0.0)
        begin = 0
        if state is not None:
            begin = int(state["step"])
            if state["optimiser"] is not None:
                optimiser.load_state_dict(state["optimiser"])
        total = self.settings.steps
        for step in range(begin, total):
            draw = torch.Generator().manual_seed(1000003 * (self.settings.seed + 1) + step)  # whichever process runs it
            pick = torch.randint(len(self.questions), (_BATCH,), generator=draw).tolist()
            chosen = [self.questions[row] for row in pick]
            size = int(_POOLS[0] * (_POOLS[1] / _POOLS[0]) ** (step / total))
            absent = torch.rand(_BATCH, generator=draw).lt(_ABSENT).to(self._device)
            loss, parts = self._loss(chosen, absent, size, draw)
            _rate(optimiser, groups, step, total)
            self._step(optimiser, loss, step, total, "answering", parts)
            if (step + 1) % _SAVE_EVERY == 0 or step + 1 == total:
                self._measure(step + 1)
                self._save(step + 1, optimiser)

    def _loss(
        self, questions: Sequence[Question], absent: Tensor, size: int, draw: torch.Generator
    ) -> tuple[Tensor, dict[str, float]]:
        """Of reading, and of the answers of those questions that have one in the pool."""
        wanted = torch.tensor([one.entry for one in questions], device=self._device)
        there = wanted[~absent]
        pool, _ = _pool(there, len(self.entries), min(size, len(self.entries)), draw)
        pool = pool[~torch.isin(pool, wanted[absent])]
        place = (pool[None] == wanted[:, None]).int().argmax(dim=1)
        missing = ~(pool[None] == wanted[:, None]).any(dim=1)
        ids, mask, labels = self._batch(questions, True)
        readings: list[Reading] = []
        logits = self._read(ids, mask, self.entries[pool], readings)
        labels[missing] = -100
        answer = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        first = self._batch(questions, True)[2].ne(-100).int().argmax(dim=1) - 1  # the last token of the prompt
        rows = torch.arange(len(ids), device=self._device)
        reading = torch.stack([_reading_loss(one.scores[0][rows, first], place, missing) for one in readings]).mean()
        return answer + reading, {"answer": float(answer.detach()), "reading": float(reading.detach())}

    def _read(self, ids: Tensor, mask: Tensor, entries: Tensor, readings: list[Reading]) -> Tensor:
        for reader in self.readers:
            reader.given, reader.observer = entries, readings.append
        try:
            return cast(Tensor, cast(Any, self.model)(input_ids=ids, attention_mask=mask, use_cache=False).logits)
        finally:
            for reader in self.readers:
                reader.given = reader.observer = None

    def _measure(self, step: int) -> None:
        """Held-out questions: right entries, first words, and refusals where the entry is not there."""
        row: dict[str, float] = {"step": float(step)}
        draw = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for size in _POOLS:
                questions = self.held[:_EVALUATED]
                wanted = torch.tensor([one.entry for one in questions], device=self._device)
                pool, place = _pool(wanted, len(self.entries), min(size, len(self.entries)), draw)
                ids, mask, labels = self._batch(questions, True)
                first = labels.ne(-100).int().argmax(dim=1)
                rows = torch.arange(len(ids), device=self._device)
                readings: list[Reading] = []
                said = self._read(ids, mask, self.entries[pool], readings)[rows, first - 1].argmax(dim=-1)
                shares = torch.stack([one.weights[rows, first - 1].mean(dim=1) for one in readings]).mean(dim=0)
                row[f"entry@{size}"] = float((shares.argmax(dim=1) == place).float().mean())
                row[f"word@{size}"] = float((said == labels[rows, first]).float().mean())
                row[f"read@{size}"] = float((shares.sum(dim=1) > READ).float().mean())
                without = pool[~torch.isin(pool, wanted)]
                readings = []
                self._read(ids, mask, self.entries[without], readings)
                shares = torch.stack([one.weights[rows, first - 1].mean(dim=1) for one in readings]).mean(dim=0)
                row[f"refused@{size}"] = float((shares.sum(dim=1) <= READ).float().mean())
        self.curve.append(row)
        self._say(step, self.settings.steps, ", ".join(f"{name} {value:.2f}" for name, value in row.items()))

    def _step(
        self,
        optimiser: torch.optim.Optimizer,
        loss: Tensor,
        step: int,
        total: int,
        what: str,
        parts: Mapping[str, float] | None = None,
    ) -> None:
        if not math.isfinite(float(loss.detach())):
            raise ValueError(f"the loss of step {step} ({what}) is not finite; the last checkpoint is as it was")
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([one for group in optimiser.param_groups for one in group["params"]], 1.0)
        optimiser.step()
        if step % 10 == 0:
            more = "".join(f", {name} {value:.3f}" for name, value in (parts or {}).items())
            self._say(step, total, f"{what}: loss {float(loss.detach()):.3f}{more}")

    def _say(self, done: int, total: int, what: str) -> None:
        if self.progress is not None:
            self.progress(done, total, what)

    def _save(self, step: int, optimiser: torch.optim.Optimizer | None) -> None:
        state = {
            "step": step,
            "readers": [reader.state_dict() for reader in self.readers],
            "optimiser": None if optimiser is None else optimiser.state_dict(),
            "curve": self.curve,
        }
        with write_atomically(self.place / "checkpoint.pt") as file:
            torch.save(state, file)

    def _resume(self) -> dict[str, Any] | None:
        path = self.place / "checkpoint.pt"
        if not path.is_file():
            return None
        state = cast("dict[str, Any]", torch.load(path, map_location=self._device, weights_only=True))
        for reader, values in zip(self.readers, state["readers"], strict=True):
            reader.load_state_dict(values)
        self.curve = state["curve"]
        return state


def _reading_loss(scores: Tensor, place: Tensor, absent: Tensor) -> Tensor:
    """-log of the weight of the right entry, or of none where it is absent; the mean over tokens and heads."""
    at = place[:, None, None].expand(-1, scores.shape[1], 1)
    right = scores.gather(-1, at).squeeze(-1)
    scores = scores.masked_fill(
        absent[:, None, None] & torch.zeros_like(scores, dtype=torch.bool).scatter(-1, at, True), -math.inf
    )
    total = functional.pad(scores, (1, 0)).logsumexp(dim=-1)
    return (total - torch.where(absent[:, None], 0, right)).mean()


def _pool(wanted: Tensor, total: int, size: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """`size` entries at least, among them all that are wanted, and where these are."""
    others = torch.randperm(total, generator=draw)[:size].to(wanted.device)
    pool = torch.cat([wanted.unique(), others]).unique()
    return pool, torch.searchsorted(pool, wanted)


def _groups(readers: Sequence[StoreReader], rates: Mapping[str, float]) -> list[dict[str, Any]]:
    """Parameters by the last word of their names, each kind with its own rate; others stay as they are."""
    groups: list[dict[str, Any]] = []
    for kind, rate in rates.items():
        named = [
            parameter for reader in readers for name, parameter in reader.named_parameters() if kind in name.split(".")
        ]
        groups.append({"params": named, "lr": rate, "peak": rate})
    return groups


def _rate(optimiser: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], step: int, total: int) -> None:
    """A short warm-up, then a cosine."""
    share = min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / total))
    for group, given in zip(optimiser.param_groups, groups, strict=True):
        group["lr"] = given["peak"] * share


def _words(tokenizer: PreTrainedTokenizerBase, draw: random.Random) -> list[str]:
    """Words of one token, in small letters, that the vocabulary has with the space before them."""
    words = [
        text[1:]
        for token in sorted(tokenizer.get_vocab().values())
        if (text := str(tokenizer.decode([token])))[:1] == " " and len(text) > 4
        if text[1:].isalpha() and text[1:].isascii() and text[1:].islower()
    ]
    if len(words) < 2:
        raise ValueError("the tokenizer has no words of one token to practise on")
    draw.shuffle(words)
    return words[:_WORDS]
