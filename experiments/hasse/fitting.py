"""One model trained on what an arm says, and what all models of a study read."""

from __future__ import annotations

from collections.abc import Sized
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

import attnflow as af
from attnflow._core.progress import Progress
from attnflow.tasks import Collator
from experiments.hasse.arms import Arm, TaskOf, build
from experiments.hasse.settings import Training
from experiments.hasse.writing import words
from experiments.runner.jobs import Job
from experiments.runner.packing import Drawn
from experiments.runner.text import Text, load_text
from experiments.runner.training import Course, Loop, Measure, decayed, train

EVALUATED: Final = 16  # rows of a pass
_READ: Final = 50_000  # training rows that words and tables are counted in


@dataclass(frozen=True)
class Material:
    text: Text  # rows of it
    mask_token: int  # id of [MASK], the last one of the vocabulary if the tokenizer has none
    vocabulary: int  # number of ids

    @classmethod
    def of(cls, config: Training) -> Material:
        text = load_text(config.text, config.tokenizer, config.length, config.rows, config.held_out)
        mask_token = text.tokenizer.mask_token_id
        vocabulary = len(text.tokenizer) + (mask_token is None)
        return cls(text, vocabulary - 1 if mask_token is None else mask_token, vocabulary)

    @property
    def rows(self) -> int:
        return len(cast(Sized, self.text.rows))

    @cached_property
    def read(self) -> Tensor:
        """Training rows that words and tables are counted in."""
        rows = cast(Any, self.text.rows)
        return rows[list(range(min(_READ, len(rows))))]["input_ids"]

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(words([str(one) for one in self.text.tokenizer.batch_decode(self.read.tolist())]))

    def sizes(self, config: Training, arm: Arm) -> dict[str, int]:
        return {**config.sizes, "layers": arm.layers, "vocabulary": self.vocabulary}


class Fitting:
    """One run of an arm.

    Attributes:
        model: that is trained.
        own: from tokens to the arm's task.
    """

    def __init__(self, arm: Arm, config: Training, material: Material, seed: int) -> None:
        self._arm, self._config, self._material, self._seed = arm, config, material, seed
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._sizes = material.sizes(config, arm)
        self.model: Any = build(self._sizes, config.length, seed).to(self._device)
        self.own = arm.task(material.mask_token)
        self._first = Arm("causal", arm.layers).task(material.mask_token)
        self._collators = {
            self.own: Collator(self.own, by_length=not arm.random, masks=config.masks),
            self._first: Collator(self._first, by_length=True, masks=config.masks),
        }

    def batch(self, of: TaskOf | Collator, tokens: Tensor) -> dict[str, Tensor]:
        """Of rows of tokens, on the device of the model."""
        if self._arm.repeated:
            half = tokens[:, : self._config.length // 2]
            tokens = torch.cat([half, half], dim=1)
        collate = of if isinstance(of, Collator) else self._collators[of]
        return {name: value.to(self._device) for name, value in collate(list(tokens)).items()}

    def train(self, job: Job, folder: Path, measure: Measure, progress: Progress) -> Course:
        """Train, or go on; see `experiments.runner.training.train`."""
        config, arm = self._config, self._arm
        flex: Any = nullcontext()
        if config.masks == "intervals":
            flex = af.masks.attach(self.model, "batch", backend="flex_attention", flex_on_cpu="sdpa")
        drawn = Drawn(self._material.text.rows, config.steps * config.parts * config.batch_size, self._seed)

        def losses(now: nn.Module, step: int, part: int) -> dict[str, Tensor]:
            start = (step * config.parts + part) * config.batch_size
            tokens = torch.stack([drawn[start + i]["input_ids"] for i in range(config.batch_size)])
            made = self.batch(self._first if arm.warm and step < config.steps // 2 else self.own, tokens)
            labels = made.pop("labels")
            return {"loss": af.tasks.loss(now(**made, use_cache=False), labels)}

        loop = Loop(
            config.steps,
            cast(float, job.rate),
            lambda step: min(1.0, (step + 1) / config.warmup),
            parts=config.parts,
            log_every=config.measure_every,
            measure_every=config.measure_every,
            save_every=config.save_every,
        )
        optimiser = torch.optim.AdamW(decayed(self.model, config.decay), betas=(0.9, 0.99))
        identity = {"arm": job.arm, "rate": job.rate, "steps": config.steps, "sizes": self._sizes}
        with flex:  # decoders run models under SDPA
            return train(
                self.model, optimiser, losses, loop, folder,
                seed=self._seed, identity=identity, measure=measure, progress=progress,
            )  # fmt: skip
