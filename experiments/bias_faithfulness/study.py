"""The settings of the study, and one run of it: a model is trained, then keys are hidden and its bias is clipped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, cast

import torch
from torch import nn

from attnflow._core.progress import Progress
from attnflow.bias.kind import layer_biases
from experiments.bias_comparison import probes
from experiments.bias_comparison.arms import arm_of, fitted
from experiments.bias_comparison.data import Rows, texts_of
from experiments.bias_comparison.losses import losses_of, optimiser_of, pieces, scores, text_losses
from experiments.bias_comparison.maps import OPERANDS
from experiments.bias_comparison.probes import PROBES, Sequences
from experiments.bias_comparison.settings import Comparison, Part, llama
from experiments.bias_comparison.starts import begin, schedule_of
from experiments.bias_comparison.study import split_name
from experiments.bias_faithfulness.changed import Change, changed, hide, keep
from experiments.bias_faithfulness.faithful import Prompts, explained
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, repeated
from experiments.runner.training import Loop, train

DISTRACTORS: Final = 4
SIGNS: Final = {"as trained": None, "negative": -1, "positive": 1, "none": 0}  # of the bias, what is kept
_HELD: Final = 2**42  # seed of a probe's data that no step of training has


def _tasks() -> tuple[Part, ...]:
    small = Part("sums", "probe", ("guidance", "alibi"), llama(32, 2, 2, 16, 64), rates=(1e-2,), steps=350)
    return (
        small,
        replace(small, name="recall", arms=("guidance",), rates=(3e-3,), steps=500),
        Part(
            "text",
            "text",
            ("guidance",),
            llama(64, 4, 4, 16, 176),
            rates=(3e-3,),
            steps=600,
            batch_size=8,
            hidden_dim=64,
        ),
    )


@dataclass(frozen=True)
class Faithfulness:
    """What is trained and measured. The defaults are the scale "tiny"."""

    # tasks, rates and data, as bias_comparison has them
    training: Comparison = field(default_factory=lambda: Comparison(_tasks(), held_out=64))
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    prompts: int = 32  # sequences that are explained


def setup(config: Faithfulness) -> Setup:
    training = config.training
    parts = {part.name: part for part in training.parts}
    texts = texts_of(training) if "text" in parts else None

    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        name, kind = split_name(job.arm, parts)
        part, seed = parts[name], cast(int, job.seed)
        rows = texts.old if texts is not None and part.kind == "text" else None
        model = begin(training, part, kind, seed, folder, progress, texts).model
        arm = arm_of(model, kind, part.hidden_dim, part.layers)
        with fitted(model, arm, seed, "all", "reference") as trained:
            loop = Loop(part.steps, part.rates[0], schedule_of(part.steps), save_every=training.save_every)
            identity = {"part": part.name, "arm": arm.to_dict(), "rate": part.rates[0], "steps": part.steps}
            course = train(
                trained, optimiser_of(trained), losses_of(part, rows, seed), loop, folder, seed=seed,
                identity=identity, progress=progress,
            )  # fmt: skip
            trained.eval()
            with torch.no_grad():
                return {"seconds": course.seconds, **measured(trained, config, part, kind, rows)}

    arms = [f"{part.name} {arm}" for part in training.parts for arm in part.arms]
    return Setup(repeated(arms, config.seeds), run)


def measured(model: nn.Module, config: Faithfulness, part: Part, arm: str, rows: Rows | None) -> dict[str, object]:
    """Of guidance the faithfulness and what is left of it by sign; of ALiBi what it does without an operand."""
    if arm == "alibi":
        return {"operands": _operands(model, PROBES["sums"](config.training.tested, _chance()))}
    drawn = rows.test[: config.prompts] if rows else PROBES[part.name](config.prompts, _chance()).tokens
    found: dict[str, object] = {
        "explained": explained(model, Prompts(drawn[:, :-1], drawn[:, -1])),
        "clipped": {name: _loss(model, config, part, rows, sign) for name, sign in SIGNS.items()},
    }
    if part.name == "recall":
        others = probes.recall(config.training.tested, _chance(), distractors=DISTRACTORS)
        found["distracted"] = {name: _scored(model, others, sign) for name, sign in SIGNS.items()}
    return found


def _loss(model: nn.Module, config: Faithfulness, part: Part, rows: Rows | None, sign: int | None) -> dict[str, float]:
    if rows is None:
        return _scored(model, PROBES[part.name](config.training.tested, _chance()), sign)
    with changed(model, _kept(sign)):
        parts = [text_losses(model, part, rows, some, _chance()) for some in rows.test.split(pieces(rows.test))]
    return {"loss": float(torch.cat(parts).mean())}


def _scored(model: nn.Module, drawn: Sequences, sign: int | None) -> dict[str, float]:
    with changed(model, _kept(sign)):
        return scores(model, drawn)


def _kept(sign: int | None) -> Change:
    return hide({}) if sign is None else keep(sign)


def _operands(model: nn.Module, drawn: Sequences) -> dict[str, dict[str, float]]:
    """Loss and right answers where "=" or all later tokens cannot attend to an operand, at both its places."""
    size, last = drawn.tokens.shape[1], drawn.tokens.shape[1] - 2  # "="
    answer = drawn.labels.clone()
    answer[:, :-1] = probes.IGNORED
    found: dict[str, dict[str, float]] = {}
    for name, places in {"none": (), "first": OPERANDS[::2], "second": OPERANDS[1::2]}.items():
        for whom in ("=", "all"):
            hidden = torch.zeros(1, size, size, dtype=torch.bool)
            for place in places:
                hidden[:, last if whom == "=" else place + 1 :, place] = True
            some = Sequences(drawn.tokens, answer)
            layers = [bias.shape.index for _, bias in layer_biases(model)]
            with changed(model, hide(dict.fromkeys(layers, hidden))):
                found[f"{name}, from {whom}"] = scores(model, some)
    return found


def _chance() -> torch.Generator:
    return torch.Generator().manual_seed(_HELD)


def tiny() -> Faithfulness:
    """One CPU core; the README says how long."""
    return Faithfulness()


def miniature(config: Faithfulness) -> Faithfulness:
    """Two steps of two sequences, two seeds."""
    parts = tuple(replace(part, steps=2, batch_size=2) for part in config.training.parts)
    short = replace(config.training, parts=parts, tokenizer=300, held_out=4, length=16, tested=8, save_every=1)
    return replace(config, training=short, seeds=config.seeds[:2], prompts=2)
