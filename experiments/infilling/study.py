"""The study: one run of an arm, and what belongs to all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import attnflow as af
from attnflow._core.progress import Progress
from experiments.hasse.arms import cost
from experiments.hasse.fitting import EVALUATED, Fitting, Material
from experiments.infilling.filling import Gaps, agreement, filled, nats, quality, readings
from experiments.infilling.settings import Infilling
from experiments.infilling.tables import between
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, choosing_loss, swept


def setup(config: Infilling) -> Setup:
    """A run for each arm: every rate with the first seed, then the best rate with the others."""
    if config.length % config.block or config.length < 3 * config.block:
        raise ValueError(f"rows must be at least 3 times {config.block} tokens, and a multiple; got {config.length}")
    if len(config.blocks) != 1 or len(config.layers) != 1:
        raise ValueError(f"expected one length of gaps and one of models, got {config.blocks} and {config.layers}")
    material = Material.of(config)
    text = material.text
    gaps = Gaps(config.length, config.firsts, config.block, material.mask_token)

    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        arm = config.arms[job.arm]
        one = Fitting(arm, config, material, cast(int, job.seed))
        ways = {name: way for name, way in config.ways.items() if way.arm == job.arm}
        causal = one.own if arm.family == "causal" else None
        passes = {name: readings(gaps, causal, way.per_pass, config.masks) for name, way in ways.items()}

        def held(now: Any, rows: Tensor, way: str) -> list[float]:
            each = [nats(now, one.batch, passes[way], some) for some in rows.split(EVALUATED)]
            return torch.cat(each).tolist()

        def measure(now: Any, step: int) -> dict[str, object]:
            found: dict[str, object] = {"held_out": {way: held(now, text.results, way) for way in ways}}
            if step == config.steps:  # the last way is the one that the model was trained for
                found["choosing"] = torch.tensor(held(now, text.choosing, list(ways)[-1])).mean().item()
            return found

        course = one.train(job, folder, measure, progress)
        said: dict[str, object] = {"log": course.log, "measured": course.measured, "seconds": course.seconds}
        said["ways"] = {name: _filled(one.model, way.per_pass) for name, way in ways.items()}
        return said

    def _filled(model: Any, per_pass: int | None) -> Mapping[str, object]:
        tokens, passes, seconds = filled(model, gaps, text.results, per_pass)
        agreed = {} if per_pass is None else agreement(model, gaps, text.results[: config.agreed], per_pass)
        middle = len(gaps.firsts) // 2
        return {
            **quality(gaps, text.results, tokens, text.tokenizer, material.words),
            "passes": passes,
            "seconds": seconds,
            "letters": tokens.numel(),
            "agreement": agreed,
            "sample": [str(text.tokenizer.decode(one)) for one in tokens[:, middle].tolist()[:8]],
        }

    return Setup(
        swept(list(config.arms), config.rates, config.seeds, choosing_loss, choosing=1, widen=False),
        run,
        {
            "vocabulary": material.vocabulary,
            "training_rows": material.rows,
            "costs": _costs(config, material),
            **_bars(gaps, material),
        },
    )


def _costs(config: Infilling, material: Material) -> Mapping[str, object]:
    """Of a row, by arm; of one drawn anew each time, of one such."""
    costs: dict[str, object] = {}
    for name, arm in config.arms.items():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            task = arm.task(material.mask_token)(list(range(config.length)))
        af.tasks.check(task).raise_if_leaks()
        costs[name] = asdict(cost(task, material.sizes(config, arm)))
    return costs


def _bars(gaps: Gaps, material: Material) -> Mapping[str, object]:
    """What the table of neighbours says, and the text itself with nothing written anew."""
    text, middle = material.text, len(gaps.firsts) // 2
    tokens, losses = between(gaps, material.read, text.results, material.vocabulary)
    truth = torch.stack([text.results[:, first : first + gaps.block] for first in gaps.firsts], dim=1)
    of_text = quality(gaps, text.results, truth, text.tokenizer, material.words)
    first, last = gaps.firsts[middle], gaps.firsts[middle] + gaps.block
    parts = (text.results[:8, :first], text.results[:8, first:last], text.results[:8, last:])
    left, gap, right = ([str(one) for one in text.tokenizer.batch_decode(part.tolist())] for part in parts)
    return {
        "table": {**quality(gaps, text.results, tokens, text.tokenizer, material.words), "held_out": losses},
        "real_words": of_text["real_words"],
        "samples": {"left": left, "right": right, "truth": gap},
    }
