"""The settings of the study, and one run of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from attnflow._core.progress import Progress
from attnflow.geometry import score
from experiments.geometry_init.model import INITIALISATIONS, PENALTIES, Objective, build, penalised, token_losses
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, choosing_loss, swept
from experiments.runner.packing import Drawn
from experiments.runner.text import load_text
from experiments.runner.training import Loop, decayed, linear, train

_EVALUATED: Final = 32  # rows of a pass


@dataclass(frozen=True)
class Initialisation:
    """What is trained. The defaults are the scale "tiny"."""

    text: str = "shakespeare"  # "shakespeare", or a data set of the hub, which is streamed
    tokenizer: int | str = 2048  # how many word pieces are learned from the text, or the name of a tokenizer of the hub
    rows: int = 0  # of a data set, for training; those of Shakespeare are what they are
    held_out: int = 64  # rows for the results, and as many for choosing the learning rate
    length: int = 64  # tokens of a row
    # of the models, as `BertConfig` takes them
    sizes: Mapping[str, Any] = field(default_factory=lambda: sizes(128, 4, 0.0))
    masked: tuple[str, ...] = (*INITIALISATIONS, *PENALTIES)  # arms that predict masked tokens
    # arms that predict the next token under a causal mask
    causal: tuple[str, ...] = ("default", "scaled", "symmetric", "skew", "penalty columns")
    factor: float = 0.1  # of the penalties
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)  # of initialisation and data
    rates: tuple[float, ...] = (5e-4, 2e-3)  # learning rates
    choosing: int = 1  # how many of the seeds choose each arm's rate; all of them: every arm runs at every rate
    steps: int = 1000  # of the optimiser
    warmup: int = 50  # steps; the rate then falls linearly
    batch_size: int = 16  # rows of a forward pass
    parts: int = 1  # forward passes of a step
    decay: float = 0.01  # of matrices
    measure_every: int = 25  # steps
    save_every: int = 250  # steps


def sizes(width: int, layers: int, dropout: float) -> dict[str, Any]:
    """Of BERT, with heads of 32 or, as from a width of 256 on, 64 numbers."""
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, width // (64 if width >= 256 else 32)),
        "intermediate_size": 4 * width,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }


def tiny() -> Initialisation:
    """Two CPU cores; the README says how long."""
    return Initialisation()


def rates() -> Initialisation:
    """Both objectives at both rates from two starts, on seeds that "tiny" did not have."""
    starts = ("default", "scaled")
    return replace(tiny(), masked=starts, causal=starts, seeds=(5, 6, 7, 8, 9), choosing=5)


def small() -> Initialisation:
    """One GPU: the paper's 4-layer model on Wikipedia, fewer steps of a larger rate."""
    return replace(
        paper(), rows=200_000, rates=(1e-4, 5e-4), choosing=5, steps=5_000, warmup=200, batch_size=32, parts=1,
        length=128, measure_every=100, save_every=500,
    )  # fmt: skip


def paper() -> Initialisation:
    """Table 1 on Wikipedia, 4 layers: 200,000 steps of 256 rows of 512 tokens, rate 5e-5; 12 layers: `paper_12`."""
    return Initialisation(
        text="wikimedia/wikipedia:20231101.en:train",
        tokenizer="google-bert/bert-base-uncased",
        rows=6_000_000,
        held_out=1024,
        length=512,
        sizes=sizes(256, 4, 0.1),
        rates=(5e-5,),
        steps=200_000,
        warmup=200,
        batch_size=32,
        parts=8,
        measure_every=1000,
        save_every=1000,
    )


def paper_12() -> Initialisation:
    """The same with 12 layers of width 768."""
    return replace(paper(), sizes=sizes(768, 12, 0.1))


def setup(config: Initialisation) -> Setup:
    """A run for each objective and arm: every rate with the seeds that choose, then the best rate with the others."""
    text = load_text(config.text, config.tokenizer, config.length, config.rows, config.held_out)
    rows, choosing, results, tokenizer = text.rows, text.choosing, text.results, text.tokenizer
    vocabulary = {"vocab_size": len(tokenizer), "max_position_embeddings": config.length}
    model_sizes = {**config.sizes, **vocabulary, "pad_token_id": tokenizer.pad_token_id}

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        kind, _, arm = job.arm.partition(" ")
        objective, seed = cast(Objective, kind), cast(int, job.seed)
        model = build(model_sizes, arm, objective, seed).to(device)
        drawn = Drawn(rows, config.steps * config.parts * config.batch_size, seed)

        def losses(now: nn.Module, step: int, part: int) -> dict[str, Tensor]:
            number = step * config.parts + part
            first = number * config.batch_size
            tokens = torch.stack([drawn[first + i]["input_ids"] for i in range(config.batch_size)])
            chance = torch.Generator().manual_seed(seed * 2**32 + number)
            found = {"loss": token_losses(now, tokens, objective, tokenizer.mask_token_id, chance).mean()}
            extra = penalised(model, arm)
            return found if extra is None else {**found, "penalty": config.factor * extra}

        def measure(now: nn.Module, step: int) -> dict[str, object]:
            table = score(now, per_head=False, fold=False).rows()
            more = {"choosing": held(now, choosing)} if step == config.steps else {}
            return {
                "held_out": held(now, results),
                "symmetry": [row["symmetry"] for row in table],
                "directionality": [row["directionality"] for row in table],
                **more,
            }

        @torch.no_grad()
        def held(now: nn.Module, part: Tensor) -> float:
            chance = torch.Generator().manual_seed(0)  # the same tokens are masked for all
            found = [
                token_losses(now, some, objective, tokenizer.mask_token_id, chance) for some in part.split(_EVALUATED)
            ]
            return float(torch.cat(found).mean())

        loop = Loop(
            config.steps,
            cast(float, job.rate),
            linear(config.steps, config.warmup),
            parts=config.parts,
            log_every=config.measure_every,
            measure_every=config.measure_every,
            save_every=config.save_every,
        )
        optimiser = torch.optim.AdamW(decayed(model, config.decay), betas=(0.9, 0.999))
        identity = {"arm": job.arm, "rate": job.rate, "steps": config.steps, "sizes": model_sizes}
        course = train(
            model, optimiser, losses, loop, folder, seed=seed, identity=identity, measure=measure, progress=progress
        )
        return {"log": course.log, "measured": course.measured, "seconds": course.seconds}

    arms = [f"masked {arm}" for arm in config.masked] + [f"causal {arm}" for arm in config.causal]
    about = {"vocabulary": len(tokenizer), "training_rows": len(rows), "held_out_tokens": results.numel()}
    plan = swept(arms, config.rates, config.seeds, choosing_loss, choosing=config.choosing, widen=False)
    return Setup(plan, run, about)
