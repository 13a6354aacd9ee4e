"""The unchanged benchmarks, for the scales with a GPU: an arm is trained, then measured benchmark by benchmark."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from attnflow._core.progress import Progress
from attnflow.bias import AlibiConfig, GuidanceConfig, attach
from attnflow.bias.kind import layer_biases
from attnflow.models import load_model
from experiments.evaluation.benchmarks import PROMPTINGS, Benchmark
from experiments.evaluation.command import finished, maker, plain
from experiments.evaluation.measure import Score, measure
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, Plan, repeated
from experiments.runner.packing import Drawn
from experiments.runner.processes import launched
from experiments.runner.saved import newest_of, restore_weights
from experiments.runner.text import DATA, split_text, stream_rows
from experiments.runner.training import Loop, cosine, decayed, train

PROMPTED: Final = tuple(
    f"gsm8k {prompting}" for prompting in PROMPTINGS[1:]
)  # asked of the base alone, as the paper does
UNTRAINED: Final = ("base", "alibi")


@dataclass(frozen=True)
class Evaluation:
    """What is trained and measured; `small` and `paper` say how much."""

    model: str = "smollm2-135m"  # as `af.load_model` takes it
    dtype: str = "bfloat16"  # of what is generated; likelihoods are in float32
    # base; alibi: ALiBi in place of RoPE in every layer, nothing trained; continued: all weights trained; alibi
    # continued: the same with ALiBi; guidance: only the guidance network trained; guidance continued: all weights and
    # the network, as the paper does
    arms: tuple[str, ...] = ("base", "guidance", "alibi", "alibi continued")
    text: str = "shakespeare"  # "shakespeare", or a data set of the hub, which is streamed
    rows: int = 0  # of a data set, for training; those of Shakespeare are what they are
    length: int = 256  # tokens of a row
    steps: int = 64  # of the optimiser
    warmup: int = 8  # steps; the rate then falls by a cosine
    batch_size: int = 1  # rows of a forward pass
    parts: int = 1  # forward passes of a step
    # peak learning rate where the guidance network alone is trained, and where all weights are
    rates: tuple[float, float] = (5e-3, 5e-5)
    hidden_dim: int = 64  # of the guidance network, in every other layer
    save_every: int = 16  # steps
    seeds: tuple[int, ...] = (0,)  # of the network and of the order of rows; the untrained arms have the first alone
    # benchmark -> how many of its items, at equal distances; 0: all. What is not named is not run.
    items: Mapping[str, int] = field(
        default_factory=lambda: {
            "perplexity": 24,
            "hellaswag": 0,
            "humaneval": 20,
            "gsm8k zero-shot": 25,
            "gsm8k five-shot": 25,
            "gsm8k chain of thought": 25,
            "gsm8k self-consistency": 5,
            "quality": 0,
        }
    )
    # benchmark -> data set of the hub, in place of what a package ships
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    tokens: int | None = 128  # that a generated answer has at most; None: those of the benchmark, 192 or 256
    batch: int = 25  # prompts that are continued at a time


def small() -> Evaluation:
    """One GPU: the same model and texts, every item that packages ship, three seeds."""
    return Evaluation(
        arms=("base", "alibi", "continued", "alibi continued", "guidance", "guidance continued"),
        length=1024,
        steps=500,
        warmup=50,
        batch_size=8,
        seeds=(0, 1, 2),
        save_every=100,
        items=dict.fromkeys(Evaluation().items, 0) | {"perplexity": 64},
        tokens=None,
        batch=64,
    )


def paper() -> Evaluation:
    """Table 2: LLaMA-2-7B, 50,000 steps of 1,024 rows of 2,048 tokens; the learning rate is ours, the text has none."""
    return Evaluation(
        model="meta-llama/Llama-2-7b-hf",
        arms=("base", "continued", "alibi continued", "guidance continued"),
        text="togethercomputer/RedPajama-Data-1T:default:train",
        rows=51_200_000,
        length=2048,
        steps=50_000,
        warmup=1000,
        batch_size=4,
        parts=256,
        rates=(3e-4, 2e-5),
        save_every=500,
        seeds=(0, 1, 2),
        items=dict.fromkeys(Evaluation().items, 0) | {"perplexity": 1000},
        sources={
            "perplexity": "allenai/c4:en:validation",
            "gsm8k": "openai/gsm8k:main:test",
            "quality": "tasksource/QuALITY::validation",
        },
        tokens=None,
        batch=64,
    )


def setup(config: Evaluation) -> Setup:
    unknown = [
        arm for arm in config.arms if arm.removesuffix(" continued") not in ("base", "alibi", "guidance", "continued")
    ]
    if unknown:
        raise ValueError(f"no such arms: {', '.join(unknown)}")
    launch = launched()
    model, tokenizer = load_model(config.model, dtype=config.dtype, device=launch.home)
    made = {
        name: maker(name, tokenizer, count or None, dict(config.sources), config.tokens)
        for name, count in config.items.items()
    }

    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        seed = cast(int, job.seed)

        def scores() -> dict[str, object]:
            cast(Any, model).to(launch.device)
            names = [name for name in made if job.arm == "base" or name not in PROMPTED]
            measured: dict[str, object] = {}
            for number, name in enumerate(names):
                progress(number, len(names), name)
                measured[name] = _score(model, tokenizer, made[name], config, folder)
            return measured

        def restored() -> dict[str, object]:
            with arm(model, job.arm, config, seed):
                if job.arm not in UNTRAINED:
                    restore_weights(model, newest_of(folder / "training"))
                return scores()

        if not launch.sharded:
            with arm(model, job.arm, config, seed):
                course = _train(model, tokenizer, job, config, folder, progress)
                return {"scores": launch.once(scores), "training": course}
        course = list[dict[str, float]]()
        if job.arm not in UNTRAINED:  # in a model of its own: one that was sharded does not become whole again
            apart, _ = load_model(config.model, dtype=config.dtype, device=launch.home)
            with arm(apart, job.arm, config, seed):
                course = _train(apart, tokenizer, job, config, folder, progress)
            del apart
        return {"scores": launch.once(restored), "training": course}

    first = config.seeds[:1]
    once = repeated([name for name in config.arms if name in UNTRAINED], first)
    every = repeated([name for name in config.arms if name not in UNTRAINED], config.seeds)
    order = {name: number for number, name in enumerate(config.arms)}
    jobs = sorted((*once.first, *every.first), key=lambda job: (cast(int, job.seed), order[job.arm]))
    about = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "items": {name: [len(one.items), one.total, one.not_run] for name, one in made.items()},
    }
    return Setup(Plan(tuple(jobs)), run, about)


@contextmanager
def arm(model: Any, name: str, config: Evaluation, seed: int) -> Generator[list[nn.Parameter]]:
    """The model of an arm, with its trained parameters in float32; afterwards it is unchanged.

    Yields:
        The parameters that are trained.
    """
    saved = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    own = list(model.parameters())
    torch.manual_seed(seed)
    handle = None
    if name.startswith("alibi"):
        handle = attach(model, AlibiConfig())
    elif name.startswith("guidance"):
        handle = attach(model, GuidanceConfig(hidden_dim=config.hidden_dim))
    trains_all = name.endswith("continued")
    try:
        for parameter in own:
            parameter.requires_grad_(trains_all)
            if trains_all:  # bfloat16 would lose every update below 0.4 % of a weight; a copy, as the weights come back
                parameter.data = parameter.data.to(torch.float32, copy=True)
        new = [] if handle is None else handle.parameters()
        for parameter in new:
            parameter.data = parameter.data.float()
        yield [*new, *(own if trains_all else ())]
    finally:
        if handle is not None:
            handle.remove()
        for tensor, data in saved:
            tensor.data = data
        for parameter, flag in zip(own, flags, strict=True):
            parameter.requires_grad_(flag)


def _train(
    model: Any,
    tokenizer: Any,
    job: Job,
    config: Evaluation,
    folder: Path,
    progress: Progress,
) -> list[dict[str, float]]:
    """The log of the losses; empty where nothing is trained. The model is left with its last weights."""
    if job.arm in UNTRAINED:
        return []
    seed = cast(int, job.seed)
    if config.text == "shakespeare":
        rows: Any = split_text(tokenizer, config.length, 1).training
    else:
        rows = stream_rows(config.text, tokenizer, config.length, config.rows, DATA)
    drawn = Drawn(rows, config.steps * config.parts * config.batch_size, seed)

    def losses(now: nn.Module, step: int, part: int) -> dict[str, Tensor]:
        first = (step * config.parts + part) * config.batch_size
        ids = torch.stack([drawn[first + number]["input_ids"] for number in range(config.batch_size)])
        ids = ids.to(next(now.parameters()).device)
        return {"loss": cast(Any, now)(input_ids=ids, labels=ids, use_cache=False).loss}

    loop = Loop(
        config.steps,
        config.rates[0] if job.arm == "guidance" else config.rates[1],
        cosine(config.steps, config.warmup),
        parts=config.parts,
        log_every=max(1, config.steps // 8),
        save_every=config.save_every,
    )
    optimiser = torch.optim.AdamW(decayed(model, 0.0), betas=(0.9, 0.95))
    identity = {
        "arm": job.arm,
        **{k: v for k, v in asdict(config).items() if k not in ("items", "arms", "seeds", "batch")},
    }
    course = train(model, optimiser, losses, loop, folder / "training", seed=seed, identity=identity, progress=progress)
    return course.log


def _score(model: Any, tokenizer: Any, benchmark: Benchmark, config: Evaluation, folder: Path) -> dict[str, object]:
    """What a file of the job's folder holds, or what is measured now."""
    path = folder / "scores" / f"{benchmark.name.replace(' ', '-')}.json"

    def run() -> Score:
        with _written_in(model, config.dtype if benchmark.kind == "generate_until" else None):
            cache = folder / "answers" / benchmark.name.replace(" ", "-")
            return measure(model, tokenizer, benchmark, batch_size=config.batch, cache=cache)

    return plain(finished(benchmark, path, run))


@contextmanager
def _written_in(model: Any, dtype: str | None) -> Generator[None]:
    """The weights of the model in a dtype, those of a bias in their own."""
    new = {id(parameter) for _, bias in layer_biases(model) for parameter in bias.parameters()}
    own = [(parameter, parameter.data) for parameter in model.parameters() if id(parameter) not in new]
    try:
        for parameter, data in own:
            parameter.data = data if dtype is None else data.to(getattr(torch, dtype))
        yield
    finally:
        for parameter, data in own:
            parameter.data = data
