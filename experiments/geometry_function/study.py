"""The settings, and three kinds of jobs: a model's weights, a model on one text, and one training run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import torch
from torch import Tensor, nn

from attnflow._core.progress import Progress
from attnflow.geometry.fold import NotFolded, Pair, folded, norms_of, pass_of
from attnflow.geometry.in_use import KeyTerms, LayerTokens, observe
from attnflow.geometry.scores import full_scores, head_scores
from attnflow.models.subject import Subject
from attnflow.models.weights.attention import AttentionLayer
from attnflow.models.weights.checkpoints import open_weights
from experiments.geometry_in_use.models import UNTRAINED, Reading, needed, read
from experiments.geometry_in_use.study import inner, self_attention
from experiments.geometry_init.model import build, token_losses
from experiments.geometry_init.study import sizes
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, Plan
from experiments.runner.packing import Drawn
from experiments.runner.text import load_text
from experiments.runner.training import Loop, decayed, linear, train

ALL, INNER = "all tokens", "without ends"
BASES: Final = ("stored", "folded", "rotated")
OBJECTIVES: Final = ("masked", "causal")
_FIRST_ROW: Final = 8  # from which attention to the first token is counted


@dataclass(frozen=True)
class Function:
    """What is measured. The defaults are the scale "tiny"."""

    models: tuple[str, ...] = ("SmolLM2", "MiniLM", "AntiBERTy", "Whisper")  # by name
    seeds: tuple[int, ...] = tuple(range(8))  # numbers of the texts that each model reads
    length: int = 256  # tokens of a text of the language models
    rotations: int = 20  # random bases
    random: int = 64  # random heads on the tokens of each layer
    training: tuple[int, ...] = (0, 1, 2, 3, 4)  # seeds of the runs of each objective
    steps: int = 600
    measure_every: int = 100
    rate: float = 2e-3
    batch_size: int = 16
    row: int = 64  # tokens of a row in training
    held_out: int = 16  # rows
    width: int = 128
    layers: int = 4


def slower() -> Function:
    """The training runs alone, at a rate at which encoders learn, on seeds that "tiny" did not have."""
    return Function(models=(), training=(5, 6, 7), rate=5e-4)


def miniature(config: Function) -> Function:
    models = (UNTRAINED,) if config.models else ()
    return replace(
        config, models=models, seeds=config.seeds[:2], length=16, rotations=2, random=4, training=(0, 1), steps=2,
        measure_every=1, batch_size=2, row=16, held_out=2, width=32, layers=2,
    )  # fmt: skip


def setup(config: Function) -> Setup:
    """For each model that is installed a job for its weights and one for each text; and the training runs."""
    missing = {name: [one.requirement for one in needed(name) if one.find() is None] for name in config.models}
    here = [name for name in config.models if not missing[name]]
    count = max(config.seeds) + 1

    @cache
    def reading(name: str) -> Reading:
        return read(name, count, config.length)

    @cache
    def normed(name: str) -> dict[str, Pair | NotFolded]:
        one = reading(name)
        return norms(one.model, self_attention(one.model), one.texts[0])

    @cache
    def text() -> Any:
        return load_text("shakespeare", 2048, config.row, 0, config.held_out)

    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        kind, _, name = job.arm.partition(" ")
        if kind == "train":
            assert job.seed is not None
            return trained(config, name, job.seed, text(), folder, progress)
        one = reading(name)
        if kind == "weights":
            return {"towers": of_weights(self_attention(one.model), normed(name), config.rotations)}
        assert job.seed is not None
        return {"towers": on_text(one, normed(name), one.texts[job.seed], config.random)}

    jobs = [Job(f"weights {name}") for name in here]
    jobs += [Job(f"text {name}", seed=seed) for name in here for seed in config.seeds]
    jobs += [Job(f"train {objective}", seed=seed) for seed in config.training for objective in OBJECTIVES]
    return Setup(Plan(tuple(jobs)), run, {"missing": {name: names for name, names in missing.items() if names}})


def norms(model: nn.Module, layers: Sequence[AttentionLayer], inputs: Any) -> dict[str, Pair | NotFolded]:
    subject = Subject.of(model)
    return norms_of(open_weights(model), layers, pass_of(subject, layers, inputs))


def of_weights(
    layers: Sequence[AttentionLayer], found: Mapping[str, Pair | NotFolded], rotations: int
) -> dict[str, dict[str, Any]]:
    """Tower -> by basis: S and D of each layer's full matrix and of each head; D of heads and layers once per rotation.

    "rotated" is the folded form of tokens in a random orthonormal basis of the stream.
    """
    towers: dict[str, dict[str, Any]] = {}
    draw = torch.Generator().manual_seed(0)
    for layer in layers:
        tower = towers.setdefault(layer.tower, {"layer": [], "not folded": []})
        tower["layer"].append(layer.layer)
        about = found[layer.name]
        if isinstance(about, NotFolded):
            tower["not folded"].append(f"{layer.name}: {about}")
        own = folded(layer, about)
        for basis in BASES:
            pair = folded(layer, None) if basis == "stored" else own
            times = rotations if basis == "rotated" else 1
            every: list[list[list[float]]] = []
            for _ in range(times):
                if basis == "rotated":
                    turn = torch.linalg.qr(torch.randn(own[0].shape[1], own[0].shape[1], generator=draw))[0].to(own[0])
                    pair = own[0] @ turn, own[1] @ turn
                parts = [scored(*pair, layer.num_heads, layer.num_kv_heads) for scored in (full_scores, head_scores)]
                every.append([[*one.symmetry.reshape(-1).tolist(), *one.directionality.reshape(-1).tolist()]
                              for one in parts])  # fmt: skip
            place = tower.setdefault(basis, {"symmetry": [], "directionality": [], "head symmetry": [],
                                             "head directionality": []})  # fmt: skip
            place["symmetry"].append(short(every[0][0][0]))
            place["directionality"].append([short(one[0][1]) for one in every])
            place["head symmetry"] += [short(one) for one in every[0][1][: layer.num_heads]]
            place["head directionality"] += [short(one) for one in every[0][1][layer.num_heads :]]
    return towers


def shares(tokens: LayerTokens) -> dict[str, list[float]]:
    """The share of the key alone in each head's scores within rows: as the model masks them, and by the causal mask."""
    size = len(tokens.positions)
    own, causal = KeyTerms(tokens.allow, size), KeyTerms(torch.ones(size, size).tril().bool(), size)
    return {
        "key share": own.share(*tokens.sides[0]).tolist(),
        "form key share": own.share(*tokens.sides[1]).tolist(),
        "causal key share": causal.share(*tokens.sides[0]).tolist(),
    }


def chance(layer: AttentionLayer, about: Pair | NotFolded, tokens: LayerTokens, heads: int) -> list[float]:
    """[of independent noise, of random weights on the same tokens, by the formula |mean|^2 / mean |x|^2]."""
    key_terms = KeyTerms(tokens.allow, len(tokens.positions))
    gain = None if isinstance(about, NotFolded) or about[0].before is None else about[0].before.gain.reshape(-1)
    stream = tokens.query_input.double() if gain is None else (tokens.query_input / gain).double()
    draw = torch.Generator().manual_seed(layer.layer)
    width = stream.shape[1]
    query, key = (
        stream @ torch.randn(heads, width, layer.head_dim, generator=draw, dtype=torch.float64) for _ in range(2)
    )
    formula = float(stream.mean(0).square().sum() / stream.square().sum(1).mean())
    return [short(one) for one in (key_terms.chance, float(key_terms.share(query, key).mean()), formula)]


def sinks(tokens: LayerTokens) -> list[float]:
    """Attention to the first token, the mean over later queries, of each head."""
    query, key = (side.double() for side in tokens.sides[0])
    score = query @ key.mT
    if tokens.allow is not None:
        score = score.masked_fill(~tokens.allow, -torch.inf)
    return [short(one) for one in score.softmax(-1)[:, _FIRST_ROW:, 0].mean(1).tolist()]


def on_text(
    reading: Reading, found: Mapping[str, Pair | NotFolded], inputs: Mapping[str, Tensor], heads: int
) -> dict[str, dict[str, Any]]:
    layers = self_attention(reading.model)
    towers: dict[str, dict[str, Any]] = {}

    def see(layer: AttentionLayer, seen: LayerTokens) -> None:
        seen = inner(seen, 0, reading.pads.get(layer.tower, 0))
        tower = towers.setdefault(layer.tower, {"tokens": len(seen.positions), "sink": [], "chance": []})
        tower["sink"] += sinks(seen)
        tower["chance"].append(chance(layer, found[layer.name], seen, heads))
        for which, tokens in ((ALL, seen), (INNER, inner(seen, *reading.ends[layer.tower]))):
            for name, values in shares(tokens).items():
                tower.setdefault(f"{name}, {which}", []).extend(map(short, values))

    observe(Subject(reading.model), layers, inputs, see)
    return towers


def trained(
    config: Function, objective: Any, seed: int, text: Any, folder: Path, progress: Progress
) -> Mapping[str, object]:
    """Train one model; each measurement has S and D of its layers, stored and folded, and shares on held-out rows."""
    tokenizer = text.tokenizer
    shape = {
        **sizes(config.width, config.layers, 0.0), "vocab_size": len(tokenizer),
        "max_position_embeddings": config.row, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    model = build(shape, "default", objective, seed)
    drawn = Drawn(text.rows, config.steps * config.batch_size, seed)

    def losses(now: nn.Module, step: int, part: int) -> dict[str, Tensor]:
        first = step * config.batch_size + part
        tokens = torch.stack([drawn[first + i]["input_ids"] for i in range(config.batch_size)])
        draw = torch.Generator().manual_seed(seed * 2**32 + step)
        return {"loss": token_losses(now, tokens, objective, tokenizer.mask_token_id, draw).mean()}

    def measure(now: nn.Module, step: int) -> dict[str, object]:
        layers = self_attention(now)
        rows = text.results[: config.held_out]
        found = norms(now, layers, {"input_ids": rows[:1]})
        by_layer: dict[int, list[list[float]]] = {layer.layer: [] for layer in layers}

        def see(layer: AttentionLayer, seen: LayerTokens) -> None:
            mine = fmean(KeyTerms(seen.allow, len(seen.positions)).share(*seen.sides[0]).tolist())
            by_layer[layer.layer].append([mine, chance(layer, found[layer.name], seen, config.random)[1]])

        observe(Subject(now), layers, {"input_ids": rows}, see)
        with torch.no_grad():
            draw = torch.Generator().manual_seed(0)
            loss = float(token_losses(now, rows, objective, tokenizer.mask_token_id, draw).mean())
        by_text = [list(zip(*each, strict=True)) for each in by_layer.values()]
        values: dict[str, list[float]] = {
            "key share": [short(fmean(mine)) for mine, _ in by_text],
            "chance": [short(fmean(random)) for _, random in by_text],
        }
        values["excess"] = [beyond(*pair) for pair in zip(values["key share"], values["chance"], strict=True)]
        for basis in BASES[:2]:
            full = [full_scores(*folded(layer, None if basis == "stored" else found[layer.name]), layer.num_heads,
                                layer.num_kv_heads) for layer in layers]  # fmt: skip
            values[f"{basis} symmetry"] = [short(float(one.symmetry)) for one in full]
            values[f"{basis} directionality"] = [short(float(one.directionality)) for one in full]
        return {"held_out": short(loss), **values}

    loop = Loop(
        config.steps, config.rate, linear(config.steps, config.steps // 20), log_every=config.measure_every,
        measure_every=config.measure_every, save_every=0,
    )  # fmt: skip
    course = train(
        model, torch.optim.AdamW(decayed(model, 0.01)), losses, loop, folder, seed=seed,
        identity={"objective": objective, "steps": config.steps}, measure=measure, progress=progress,
    )  # fmt: skip
    return {"measured": course.measured, "seconds": course.seconds}


def beyond(share: float, chance: float) -> float:
    """The share beyond that of random weights on the same tokens, of what is left for it."""
    return short((share - chance) / (1 - chance))


def halves(values: Sequence[float], layers: Sequence[int]) -> float:
    """Mean of the late half of the layers less that of the early half."""
    middle = median(sorted(set(layers)))
    late = [value for value, layer in zip(values, layers, strict=True) if layer > middle]
    early = [value for value, layer in zip(values, layers, strict=True) if layer < middle]
    return fmean(late) - fmean(early) if late and early else math.nan


def short(value: float) -> float:
    return round(value, 4)
