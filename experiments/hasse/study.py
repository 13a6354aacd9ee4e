"""The study: one run of an arm, and what belongs to all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

import attnflow as af
from attnflow._core.progress import Progress
from experiments.hasse.arms import Arm, TaskOf, cost
from experiments.hasse.fitting import EVALUATED, Fitting, Material
from experiments.hasse.settings import Training
from experiments.hasse.tables import after, frequencies
from experiments.hasse.writing import agreement, decoded, real
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, Plan, choosing_loss, swept


def setup(config: Training) -> Setup:
    """A run for each arm: every rate with the first seed, then the best rate with the others; or what is run again."""
    if config.length % (2 * max(config.blocks)):
        raise ValueError(f"rows of {config.length} tokens are not a multiple of twice {max(config.blocks)} tokens")
    material = Material.of(config)
    text, mask_token, read_words = material.text, material.mask_token, material.words

    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        arm = config.arms[job.arm]
        one = Fitting(arm, config, material, cast(int, job.seed))
        counted = _counted(one.own, arm, config)

        @torch.no_grad()
        def held(now: nn.Module, tokens: Tensor) -> float:
            terms: list[Tensor] = []
            for some in tokens.split(EVALUATED):
                made = one.batch(one.own, some)
                labels = made.pop("labels")
                each = af.tasks.loss(now(**made, use_cache=False), labels, reduction="none")
                terms.append(each[:, counted, 0])
            return float(torch.cat(terms).mean())

        def measure(now: nn.Module, step: int) -> dict[str, object]:
            more = {"choosing": held(now, text.choosing)} if step == config.steps else {}
            return {"held_out": held(now, text.results), **more}

        course = one.train(job, folder, measure, progress)
        said: dict[str, object] = {"log": course.log, "measured": course.measured, "seconds": course.seconds}
        if arm.decodes and arm.layers == config.layers[-1]:
            rows = text.results[:: max(1, len(text.results) // config.written)][: config.written]
            said["written"] = decoded(one.model, arm, rows, mask_token, text.tokenizer, read_words)
            if arm.family == "blocks":
                said["agreement"] = agreement(one.model, arm, rows[:4], mask_token)
        return said

    return Setup(
        _plan(config),
        run,
        {
            "vocabulary": material.vocabulary,
            "training_rows": material.rows,
            "costs": _costs(config, material),
            "tables": _tables(material, config),
            "real_words": _real(material, config),
        },
    )


def _plan(config: Training) -> Plan:
    if not config.rerun:
        return swept(list(config.arms), config.rates, config.seeds, choosing_loss, choosing=1, widen=False)
    jobs = [
        Job(arm, rate, seed)
        for group in config.rerun
        for seed in config.seeds
        for arm, rates in group.items()
        for rate in rates
    ]
    return Plan(tuple(jobs))


def _counted(of: TaskOf, arm: Arm, config: Training) -> Tensor:
    """Positions whose labels count: of tokens that all arms predict, or of what is repeated."""
    task = of(list(range(config.length)))
    place, index = (torch.from_numpy(task.targets.table[name]) for name in ("position", "data_index"))
    return place[index >= (config.length // 2 if arm.repeated else max(config.blocks))]


def _costs(config: Training, material: Material) -> Mapping[str, object]:
    row, costs = list(range(config.length)), dict[str, object]()
    for name in config.planned:
        arm = config.arms[name]
        task, sizes = arm.task(material.mask_token)(row), material.sizes(config, arm)
        af.tasks.check(task).raise_if_leaks()
        causal = replace(arm, family="causal", depth=None, warm=False).task(material.mask_token)(row)
        before = {"flops_before": cost(causal, sizes).flops} if arm.warm else {}
        costs[name] = {**asdict(cost(task, sizes)), **before}
    return costs


def _tables(material: Material, config: Training) -> Mapping[str, object]:
    """Held-out nats per token by frequencies, and by the last token read, for each block mean over its places."""
    training, held, vocabulary = material.read, material.text.results, material.vocabulary
    by_distance = [after(training, held, distance, vocabulary) for distance in range(1, max(config.blocks) + 1)]
    blocks = {str(block): sum(by_distance[:block]) / block for block in config.blocks}
    return {"frequencies": frequencies(training, held, vocabulary), "by_block": blocks}


def _real(material: Material, config: Training) -> float:
    """Share of real words of the held-out text itself, in the parts that are written anew."""
    text = material.text
    halves = text.tokenizer.batch_decode(text.results[:, config.length // 2 :].tolist())
    return real([str(one) for one in halves], material.words)
