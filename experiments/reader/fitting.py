"""A run of `fit_reader`: readers learn where to read, then to answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from attnflow._core.files import write_atomically
from attnflow._core.progress import Progress
from attnflow.knowledge.reader import LayerReading
from attnflow.knowledge.reading.attach import Attached
from attnflow.knowledge.reading.store_reader import StoreReader
from attnflow.models.anatomy.sites import stack_of
from experiments.reader.halves import Halves
from experiments.reader.practice import Settings, near_enough, practice
from experiments.reader.questions import NEAR, READ, Question, least_mistakes
from experiments.reader.quiet import nothing_loss, pool_of, reading_loss, written_by
from experiments.reader.records import Record
from experiments.reader.words import value_map

_BATCH: Final = 16
_EVALUATED: Final = 32
_CALIBRATED: Final = 128  # further ones, by which readers learn when to refuse
_POOLS: Final = (64, 1024)  # entries that compete, at the beginning of training and at its end
_READ_AT_ONCE: Final = 256  # questions
_QUIET_AT_ONCE: Final = 64  # tokens at which nothing is to be read
_QUIET_POOL: Final = 4096  # entries that are not to be read
_TEXT: Final = (256, 24)  # rows of text of the model's own, and tokens of each
_TEXT_MEASURED: Final = 16  # of them, never trained
_TEXT_BATCH: Final = 4
_ABSENT: Final = 0.2  # share of questions whose entry is taken out of the pool
_SAVE_EVERY: Final = 25
_READING_RATES: Final = {"query": 1e-3, "key": 2e-2, "constant": 2e-2, "pooled_map": 1e-3}
_ANSWER_RATES: Final = {"query": 2e-4, "key": 2e-3, "constant": 1e-2, "own": 2e-3, "pooled_map": 2e-4, "value": 3e-4,
                        "gate": 1e-2}  # fmt: skip
_GATES: Final = (0.03, 0.1, 0.2, 0.4, 0.8, 1.6)


class Run:
    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        handle: Attached,
        encoder: Halves,
        own: Sequence[Record],
        settings: Settings,
        place: Path,
        progress: Progress | None,
    ) -> None:
        self.model, self.tokenizer, self.encoder = model, tokenizer, encoder
        self.readers = cast("list[StoreReader]", handle.readers)
        self.settings, self.place, self.progress = settings, place, progress
        self.curve: list[dict[str, float]] = []
        self.enough, self.near = READ, NEAR
        self.count = sum(parameter.numel() for reader in self.readers for parameter in reader.parameters())
        self.words, self.records, self.questions, self.held = practice(tokenizer, own, settings)

    def fit(self) -> None:
        self.entries = self._embedded([record.text for record in self.records]).to(self._device)
        self.texts = written_by(self.model, self.tokenizer, self.words, *_TEXT, self.settings.seed)
        state = self._resume()
        if state is None:
            self._learn_to_read(*self._pooled())
            self._start_values()
            self._open_gates()
            self._measure(0)
            self._save(0, None)
        self._learn_to_answer(state)
        self.near = near_enough(self.encoder, self._choosing, self.records, self.entries, _POOLS[1])

    @property
    def _device(self) -> torch.device:
        return self.readers[0].gate.device

    @property
    def _choosing(self) -> list[Question]:
        return self.held[_EVALUATED:][:_CALIBRATED] or self.held

    def _embedded(self, texts: Sequence[str]) -> Tensor:
        return self.encoder.encode(texts, self.progress)[0]

    def _start_values(self) -> None:
        """W_V of all readers: what embeddings of words say of the next token. It is of length 1 for a word."""
        half = self.encoder.dim // 2
        embedded = self._embedded(self.words)[:, half:]
        start = value_map(self.model, self.tokenizer, self.words, embedded, self.settings.seed, self._step)
        with torch.no_grad():
            for reader in self.readers:
                value = reader.attention.value
                value.zero_()
                value[:, half:] = start.to(value) / reader.attention.num_heads

    def _open_gates(self) -> None:
        """Set all readers to the one gate that makes the answers of one batch of trained questions likeliest.

        At gate 1 the reader's output is as large as the tokens of the layer: in SmolLM2-135M they grow from 90 to 490.
        """
        sizes = self._sizes()
        draw = torch.Generator().manual_seed(self.settings.seed)
        chosen = [self.questions[row] for row in torch.randint(len(self.questions), (_BATCH,), generator=draw).tolist()]
        losses: list[float] = []
        for gate in _GATES:
            self._set_gates(gate, sizes)
            with torch.no_grad():
                no = torch.zeros(len(chosen), dtype=torch.bool, device=self._device)
                losses.append(self._loss(chosen, no, _POOLS[0], draw)[1]["answer"])
        self._set_gates(_GATES[losses.index(min(losses))], sizes)

    def _set_gates(self, gate: float, sizes: Sequence[float]) -> None:
        with torch.no_grad():
            for reader, size in zip(self.readers, sizes, strict=True):
                reader.gate.fill_(gate * size / len(self.readers) / math.sqrt(reader.attention.model_dim))

    def _sizes(self) -> list[float]:
        """The median norm of tokens as they leave each layer with a reader, of one batch of questions."""
        norms: list[float] = []
        ids, mask, _ = self._batch(self.questions[:_BATCH], False)
        layers = stack_of(self.model).layers

        def keep(_: nn.Module, __: object, output: Any) -> None:
            tokens = cast(Tensor, output[0] if isinstance(output, tuple) else output)
            norms.append(float(tokens[mask.bool()].norm(dim=-1).median()))

        with ExitStack() as undo:
            for reader in self.readers:
                undo.enter_context(layers[reader.layer].register_forward_hook(keep))
            with torch.no_grad():
                cast(Any, self.model)(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
        return norms

    def _learn_to_read(self, pooled: Tensor, quiet: Tensor) -> None:
        """The right entry against others, and none where nothing is asked, by what is pooled alone.

        That is the same for all readers: one learns.
        """
        right = torch.tensor([one.entry for one in self.questions], device=self._device)
        reader = self.readers[0]
        half = self.encoder.dim // 2
        with torch.no_grad():
            reader.own.zero_()
            reader.attention.key[..., half:, :] = 0
        optimiser = torch.optim.AdamW(_groups(self.readers[:1], _READING_RATES), weight_decay=0.1)
        draw = torch.Generator().manual_seed(self.settings.seed)
        total = self.settings.reading_steps
        for step in range(total):
            pick = torch.randint(len(right), (_READ_AT_ONCE,), generator=draw)
            size = int(_POOLS[0] * (_POOLS[1] / _POOLS[0]) ** min(1.0, 2 * step / total))
            wanted = right[pick]
            pool, place = pool_of(wanted, len(self.entries), min(size, len(self.entries)), draw)
            absent = torch.rand(len(pick), generator=draw).lt(_ABSENT).to(self._device)
            entries = self.entries[pool]
            scores = reader.attention.score(
                reader.pooled_map(pooled[pick]), entries, reader.attention.thresholds(entries)
            )
            silent = reader.pooled_map(quiet[torch.randint(len(quiet), (_QUIET_AT_ONCE,), generator=draw)])
            every = self.entries[torch.randperm(len(self.entries), generator=draw)[:_QUIET_POOL].to(self._device)]
            nothing = nothing_loss(reader.attention.score(silent, every, reader.attention.thresholds(every))[0])
            self._step(optimiser, reading_loss(scores[0], place, absent) + nothing, step, total, "reading")
        for other in self.readers[1:]:
            other.load_state_dict(reader.state_dict())

    def _pooled(self) -> tuple[Tensor, Tensor]:
        """What is pooled at the last token of each question, [questions, width]; and at all tokens of other text.

        The first layers alone run. Other tokens of a question may read: at its last token its entry is what all say.
        """
        last, others = list[Tensor](), list[Tensor]()
        order = sorted(range(len(self.questions)), key=lambda row: len(self.questions[row].prompt))
        with torch.no_grad():
            for start in range(0, len(order), 4 * _BATCH):
                chosen = [self.questions[row] for row in order[start : start + 4 * _BATCH]]
                ids, mask, _ = self._batch(chosen, False)
                last.append(self._pool_of(ids, mask)[:, -1])
                self._say(start, len(order), "questions")
            for text in self.texts[_TEXT_MEASURED:].split(4 * _BATCH):
                others.append(self._pool_of(text, torch.ones_like(text)).flatten(0, 1))
        return torch.cat(last)[torch.tensor(order).argsort()], torch.cat(others)

    def _pool_of(self, ids: Tensor, mask: Tensor) -> Tensor:
        """What is pooled at each token, [batch, tokens, width]."""
        pool = self.readers[0].pooled
        hook = stack_of(self.model).layers[pool.layers[-1]].register_forward_hook(_enough, prepend=True)
        with suppress(_Enough):
            try:
                cast(Any, self.model)(input_ids=ids, attention_mask=mask, use_cache=False)
            finally:
                hook.remove()
        return pool.read(pool.last, ids[..., None].float(), self.readers[0].gate.dtype)

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
        optimiser = torch.optim.AdamW(_groups(self.readers, _ANSWER_RATES), weight_decay=0.0)
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
            self._step(optimiser, loss, step, total, "answering", parts)
            if step + 1 == total:
                self._calibrate()
            if (step + 1) % _SAVE_EVERY == 0 or step + 1 == total:
                self._measure(step + 1)
                self._save(step + 1, optimiser)

    def _loss(
        self, questions: Sequence[Question], absent: Tensor, size: int, draw: torch.Generator
    ) -> tuple[Tensor, dict[str, float]]:
        """Of reading, and of the answers of those questions that have one in the pool."""
        wanted = torch.tensor([one.entry for one in questions], device=self._device)
        there = wanted[~absent]
        pool, _ = pool_of(there, len(self.entries), min(size, len(self.entries)), draw)
        pool = pool[~torch.isin(pool, wanted[absent])]
        place = (pool[None] == wanted[:, None]).int().argmax(dim=1)
        missing = ~(pool[None] == wanted[:, None]).any(dim=1)
        ids, mask, labels = self._batch(questions, True)
        first = labels.ne(-100).int().argmax(dim=1) - 1  # the last token of the prompt
        readings: list[LayerReading] = []
        logits = self._read(ids, mask, self.entries[pool], readings)
        labels[missing] = -100
        answer = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        rows = torch.arange(len(ids), device=self._device)
        reading = torch.stack([reading_loss(one.scores[0][rows, first], place, missing) for one in readings]).mean()
        text = self.texts[_TEXT_MEASURED + torch.randperm(len(self.texts) - _TEXT_MEASURED, generator=draw)]
        silent: list[LayerReading] = []
        self._read(text[:_TEXT_BATCH], torch.ones_like(text[:_TEXT_BATCH]), self.entries[pool], silent)
        nothing = torch.stack([nothing_loss(one.scores[0].flatten(0, 1)) for one in silent]).mean()
        parts = {"answer": answer, "reading": reading, "nothing": nothing}
        return answer + reading + nothing, {name: float(value.detach()) for name, value in parts.items()}

    def _read(self, ids: Tensor, mask: Tensor, entries: Tensor, readings: list[LayerReading]) -> Tensor:
        before = self.readers[0].source
        for reader in self.readers:
            reader.source, reader.observer = entries, readings.append
        try:
            return cast(Tensor, cast(Any, self.model)(input_ids=ids, attention_mask=mask, use_cache=False).logits)
        finally:
            for reader in self.readers:
                reader.source, reader.observer = before, None

    def _asked(self, questions: Sequence[Question], entries: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of entries at the end of each question, [questions, entries], and whether the first word is right."""
        shares, right = list[Tensor](), list[Tensor]()
        for start in range(0, len(questions), 2 * _BATCH):
            ids, mask, labels = self._batch(questions[start : start + 2 * _BATCH], True)
            first = labels.ne(-100).int().argmax(dim=1)
            rows = torch.arange(len(ids), device=self._device)
            readings: list[LayerReading] = []
            with torch.no_grad():
                said = self._read(ids, mask, entries, readings)[rows, first - 1].argmax(dim=-1)
            right.append(said == labels[rows, first])
            shares.append(torch.stack([one.weights[rows, first - 1].mean(dim=1) for one in readings]).mean(dim=0))
        return torch.cat(shares), torch.cat(right)

    def _calibrate(self) -> None:
        """Choose the least weight on entries that means an answer, by held-out questions that nothing else measures."""
        present, _, absent = self._with_and_without(self._choosing, _POOLS[1], torch.Generator().manual_seed(11))
        cut = least_mistakes(present.sum(dim=1).tolist(), absent.sum(dim=1).tolist())
        self.enough = min(max(cut, 0.0), 1.0)

    def _with_and_without(
        self, questions: Sequence[Question], size: int, draw: torch.Generator
    ) -> tuple[Tensor, dict[str, float], Tensor]:
        """Weights of entries with those that have the answers, what is right then, and weights without them."""
        wanted = torch.tensor([one.entry for one in questions], device=self._device)
        pool, place = pool_of(wanted, len(self.entries), min(size, len(self.entries)), draw)
        shares, right = self._asked(questions, self.entries[pool])
        entry = shares.argmax(dim=1) == place
        without, _ = self._asked(questions, self.entries[pool[~torch.isin(pool, wanted)]])
        return shares, {"entry": float(entry.float().mean()), "word": float(right.float().mean())}, without

    @torch.no_grad()
    def _drift(self, size: int, draw: torch.Generator) -> float:
        """What the loss of other text rises by, in nats a token, where so many entries are read."""
        text, losses = self.texts[:_TEXT_MEASURED], list[Tensor]()
        for entries in (self.entries[torch.randperm(len(self.entries), generator=draw)[:size]], self.entries[:0]):
            logits = self._read(text, torch.ones_like(text), entries, [])
            losses.append(functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), text[:, 1:].flatten()))
        return float(losses[0] - losses[1])

    def _measure(self, step: int) -> None:
        """Held-out questions: right entries, first words, refusals where the entry is not there; and other text."""
        row: dict[str, float] = {"step": float(step)}
        draw, enough = torch.Generator().manual_seed(7), self.enough
        for size in _POOLS:
            shares, right, without = self._with_and_without(self.held[:_EVALUATED], size, draw)
            read, refused = (shares.sum(dim=1) > enough).float().mean(), (without.sum(dim=1) <= enough).float().mean()
            values = {**right, "read": float(read), "refused": float(refused), "drift": self._drift(size, draw)}
            row |= {f"{name}@{size}": value for name, value in values.items()}
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
        _rate(optimiser, step, total)
        if not math.isfinite(float(loss.detach())):
            raise ValueError(f"the loss of step {step} ({what}) is not finite; the last checkpoint is unchanged")
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
            "enough": self.enough,
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
        self.enough, self.curve = state["enough"], state["curve"]
        return state


class _Enough(Exception):
    """The layers that are needed have run."""


def _enough(*_: object) -> None:
    raise _Enough


def _groups(readers: Sequence[StoreReader], rates: Mapping[str, float]) -> list[dict[str, Any]]:
    """Parameters by the last word of their names, each kind with its own rate; others stay unchanged."""
    groups: list[dict[str, Any]] = []
    for kind, rate in rates.items():
        named = [
            parameter for reader in readers for name, parameter in reader.named_parameters() if kind in name.split(".")
        ]
        groups.append({"params": named, "lr": rate, "peak": rate})
    return groups


def _rate(optimiser: torch.optim.Optimizer, step: int, total: int) -> None:
    share = min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / total))
    for group in optimiser.param_groups:
        group["lr"] = group["peak"] * share
