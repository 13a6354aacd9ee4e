"""One run of the comparison: an arm, a learning rate and a seed on one part, trained and measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn

from attnflow._core.progress import Progress
from attnflow.bias.kind import layer_biases
from experiments.bias_comparison import probes
from experiments.bias_comparison.arms import Arm, arm_of, count_trained, fitted
from experiments.bias_comparison.data import Rows, Texts, texts_of
from experiments.bias_comparison.losses import losses_of, optimiser_of, pieces, rows_of, scores, some_of, text_losses
from experiments.bias_comparison.maps import look_at_sums, map_of, similarity, strength
from experiments.bias_comparison.probes import PROBES
from experiments.bias_comparison.results import choosing_loss
from experiments.bias_comparison.settings import CHANGES, Comparison, Part
from experiments.bias_comparison.shuffle import shuffled
from experiments.bias_comparison.starts import begin, schedule_of
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, Plan, Read, swept
from experiments.runner.processes import launched
from experiments.runner.training import Loop, train

_CHOOSING, _RESULTS = 2**40, 2**41  # seeds of a probe's data that no step of training has
_SHUFFLED = ("guidance", "lowrank")  # arms whose trained bias is measured shuffled, too
DEPTHS, LENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0), (1, 2, 4, 8)
DISTRACTORS = (0, 3, 4, 5)


def setup(config: Comparison) -> Setup:
    """For each part every arm with every rate on the choosing seeds, then, seed by seed, with its best rate."""
    runs = {part.name: Runs(config, part) for part in config.parts}
    texts = texts_of(config) if any(part.kind != "probe" for part in config.parts) else None

    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        part, arm = split_name(job.arm, runs)
        return runs[part].run(arm, cast(float, job.rate), cast(int, job.seed), folder, progress, texts)

    plans = [
        swept(
            [f"{part.name} {arm}" for arm in part.arms],
            part.rates,
            config.seeds,
            choosing_loss,
            choosing=config.choosing,
            widen=config.widen,
        )
        for part in config.parts
    ]

    def then(read: Read) -> list[Job]:
        return sorted((job for plan in plans for job in plan.then(read)), key=lambda job: cast(int, job.seed))

    every = Plan(tuple(job for plan in plans for job in plan.first), then, sum(plan.count for plan in plans))
    return Setup(every, run)


def split_name(name: str, parts: Mapping[str, object]) -> tuple[str, str]:
    """(part, arm) of a job.

    >>> split_name("flip-flop every layer", {"flip-flop": None})
    ('flip-flop', 'every layer')
    """
    part = next(part for part in parts if name.startswith(f"{part} "))
    return part, name.removeprefix(f"{part} ")


@dataclass(frozen=True)
class Runs:
    config: Comparison
    part: Part

    def run(
        self, name: str, rate: float, seed: int, folder: Path, progress: Progress, texts: Texts | None
    ) -> Mapping[str, object]:
        """Train one arm and measure it; the same whenever it is called."""
        part, config = self.part, self.config
        start = begin(config, part, name, seed, folder, progress, texts)
        rows, kind, model = rows_of(part, name, texts), name, start.model
        if name in CHANGES:
            kind = start.added
        elif part.name == "few" and rows is not None:
            kind, count = name.split()
            rows = some_of(rows, int(count), seed)
        arm = arm_of(model, kind, part.hidden_dim, part.layers)
        backend = "reference" if part.kind == "probe" else "auto"  # sequences so short that holding all pairs is fast
        with fitted(model, arm, seed, part.trained, backend) as trained:
            if part.trained == "additions" and count_trained(trained) != arm.parameters:
                raise AssertionError(f"{name} trains {count_trained(trained)} parameters, counted {arm.parameters}")
            start.restore_additions(trained)
            before = map_of(trained, texts.new.test) if name in CHANGES and texts is not None else None
            optimiser = optimiser_of(trained)
            if part.steady:
                start.carry(optimiser)

            def measure(now: nn.Module, step: int) -> Mapping[str, object]:
                del step
                return self._measure(now, rows, _RESULTS)

            loop = Loop(
                part.steps,
                rate,
                schedule_of(part.steps),
                parts=part.passes,
                log_every=config.measure_every,
                measure_every=config.measure_every,
                save_every=config.save_every,
            )
            identity = {"part": part.name, "arm": arm.to_dict(), "rate": rate, "steps": part.steps, "name": name}
            course = train(
                trained, optimiser, losses_of(part, rows, seed), loop, folder, seed=seed, identity=identity,
                measure=measure, progress=progress,
            )  # fmt: skip
            with launched().precision():
                choosing = self._measure(trained, rows, _CHOOSING)
                more: dict[str, object] = {}
                if before is not None and texts is not None:
                    more["kept"] = similarity(before, map_of(trained, texts.new.test))
                with torch.no_grad():
                    more |= self._extras(trained, arm, rows, seed)
        return {
            "part": part.name,
            "arm": name,
            "parameters": arm.parameters,
            "measured": course.measured,
            "choosing": choosing["loss"],
            "choosing_accuracy": choosing.get("accuracy"),
            "extras": more,
            "seconds": course.seconds,
        }

    @torch.no_grad()
    def _measure(self, now: nn.Module, rows: Rows | None, which: int) -> dict[str, float]:
        """Held-out loss, and of a probe the share of right answers."""
        now.eval()
        if rows is None:
            drawn = PROBES[self.part.name](self.config.tested, torch.Generator().manual_seed(which))
            return scores(now, drawn)
        held = rows.test if which == _RESULTS else rows.choosing
        chance = torch.Generator().manual_seed(0)  # the same tokens are masked for all
        parts = [text_losses(now, self.part, rows, some, chance) for some in held.split(pieces(held))]
        return {"loss": float(torch.cat(parts).mean())}

    def _extras(self, now: nn.Module, arm: Arm, rows: Rows | None, seed: int) -> dict[str, object]:
        """What is measured of a trained model beside its loss."""
        more: dict[str, object] = {}
        now.eval()
        if arm.bias is not None and arm.name in _SHUFFLED and self.part.kind == "text":
            for how in ("queries", "keys"):
                with shuffled(now, how, seed):
                    more[f"{how} shuffled"] = self._measure(now, rows, _RESULTS)["loss"]
        if arm.bias is not None and rows is not None and next(layer_biases(now), None) is not None:
            more["strength"] = {str(layer): b for layer, b in strength(now, rows.test[:8]).items()}
        if self.part.name == "recall":
            more["distractors"] = {
                str(count): scores(now, probes.recall(self.config.tested, _generator(), distractors=count))["accuracy"]
                for count in DISTRACTORS
            }
            more["depth"] = {
                f"{length}x {depth:g}": scores(
                    now,
                    probes.recall(
                        -(-self.config.tested // 4), _generator(), context=probes.CONTEXT * length, depth=depth
                    ),
                )["accuracy"]
                for length in LENGTHS
                for depth in DEPTHS
            }
        if self.part.name == "sums" and arm.name in ("plain", "alibi", "guidance"):
            more["sums"] = look_at_sums(now, _generator())
        return more


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(_RESULTS)
