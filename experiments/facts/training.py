"""Joint training of the encoder and the language model, which goes on where it was interrupted."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from attnflow._core.progress import Progress
from attnflow.knowledge.attention import softmax_one
from attnflow.knowledge.modular import ModularConfig
from experiments.facts.corpus import UNKNOWN, Corpus, Key, Vocabulary
from experiments.facts.model import FactEncoder, FactReader, nearest_loss, retrieval_loss
from experiments.runner import training as loop

SOFTMAX: Final = "softmax"


@dataclass(frozen=True)
class FactTraining:
    """How a model and its encoder are trained. The defaults are the scale "tiny"."""

    dim: int = 64  # width of the model, and of each half of an entry
    layers: int = 2  # blocks of the model
    activation: str = "relu"  # from scores of entries to weights; "softmax" is one with room for none of them
    threshold: str = "mlp"  # where the threshold of an entry comes from
    base_entries: int = 64  # the model's own, which it reads where it is given no others: with facts in the context
    steps: int = 2400  # of the optimiser; even ones ask from entries, odd ones from facts in the context
    facts: int = 128  # in each step's pool, all new
    # of a curriculum, in the pools of its first steps, which have no near misses and no questions about other facts;
    # all three grow together, see `grown`. 0: no curriculum.
    first_facts: int = 0
    best: int = 0  # entries that each token reads, the others being passed by with straight-through gradients. 0: all.
    questions: int = 64  # to be answered from entries in an even step
    # questions to be answered from facts in the context, in an odd step; 0: odd steps are as even ones
    contexts: int = 48
    near: float = 0.6  # fraction of a pool's keys that differ in one part from another key of it
    unknown: float = 0.2  # fraction of questions whose fact is not in the pool
    rate: float = 3e-3  # peak learning rate
    warmup: int = 100  # steps of its rise; it then falls as a cosine
    retrieval: float = 1.0  # weight of the supervised reading; 0: the answers alone say which entry to read
    nearest: float = 0.3  # weight of the encoder's own retrieval loss; 0: none

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    def pool(self, step: int) -> int:
        """How many facts a step shows: with a curriculum `first_facts` at first, more by equal factors, then all.

        >>> settings = FactTraining(steps=16, facts=64, first_facts=4)
        >>> [settings.pool(step) for step in (0, 4, 6, 8, 12, 15)]
        [4, 4, 8, 16, 64, 64]
        """
        return round(self.facts * (self.first_facts / self.facts) ** (1 - self.grown(step)))

    def grown(self, step: int) -> float:
        """How far the curriculum has come, 0 to 1: none in the first quarter of the steps, all in the last one."""
        return min(1.0, max(0.0, 2 * step / self.steps - 0.5)) if self.first_facts else 1.0

    def model_config(self, vocabulary: Vocabulary) -> ModularConfig:
        return ModularConfig(
            vocab_size=len(vocabulary),
            hidden_size=self.dim,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_entries=self.base_entries,
            entry_dim=2 * self.dim,
            key_dim=self.dim,
            knowledge_activation="relu" if self.activation == SOFTMAX else self.activation,
            threshold=self.threshold,
            entries_per_token=self.best or None,
            initializer_range=self.dim**-0.5,
        )


@dataclass(frozen=True, eq=False)
class Trained:
    """A language model, its encoder, and how training went."""

    reader: FactReader  # the language model
    encoder: FactEncoder  # X
    log: list[dict[str, float]]  # every so many steps, the means since the last entry
    seconds: float  # of training, pauses not counted
    # by the measure of the training, if there was one
    measured: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def made(settings: FactTraining, seed: int) -> tuple[FactReader, FactEncoder]:
    """A model and an encoder before their training."""
    vocabulary = Vocabulary()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        reader = FactReader(settings.model_config(vocabulary), vocabulary)
        if settings.activation == SOFTMAX:  # which configs do not name
            for block in reader.model.readers():
                block.attention.activation = softmax_one
        return reader, FactEncoder(vocabulary, reader.model.model.embed_tokens)


class _Step:
    """What one step shows: a pool of facts, questions about it and beyond it; all of it follows from (seed, step)."""

    def __init__(self, settings: FactTraining, seed: int, step: int) -> None:
        self.corpus = Corpus(random.Random(f"{seed} {step}"))
        part = settings.grown(step)
        self._near, self._unknown = part * settings.near, part * settings.unknown
        self.facts = self.corpus.facts(settings.pool(step), self._near)
        self._held = {fact.key for fact in self.facts}

    def ask(self, count: int) -> tuple[list[str], list[str], Tensor]:
        """Questions, their answers, and which fact answers each (-1: none)."""
        draw, questions, answers, which = self.corpus.draw, list[str](), list[str](), list[int]()
        for _ in range(count):
            if draw.random() < self._unknown:
                key = self._absent()
                which.append(-1)
                answers.append(UNKNOWN)
            else:
                which.append(draw.randrange(len(self.facts)))
                key, value = self.facts[which[-1]].key, self.facts[which[-1]].value
                answers.append(value)
            questions.append(self.corpus.question(key))
        return questions, answers, torch.tensor(which)

    def contexts(self, which: Tensor, closeness: Float[Tensor, "questions facts"]) -> list[list[str]]:
        """For each question one to three facts, the one that answers among them; the others any, or the closest."""
        draw = self.corpus.draw
        found: list[list[str]] = []
        for number, order in zip(which.tolist(), closeness.topk(3, dim=1).indices.tolist(), strict=True):
            count = draw.choice((1, 1, 2, 3))
            chosen = order[:count] if draw.random() < 0.5 else draw.sample(range(len(self.facts)), count)
            if number >= 0 and number not in chosen:
                chosen[-1] = number
            draw.shuffle(chosen)
            found.append([self.facts[one].sentence for one in chosen])
        return found

    def _absent(self) -> Key:
        return self.corpus.keys(1, self._near, self._held)[0]


def losses(reader: FactReader, encoder: FactEncoder, settings: FactTraining, seed: int, step: int) -> dict[str, Tensor]:
    """What a step minimises the sum of: even steps ask from entries, odd ones from facts in the context.

    In one sum, the gradient of the supervised reading would drown that of the context for a thousand steps.
    """
    shown = _Step(settings, seed, step)
    entries = encoder([fact.text for fact in shown.facts], [fact.value for fact in shown.facts])
    if settings.contexts and step % 2:
        questions, answers, which = shown.ask(settings.contexts)
        closeness = (encoder.query(questions) @ entries.T).detach()
        asked = reader.asked(questions, answers, shown.contexts(which, closeness))
        return {"context": functional.cross_entropy(reader.logits(asked, None), asked.target)}
    questions, answers, which = shown.ask(settings.questions)
    asked = reader.asked(questions, answers)
    with reader.watched() as scores:
        logits = reader.logits(asked, entries)
    found = {"entries": functional.cross_entropy(logits, asked.target)}
    if settings.retrieval:
        of_facts = scores[0][asked.row, asked.place, 0]
        found["retrieval"] = settings.retrieval * retrieval_loss(of_facts, which[asked.row])
    if settings.nearest:
        keys = entries[:, : settings.dim]
        found["nearest"] = settings.nearest * nearest_loss(encoder.key(questions), keys, which)
    return found


def train(
    settings: FactTraining,
    seed: int,
    folder: Path,
    save_every: int = 250,
    progress: Progress | None = None,
    measure: Callable[[FactReader, FactEncoder], Mapping[str, object]] | None = None,
) -> Trained:
    """Train, or go on from the last state that was saved; the result is the same, bit by bit.

    Args:
        settings: of the training.
        seed: of initialisation and of all that is drawn.
        folder: for checkpoints.
        save_every: steps between checkpoints, between entries of the log, and between measurements.
        progress: of the steps.
        measure: of the model and its encoder.
    """
    reader, encoder = made(settings, seed)
    parts = nn.ModuleDict({"model": reader.model, "encoder": encoder})
    course = loop.train(
        parts,
        torch.optim.AdamW(list(parts.parameters()), lr=settings.rate, betas=(0.9, 0.98), weight_decay=0.01),
        lambda _, step, __: losses(reader, encoder, settings, seed, step),
        loop.Loop(
            settings.steps,
            settings.rate,
            lambda step: _schedule(step, settings),
            log_every=save_every,
            measure_every=save_every,
            save_every=save_every,
        ),
        folder,
        seed=seed,
        identity=settings.to_dict(),
        measure=None if measure is None else lambda _, __: measure(reader, encoder),
        progress=progress,
    )
    return Trained(reader, encoder, course.log, course.seconds, course.measured)


def _schedule(step: int, settings: FactTraining) -> float:
    rise = min(1.0, (step + 1) / settings.warmup)
    return rise * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / settings.steps)))
