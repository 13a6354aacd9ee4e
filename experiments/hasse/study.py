"""The settings of the study, and one run of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

import attnflow as af
from attnflow._core.progress import Progress
from attnflow.bias.packing import Drawn
from attnflow.tasks import Collator
from experiments.hasse.arms import Arm, TaskOf, arms, build, cost
from experiments.hasse.tables import after, frequencies
from experiments.hasse.writing import agreement, decoded, real, words
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, Record, swept
from experiments.runner.text import Text, load_text
from experiments.runner.training import Loop, decayed, train

_EVALUATED = 16  # rows of a pass
_READ = 50_000  # training rows that words and tables are counted in


@dataclass(frozen=True)
class Training:
    """What is trained. The defaults are the scale "tiny".

    Attributes:
        text: "shakespeare", or a data set of the hub, which is streamed.
        tokenizer: how many word pieces are learned from Shakespeare (259: the bytes), or the name of one of the hub.
        rows: of a data set, for training; those of Shakespeare are what they are.
        held_out: rows for the results.
        written: held-out rows whose second half is written anew.
        length: tokens of a row, a multiple of twice the largest block.
        sizes: width and inner (feed-forward) of the models.
        layers: of the models; the last number is that of the main arms.
        blocks: tokens predicted at once.
        depths: of sparse causal masks.
        repeats: depths of sparse causal masks that learn rows whose second half is the first.
        seeds: of initialisation and data.
        rates: learning rates; with several, the first seed chooses for each arm.
        steps: of the optimiser; "warm" arms are causal for the first half of them.
        warmup: steps; the rate is constant afterwards, so that every point of a curve is the end of a shorter run.
        batch_size: rows of a forward pass.
        parts: forward passes of a step.
        decay: of matrices.
        measure_every: steps.
        save_every: steps.
        masks: how they travel: "dense" for SDPA, or "intervals" for FlexAttention (SDPA on a CPU).
    """

    text: str = "shakespeare"
    tokenizer: int | str = 259
    rows: int = 0
    held_out: int = 64
    written: int = 32
    length: int = 64
    sizes: Mapping[str, int] = field(default_factory=lambda: {"width": 64, "inner": 172})
    layers: tuple[int, ...] = (2, 4)
    blocks: tuple[int, ...] = (1, 2, 4, 8)
    depths: tuple[int, ...] = (2, 4, 8, 16, 62)
    repeats: tuple[int, ...] = (2, 4, 16)
    seeds: tuple[int, ...] = (0, 1, 2)
    rates: tuple[float, ...] = (1.5e-3, 3e-3)
    steps: int = 800
    warmup: int = 50
    batch_size: int = 8
    parts: int = 1
    decay: float = 0.01
    measure_every: int = 50
    save_every: int = 200
    masks: Literal["dense", "intervals"] = "dense"

    @property
    def arms(self) -> dict[str, Arm]:
        """By name."""
        return arms(self.layers, self.blocks, self.depths, self.repeats)


def tiny() -> Training:
    """One CPU core; the README says how long."""
    return Training()


def small() -> Training:
    """One GPU: bytes of Shakespeare's works in rows of 256, 8 layers of width 256."""
    return Training(
        held_out=256,
        written=128,
        length=256,
        sizes={"width": 256, "inner": 688},
        layers=(4, 8),
        depths=(2, 4, 8, 16, 64),
        repeats=(2, 8, 64),
        rates=(1e-3, 2e-3),
        steps=500,
        batch_size=64,
        save_every=250,
    )


def paper() -> Training:
    """FineWeb-Edu, 2.6 billion tokens, 12 layers of width 768: the paper trains nothing, this is the field's size."""
    return Training(
        text="HuggingFaceFW/fineweb-edu:sample-10BT:train",
        tokenizer="HuggingFaceTB/SmolLM2-135M",
        rows=2_560_000,
        held_out=1024,
        written=256,
        length=1024,
        sizes={"width": 768, "inner": 2048},
        layers=(4, 12),
        depths=(4, 8, 12, 24, 128),
        repeats=(2, 12, 128),
        seeds=(0, 1, 2, 3, 4),
        rates=(6e-4,),
        steps=10_000,
        warmup=500,
        batch_size=16,
        parts=16,
        decay=0.1,
        measure_every=250,
        save_every=250,
        masks="intervals",
    )


def setup(config: Training) -> Setup:
    """A run for each arm: every rate with the first seed, then the best rate with the others.

    Raises:
        ValueError: rows that blocks do not divide, or a mask that lets a label leak.
    """
    if config.length % (2 * max(config.blocks)):
        raise ValueError(f"rows of {config.length} tokens are not a multiple of twice {max(config.blocks)} tokens")
    text = load_text(config.text, config.tokenizer, config.length, config.rows, config.held_out)
    mask_token = text.tokenizer.mask_token_id
    vocabulary = len(text.tokenizer) + (mask_token is None)
    mask_token = vocabulary - 1 if mask_token is None else mask_token
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vocabulary_of_words = _vocabulary(text)

    def sizes(arm: Arm) -> dict[str, int]:
        return {**config.sizes, "layers": arm.layers, "vocabulary": vocabulary}

    def run(job: Job, folder: Any, progress: Progress) -> Mapping[str, object]:
        arm, seed = config.arms[job.arm], cast(int, job.seed)
        model: Any = build(sizes(arm), config.length, seed).to(device)
        flex: Any = nullcontext()
        if config.masks == "intervals":
            flex = af.masks.attach(model, "batch", backend="flex_attention", flex_on_cpu="sdpa")
        drawn = Drawn(text.rows, config.steps * config.parts * config.batch_size, seed)
        own, first = arm.task(mask_token), Arm("causal", arm.layers).task(mask_token)
        batches = {of: Collator(of, by_length=True, masks=config.masks) for of in (own, first)}

        def batch(of: TaskOf, tokens: Tensor) -> dict[str, Tensor]:
            if arm.repeated:
                half = tokens[:, : config.length // 2]
                tokens = torch.cat([half, half], dim=1)
            return {name: value.to(device) for name, value in batches[of](list(tokens)).items()}

        def losses(now: nn.Module, step: int, part: int) -> dict[str, Tensor]:
            start = (step * config.parts + part) * config.batch_size
            tokens = torch.stack([drawn[start + i]["input_ids"] for i in range(config.batch_size)])
            made = batch(first if arm.warm and step < config.steps // 2 else own, tokens)
            labels = made.pop("labels")
            return {"loss": af.tasks.loss(now(**made, use_cache=False), labels)}

        counted = _counted(own, arm, config)

        @torch.no_grad()
        def held(now: nn.Module, tokens: Tensor) -> float:
            terms: list[Tensor] = []
            for some in tokens.split(_EVALUATED):
                made = batch(own, some)
                labels = made.pop("labels")
                each = af.tasks.loss(now(**made, use_cache=False), labels, reduction="none")
                terms.append(each[:, counted, 0])
            return float(torch.cat(terms).mean())

        def measure(now: nn.Module, step: int) -> dict[str, object]:
            more = {"choosing": held(now, text.choosing)} if step == config.steps else {}
            return {"held_out": held(now, text.results), **more}

        loop = Loop(
            config.steps,
            cast(float, job.rate),
            lambda step: min(1.0, (step + 1) / config.warmup),
            parts=config.parts,
            log_every=config.measure_every,
            measure_every=config.measure_every,
            save_every=config.save_every,
        )
        optimiser = torch.optim.AdamW(decayed(model, config.decay), betas=(0.9, 0.99))
        identity = {"arm": job.arm, "rate": job.rate, "steps": config.steps, "sizes": sizes(arm)}
        with flex:  # decoders run models under SDPA
            course = train(
                model, optimiser, losses, loop, folder, seed=seed, identity=identity, measure=measure, progress=progress
            )
        said: dict[str, object] = {"log": course.log, "measured": course.measured, "seconds": course.seconds}
        if arm.decodes and arm.layers == config.layers[-1]:
            rows = text.results[:: max(1, len(text.results) // config.written)][: config.written]
            said["written"] = decoded(model, arm, rows, mask_token, text.tokenizer, vocabulary_of_words)
            if arm.family == "blocks":
                said["agreement"] = agreement(model, arm, rows[:4], mask_token)
        return said

    return Setup(
        swept(list(config.arms), config.rates, config.seeds, choosing_loss),
        run,
        {
            "vocabulary": vocabulary,
            "training_rows": len(cast(Any, text.rows)),
            "costs": _costs(config, mask_token, sizes),
            "tables": _tables(text, config, vocabulary),
            "real_words": _real(text, config, vocabulary_of_words),
        },
    )


def choosing_loss(run: Record) -> float:
    """By which the learning rate of an arm is chosen, on rows that are not those of the results."""
    return run["measured"][-1]["choosing"]


def _counted(of: TaskOf, arm: Arm, config: Training) -> Tensor:
    """Positions whose labels count: of tokens that all arms predict, or of what is repeated."""
    task = of(list(range(config.length)))
    place, index = (torch.from_numpy(task.targets.column(name)) for name in ("position", "data_index"))
    return place[index >= (config.length // 2 if arm.repeated else max(config.blocks))]


def _costs(config: Training, mask_token: int, sizes: Callable[[Arm], Mapping[str, int]]) -> Mapping[str, object]:
    """Of a row, by arm.

    Raises:
        LeakFound: a label can be read by the position that is to predict it.
    """
    row, costs = list(range(config.length)), dict[str, object]()
    for name, arm in config.arms.items():
        task = arm.task(mask_token)(row)
        af.tasks.check(task).raise_if_leaks()
        causal = replace(arm, family="causal", depth=None, warm=False).task(mask_token)(row)
        before = {"flops_before": cost(causal, sizes(arm)).flops} if arm.warm else {}
        costs[name] = {**asdict(cost(task, sizes(arm))), **before}
    return costs


def _tables(text: Text, config: Training, vocabulary: int) -> Mapping[str, object]:
    """Held-out nats per token by frequencies, and by the last token read, for each block mean over its places."""
    training, held = _training(text), text.results
    by_distance = [after(training, held, distance, vocabulary) for distance in range(1, max(config.blocks) + 1)]
    blocks = {str(block): sum(by_distance[:block]) / block for block in config.blocks}
    return {"frequencies": frequencies(training, held, vocabulary), "by_block": blocks}


def _training(text: Text) -> Tensor:
    rows = cast(Any, text.rows)
    return rows[list(range(min(_READ, len(rows))))]["input_ids"]


def _vocabulary(text: Text) -> frozenset[str]:
    return frozenset(words([str(one) for one in text.tokenizer.batch_decode(_training(text).tolist())]))


def _real(text: Text, config: Training, vocabulary: frozenset[str]) -> float:
    """Share of real words of the held-out text itself, in the parts that are written anew."""
    halves = text.tokenizer.batch_decode(text.results[:, config.length // 2 :].tolist())
    return real([str(one) for one in halves], vocabulary)
