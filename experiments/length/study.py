"""SmolLM2 goes on training in short rows, with a bias or without, and is measured by position in long ones."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from attnflow._core.progress import Progress
from attnflow.bias import AlibiConfig, CumulativeConfig, attach
from attnflow.bias.config import BiasConfig
from attnflow.models import load_model
from experiments.bias_comparison.arms import arm_of, count_trained, fitted
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, Plan, Read, choosing_loss, rate_of, swept
from experiments.runner.packing import Drawn, Packed
from experiments.runner.text import TEST, VALIDATION, split_text
from experiments.runner.training import Loop, cosine, train

BASE: Final = "base"
MEASURED: Final = "measured "  # before the name of an arm: the job that measures it by position
BIASES: Final[Mapping[str, BiasConfig]] = {
    "cumulative": CumulativeConfig(layers="every", share_heads=False),
    "alibi added": AlibiConfig(rope="keep", gain=0.0),
    "alibi for rope": AlibiConfig(),
}


@dataclass(frozen=True)
class Lengths:
    """What is trained and measured. The defaults are the scale "tiny"."""

    model: str = "smollm2-135m"  # as `af.load_model` takes it
    arms: tuple[str, ...] = ("plain", "lora", *BIASES)
    # peak learning rates of what an arm adds; widened where the best one lies at an end
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    weights: float = 0.1  # factor of the rate for the model's own weights, where they are trained
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)  # of what is added, and of the rows; together they choose the rate
    length: int = 256  # tokens of a row that is trained on
    tested: int = 2048  # tokens of a row that is measured
    block: int = 128  # positions whose losses are averaged
    steps: int = 8  # of the optimiser
    batch_size: int = 2  # rows of a step
    warmup: int = 2  # steps; the rate then falls by a cosine to a tenth
    choosing: int = 8  # rows of `length` by which rates are chosen
    hidden_dim: int = 64  # of the guidance network whose number of parameters LoRA has


@dataclass(frozen=True)
class Rows:
    training: Packed
    choosing: Tensor  # tokens [rows, length]
    results: Tensor  # tokens [works, tested], a row of each


def setup(config: Lengths) -> Setup:
    """Every arm at every rate with every seed; then each arm at its best rate, measured in long rows."""
    model, tokenizer = load_model(config.model, dtype="float32")
    short = split_text(tokenizer, config.length, max(1, config.choosing // len(VALIDATION)))
    rows = Rows(short.training, short.validation.tokens, split_text(tokenizer, config.tested, 1).test.tokens)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    own = {name for name, _ in model.named_parameters()}

    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        if job.arm == BASE:
            return {"choosing": _loss(model, rows.choosing), "losses": by_position(model, rows.results, config.block)}
        arm = job.arm.removeprefix(MEASURED)
        try:
            with retrofitted(model, arm, cast(int, job.seed), config) as trained:
                log = _train(trained, own, rows.training, config, (job, folder / "training"), progress)
                if job.arm != arm:
                    return {"log": log, "losses": by_position(trained, rows.results, config.block)}
                return {"log": log, "measured": [{"choosing": _loss(trained, rows.choosing)}]}
        finally:
            model.load_state_dict(weights)

    every = swept(config.arms, config.rates, config.seeds, choosing_loss, choosing=len(config.seeds))

    def then(read: Read) -> Sequence[Job]:
        if wider := every.then(read):
            return wider
        best = {arm: rate_of(arm, config.rates, config.seeds, read) for arm in config.arms}
        return [Job(f"{MEASURED}{arm}", best[arm], seed) for seed in config.seeds for arm in config.arms]

    count = 1 + len(every.first) + len(config.arms) * len(config.seeds)
    about = {"works": TEST, "added": {arm: _added(model, arm, config) for arm in config.arms}}
    return Setup(Plan((Job(BASE), *every.first), then, count), run, about)


@contextmanager
def retrofitted(model: Any, arm: str, seed: int, config: Lengths) -> Generator[Any]:
    """The model with what an arm adds. All weights are trained, but for LoRA, which freezes them."""
    if arm == "lora":
        with fitted(model, arm_of(model, arm, config.hidden_dim), seed) as wrapped:
            yield wrapped
        return
    with ExitStack() as stack:
        torch.manual_seed(seed)
        if arm in BIASES:
            stack.callback(attach(model, BIASES[arm]).remove)
        elif arm != "plain":
            raise ValueError(f"no arm {arm!r}: expected plain, lora, {', '.join(BIASES)}")
        model.requires_grad_(True)
        yield model


def groups(model: nn.Module, own: Set[str], factor: float) -> list[dict[str, Any]]:
    """Trained parameters for an optimiser: what is added; and the model's own, by name, at a factor of the rate."""
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    added = [one for name, one in trained.items() if name not in own]
    weights = [one for name, one in trained.items() if name in own]
    return [
        {"params": added, "weight_decay": 0.0, "factor": 1.0},
        {"params": weights, "weight_decay": 0.01, "factor": factor},
    ]


def _train(
    model: Any, own: Set[str], rows: Packed, config: Lengths, place: tuple[Job, Path], progress: Progress
) -> list[dict[str, float]]:
    """Train, and return the log of the losses."""
    job, folder = place
    rate, seed = cast(float, job.rate), cast(int, job.seed)
    draws = Drawn(rows, config.steps * config.batch_size, seed)

    def losses(now: nn.Module, step: int, part: int) -> dict[str, Tensor]:
        first = step * config.batch_size
        ids = torch.stack([draws[first + place]["input_ids"] for place in range(config.batch_size)])
        return {"loss": _of_tokens(now, ids).mean()}

    optimiser = torch.optim.AdamW(groups(model, own, config.weights), betas=(0.9, 0.98))
    schedule = cosine(config.steps, config.warmup, 0.1)
    loop = Loop(config.steps, rate, schedule, log_every=max(1, config.steps // 4), save_every=0)
    identity = {**asdict(config), "arm": job.arm, "rate": rate}
    return train(model, optimiser, losses, loop, folder, seed=seed, identity=identity, progress=progress).log


@torch.no_grad()
def by_position(model: nn.Module, rows: Tensor, block: int) -> list[list[float]]:
    """Nats per token [rows, blocks of positions]; a block's positions predict, and the last one has one less."""
    model.eval()
    return [[round(float(part.mean()), 6) for part in _of_tokens(model, row[None])[0].split(block)] for row in rows]


@torch.no_grad()
def _loss(model: nn.Module, rows: Tensor) -> float:
    model.eval()
    return float(torch.stack([_of_tokens(model, some).mean() for some in rows.split(4)]).mean())


def _of_tokens(model: nn.Module, ids: Tensor) -> Tensor:
    """Nats of each token but the first, [rows, length - 1]."""
    with torch.autocast(ids.device.type, torch.bfloat16):  # 1.6 times as fast; weights and losses are float32
        logits: Tensor = cast(Any, model)(input_ids=ids, use_cache=False).logits[:, :-1]
    return functional.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none")


def _added(model: Any, arm: str, config: Lengths) -> int:
    """How many parameters an arm adds."""
    before = sum(one.numel() for one in model.parameters())
    with retrofitted(model, arm, 0, config) as trained:
        return count_trained(trained) if arm == "lora" else sum(one.numel() for one in trained.parameters()) - before
