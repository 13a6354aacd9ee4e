"""The settings of the probe, and one run of it: an arm at a rate and a seed, a random network, or a real encoder."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

import attnflow as af
from attnflow._core.progress import Progress
from attnflow.bias import GuidanceConfig, attach
from experiments.bias_comparison.arms import arm_of, fitted
from experiments.bias_comparison.settings import bert
from experiments.encoder_probe.grammar import FAR, KINDS, LENGTH, MASK, NEAR, NUMBER, WORDS, Sentence, batch, draw
from experiments.encoder_probe.links import links
from experiments.encoder_probe.symmetry import form, measured, untrained
from experiments.evaluation.sources import gsm8k
from experiments.geometry_init.model import build
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, Plan, choosing_loss, swept
from experiments.runner.training import Loop, cosine, decayed, train

UNTRAINED: Final = "untrained"  # the job of networks that have learned nothing
REAL: Final = "real encoder"
_CHOOSING, _RESULTS, _LINKS = 2**30, 2**30 + 1, 2**30 + 2  # places of data that no step of training has
_WARMUP: Final = 20


@dataclass(frozen=True)
class Probe:
    """What is trained. The defaults are the scale "tiny"."""

    arms: tuple[str, ...] = ("plain", "dense", "key", "guidance")  # what is compared, as `bias_comparison` makes them
    # of the encoder
    sizes: Mapping[str, Any] = field(default_factory=lambda: {**bert(64, 2, 4), "initializer_range": 0.1})
    hidden_dim: int = 32  # of the guidance network; it sets the parameters that the other arms add
    rates: tuple[float, ...] = (1.5e-3, 3e-3, 6e-3)  # learning rates of every arm
    seeds: tuple[int, ...] = tuple(range(8))  # of the model, of what is added and of the sentences
    choosing: int = 3  # how many of the seeds choose an arm's rate
    steps: int = 800  # of the optimiser
    batch_size: int = 64  # sentences of a step
    mask: float = 0.05  # chance of any word to be predicted
    mask_dependent: float = 0.9  # chance of the word that follows from another
    tested: int = 512  # sentences of each kind and length for accuracies
    looked_at: int = 40  # sentences of each kind whose maps are read
    encoder: str = "minilm"  # name of the real one, or "untrained" for none but a random one
    sentences: int = 50  # real ones that it reads


def setup(config: Probe) -> Setup:
    """Every arm at every rate on some seeds, then at its best; untrained networks; a real encoder."""

    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        if job.arm == REAL:
            return read_encoder(config)
        seed = cast(int, job.seed)
        if job.arm == UNTRAINED:
            with guided(fresh(config, seed), config, seed) as random:
                return {"links": looked(random, config)}
        return trained(config, job.arm, cast(float, job.rate), seed, folder, progress)

    sweep = swept(config.arms, config.rates, config.seeds, choosing_loss, config.choosing)
    more = (Job(REAL), *(Job(UNTRAINED, seed=seed) for seed in config.seeds))
    return Setup(Plan((*more, *sweep.first), sweep.then, sweep.count + len(more)), run)


def trained(config: Probe, name: str, rate: float, seed: int, folder: Path, progress: Progress) -> dict[str, object]:
    """Train an arm, and see what it gets right and where it points."""
    model = fresh(config, seed)
    arm = arm_of(model, name, config.hidden_dim, "every")
    with fitted(model, arm, seed, "all") as now:

        def losses(model: nn.Module, step: int, part: int) -> dict[str, Tensor]:
            del part
            words, shown, asked = batch(seed, step, config.batch_size, config.mask, config.mask_dependent)
            logits = cast(Any, model)(input_ids=shown).logits[asked]
            return {"loss": functional.cross_entropy(logits, words[asked])}

        @torch.no_grad()
        def measure(model: nn.Module, step: int) -> dict[str, object]:
            words, shown, asked = batch(0, _CHOOSING, config.tested, config.mask, config.mask_dependent)
            logits = cast(Any, model)(input_ids=shown).logits[asked]
            more = {"choosing": float(functional.cross_entropy(logits, words[asked]))}
            return {**more, "accuracy": accuracies(model, config)} if step == config.steps else more

        schedule = cosine(config.steps, min(_WARMUP, config.steps // 10), 0.1)
        loop = Loop(config.steps, rate, schedule, log_every=100, measure_every=100, save_every=0)
        optimiser = torch.optim.AdamW(decayed(now, 0.01), betas=(0.9, 0.98))
        identity = {"arm": arm.to_dict(), "rate": rate, "steps": config.steps}
        course = train(
            now, optimiser, losses, loop, folder, seed=seed, identity=identity, measure=measure, progress=progress
        )
        more: dict[str, object] = {"links": looked(now, config)}
        if name == "plain":  # a random network on queries and keys that were trained
            with guided(now, config, seed) as random:
                more["random links"] = looked(random, config)
    return {"parameters": arm.parameters, "measured": course.measured, "seconds": course.seconds, **more}


def fresh(config: Probe, seed: int) -> Any:
    """A BERT whose positions start as sinusoids: it learns to find neighbours sooner than from random positions."""
    sizes = {**config.sizes, "vocab_size": len(WORDS), "max_position_embeddings": LENGTH}
    model = build(sizes, "default", "masked", seed)
    table = model.bert.embeddings.position_embeddings.weight
    waves = torch.pi * torch.logspace(0, -1.3, table.shape[1] // 2)
    angles = torch.arange(LENGTH)[:, None] * waves
    with torch.no_grad():
        table.copy_(torch.cat([angles.sin(), angles.cos()], dim=1) * model.config.initializer_range * 2**0.5)
    return model


@contextmanager
def guided(model: nn.Module, config: Probe, seed: int) -> Generator[nn.Module]:
    """The model with a guidance network of random weights (He) for a while."""
    with torch.random.fork_rng():
        torch.manual_seed(1000 + seed)
        handle = attach(model, GuidanceConfig(layers="every", hidden_dim=config.hidden_dim, init="kaiming"))
    with handle:
        yield model


def looked(model: nn.Module, config: Probe) -> dict[str, object]:
    """`links` of each kind of dependent, on the same sentences for all models; all distractors are opposed."""
    model.eval()
    return {kind: links(model, drawn(kind, "near", config.looked_at, _LINKS)) for kind in KINDS}


@torch.no_grad()
def accuracies(model: nn.Module, config: Probe) -> dict[str, dict[str, float]]:
    """Share of dependents that are filled in rightly from their candidates, in sentences of both lengths."""
    found: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        for length in ("near", "far"):
            sentences = drawn(kind, length, config.tested, _RESULTS)
            tokens = torch.tensor([one.tokens for one in sentences])
            rows, places = torch.arange(len(tokens)), torch.tensor([one.dependent for one in sentences])
            right = tokens[rows, places]
            candidates = torch.tensor([[NUMBER[word] for word in one.candidates] for one in sentences])
            shown = tokens.clone()
            shown[rows, places] = NUMBER[MASK]
            logits = cast(Any, model)(input_ids=shown).logits[rows, places].gather(1, candidates)
            chosen = candidates.gather(1, logits.argmax(dim=1, keepdim=True))[:, 0]
            found.setdefault(kind, {})[length] = float((chosen == right).double().mean())
    return found


def drawn(kind: Any, length: str, count: int, place: int) -> list[Sentence]:
    """Sentences for results: every distractor asks for another form than the head."""
    chance = Random(place)
    return [draw(kind, chance, NEAR if length == "near" else FAR, opposed=True) for _ in range(count)]


def read_encoder(config: Probe) -> dict[str, object]:
    """Antisymmetric shares of a real encoder, of a random one of its sizes, and of one whose keys are its queries."""
    if config.encoder == "untrained":
        sizes = {**bert(16, 2, 2), "vocab_size": 100, "max_position_embeddings": 64}
        real: Any = build(sizes, "default", "masked", 0).bert.eval()
        generator = torch.Generator().manual_seed(0)
        inputs = [{"input_ids": torch.randint(100, (1, 12), generator=generator)} for _ in range(config.sentences)]
    else:
        real, tokenizer = af.load_model(config.encoder)
        real.eval()
        questions = [str(one["question"]).split(". ")[0].rstrip(".?") + "." for one in gsm8k()[: config.sentences]]
        inputs = [dict(cast(Any, tokenizer)(text, return_tensors="pt")) for text in questions]
    models = {"real": real, "random": untrained(real, False), "random, keys = queries": untrained(real, True)}
    return {
        "encoder": config.encoder,
        "tokens": [one["input_ids"].shape[1] for one in inputs],
        "shares": {name: measured(model, inputs) for name, model in models.items()},
        "form": {name: form(model) for name, model in models.items()},
    }
