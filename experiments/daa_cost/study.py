"""The settings of the measurement, and its jobs: what can be counted, and rounds that time every arm once."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

import attnflow as af
from attnflow._core.progress import Progress
from attnflow.bias.config import BiasConfig, Placement
from benchmarks.bench_bias import LLAMA2, SMOLLM2, base_model, decoding_on, training_on
from experiments.daa_cost.operations import counted, passes
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, Plan

BASE: Final = "base"
AGAIN: Final = "base again"  # what a ratio of two equal things looks like on this machine
OPERATIONS: Final = "operations"
PUBLISHED: Final = 2048  # tokens of a row in the paper
SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {"SmolLM2-135M": SMOLLM2, "LLaMA-2-7B": LLAMA2}
PLACEMENTS: Final[Mapping[str, Placement]] = {"every other": "every_other", "every": "every"}


@dataclass(frozen=True)
class Measurement:
    """What is measured. The defaults are the scale "tiny"."""

    # of the model, as in `SHAPES`; weights are random, in float32 on a CPU and bfloat16 on a GPU
    shape: str = "SmolLM2-135M"
    layers: int = 30  # of it, at most
    device: str = "cpu"  # "cpu" or "cuda"
    length: int = 256  # tokens of a row in training
    prompt: int = 256  # tokens that are cached before decoding
    new_tokens: int = 16  # that are decoded
    narrow: int = 0  # width of a head, in place of the shape's; 0: the shape's
    seeds: tuple[int, ...] = tuple(range(8))  # a round for each, in which the order of the arms is drawn by it

    @property
    def sizes(self) -> dict[str, Any]:
        sizes = {**SHAPES[self.shape]}
        sizes["num_hidden_layers"] = min(self.layers, sizes["num_hidden_layers"])
        if self.narrow:
            sizes |= {"hidden_size": self.narrow * sizes["num_attention_heads"], "intermediate_size": 32}
            sizes |= {"vocab_size": 1000}
        return sizes


def tiny() -> Measurement:
    """All layers of SmolLM2-135M on a CPU; seven minutes of a quiet machine with two cores."""
    return Measurement()


def small() -> Measurement:
    """Four layers of LLaMA-2-7B on a GPU, rows of 2,048; a minute a round."""
    return Measurement("LLaMA-2-7B", 4, "cuda", PUBLISHED, PUBLISHED, 128, seeds=tuple(range(20)))


def paper() -> Measurement:
    """All layers of LLaMA-2-7B and a sequence of 2,048 from its first token on, as sec. 5.6.3; 141 GB of a GPU."""
    return Measurement("LLaMA-2-7B", 32, "cuda", PUBLISHED, 1, PUBLISHED - 1, seeds=tuple(range(5)))


def miniature(config: Measurement) -> Measurement:
    """Two layers with narrow heads on a CPU, a few tokens, one round."""
    return replace(
        config, layers=2, device="cpu", length=8, prompt=4, new_tokens=2, narrow=2, seeds=config.seeds[:2]
    )  # fmt: skip


def arms() -> dict[str, BiasConfig | None]:
    """Every kind on every other layer and on every layer, none of them zero; the base twice."""

    def kinds(layers: Placement) -> dict[str, BiasConfig]:
        return {
            "guidance": af.bias.GuidanceConfig(layers=layers, init="kaiming"),
            "key": af.bias.KeyConfig(layers=layers, init="kaiming"),
            "lowrank": af.bias.LowRankConfig(layers=layers, init="kaiming"),
            "relative": af.bias.RelativeConfig(layers=layers, std=0.02),
        }

    found: dict[str, BiasConfig | None] = {BASE: None, AGAIN: None}
    return found | {f"{kind}, {name}": config for name, at in PLACEMENTS.items() for kind, config in kinds(at).items()}


def setup(config: Measurement) -> Setup:
    """A job that counts, and one for each round."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("this scale needs a GPU, and torch sees none; --scale tiny runs on a CPU")
    model = cache(lambda: base_model(config.sizes, config.device))  # one for all rounds of a process

    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        del folder
        if job.arm == OPERATIONS:
            shapes = {config.shape: config.sizes} if config.narrow else SHAPES
            length = config.length if config.narrow else PUBLISHED
            content = {name: counted(sizes, arms(), length) for name, sizes in shapes.items()}
            return {"shapes": content, "measured": run_passes(model(), config)}
        return timed(model(), config, job.seed or 0, progress)

    return Setup(Plan((Job(OPERATIONS), *(Job("round", seed=seed) for seed in config.seeds))), run)


def run_passes(model: Any, config: Measurement) -> dict[str, int]:
    """Operations of a forward pass of every arm that runs, on a row of the length that is timed."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return {name: _with(model, one, lambda: passes(model, config.length)) for name, one in arms().items()}
    finally:
        model.set_attn_implementation(implementation)


def timed(model: Any, config: Measurement, seed: int, progress: Progress) -> dict[str, object]:
    """One round: every arm trains a step and decodes, once each after a warm-up, in an order drawn by the seed."""
    order = list(arms())
    random.Random(seed).shuffle(order)
    before = os.getloadavg()[0]
    found: dict[str, dict[str, float]] = {}
    for number, name in enumerate(order):
        progress(number, len(order), name)
        found[name] = _with(model, arms()[name], lambda: _timings(model, config))
    return {"order": order, "seconds": found, "load before": before, "threads": torch.get_num_threads()}


def _timings(model: Any, config: Measurement) -> dict[str, float]:
    return {
        "training": _seconds(training_on(model, config.length)),
        "decoding": _seconds(decoding_on(model, config.prompt, config.new_tokens)),
    }


def _seconds(run: Callable[[], object]) -> float:
    """Of the second call; both of them end with a number that is read, so that a GPU is waited for."""
    run()
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def _with(model: Any, config: BiasConfig | None, measure: Callable[[], Any]) -> Any:
    attached = (
        nullcontext()
        if config is None
        else af.bias.attach(model, config)
    )  # fmt: skip
    with attached:
        return measure()
