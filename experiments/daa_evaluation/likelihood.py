"""How likely gold solutions are, and by how much likelier than wrong ones: for the base, and for each trained arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from attnflow._core.progress import Progress
from attnflow.bias import AlibiConfig, attach
from attnflow.models import load_model
from attnflow.tasks.hf.scoring import Request, Scorer
from experiments.bias_comparison.arms import arm_of, fitted
from experiments.daa_evaluation.perturbed import Gold, programs, word_problems
from experiments.daa_evaluation.practice import Practice, functions, practice, reasoned_answers, shared
from experiments.evaluation import sources
from experiments.evaluation.benchmarks import shown
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, Plan, Read, choosing_loss, rate_of, swept
from experiments.runner.training import Loop, cosine, decayed, train

BASE, ALIBI = "base", "alibi"
SHOTS: Final = ("five-shot", "chain of thought")
GSM8K, HUMANEVAL = "gsm8k", "humaneval"


@dataclass(frozen=True)
class Likelihood:
    """What is trained and measured. The defaults are the scale "tiny"."""

    model: str = "smollm2-135m"  # as `af.load_model` takes it; in float32
    # of equal parameters, as `arm_of` has them; nothing but what they add is trained
    arms: tuple[str, ...] = ("guidance", "key", "dense", "lora")
    # peak learning rates that every arm is tried with; widened where the best lies at an end
    rates: tuple[float, ...] = (3e-3, 1e-2)
    seeds: tuple[int, ...] = (0, 1, 2)  # of what is added, and of the order of rows; all of them choose the rate
    length: int = 128  # tokens of a row
    steps: int = 12  # of the optimiser, each of one row of either kind of text
    warmup: int = 2  # steps; the rate then falls by a cosine to a tenth
    held_out: int = 8  # rows for choosing
    hidden_dim: int = 64  # of the guidance network, in every other layer; it sets the parameters of every arm
    items: int = 0  # of each benchmark, at equal distances; 0: all
    # in which the items are scored, one after the other and each of items at equal distances: a study that is cut short
    # has all arms and seeds on the first ones
    parts: int = 4
    tokens_per_pass: int = 1024  # see `tasks.score`


def setup(config: Likelihood) -> Setup:
    """The base on the first items; every arm with every rate and seed; then, part by part, all arms at their best."""
    model, tokenizer = load_model(config.model, dtype="float32")
    texts = practice(tokenizer, config.length, config.held_out)
    chosen = {name: sources.chosen(items, config.items or None) for name, items in _items().items()}
    golds = {GSM8K: word_problems(chosen[GSM8K], tokenizer), HUMANEVAL: programs(chosen[HUMANEVAL], tokenizer)}
    examples = {name: tuple(tokenizer(shown(name), add_special_tokens=False)["input_ids"]) for name in SHOTS}

    def scored(part: int, benchmarks: Sequence[str] = (GSM8K, HUMANEVAL)) -> dict[str, Any]:
        size = config.tokens_per_pass
        return {name: scores(model, golds[name][part :: config.parts], size) for name in benchmarks}

    def of_base(part: int) -> dict[str, object]:
        some = golds[GSM8K][part :: config.parts]
        behind = {
            f"{GSM8K} {name}": scores(model, _behind(some, shots), 2 * config.tokens_per_pass)
            for name, shots in examples.items()
        }
        return {"choosing": _loss(model, texts.choosing), "scores": {**scored(part), **behind}}

    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        part, name = split_name(job.arm)
        if name == BASE:
            return of_base(part)
        if name == ALIBI:
            handle = attach(model, AlibiConfig())
            try:
                return {"scores": scored(part, [GSM8K])}
            finally:
                handle.remove()
        arm = arm_of(model, name, config.hidden_dim)
        seed, rate = cast(int, job.seed), cast(float, job.rate)
        with fitted(model, arm, seed) as trained:
            place = folder.parent / Job(name, rate, seed).name / "training"
            log = _train(trained, texts, config, place, (name, rate, seed), progress)
            if name != job.arm:
                return {"scores": scored(part)}
            choosing = _loss(trained, texts.choosing)
            return {"log": log, "measured": [{"step": config.steps, "choosing": choosing}]}

    every = swept(config.arms, config.rates, config.seeds, choosing_loss, choosing=len(config.seeds))

    def then(read: Read) -> Sequence[Job]:
        if wider := every.then(read):
            return wider
        best = {arm: rate_of(arm, config.rates, config.seeds, read) for arm in config.arms}
        return [
            job
            for part in range(config.parts)
            for job in (
                Job(f"{part} {BASE}"),
                Job(f"{part} {ALIBI}"),
                *(Job(f"{part} {arm}", best[arm], seed) for seed in config.seeds for arm in config.arms),
            )
        ]

    count = len(every.first) + config.parts * (2 + len(config.arms) * len(config.seeds))
    about = {
        "parameters": {arm: arm_of(model, arm, config.hidden_dim).parameters for arm in config.arms},
        "items": {name: _counted(gold) for name, gold in golds.items()},
        "rows": [len(rows) for rows in texts.training],
        "passages in common with the items": shared(
            [*reasoned_answers(), *functions()],
            [str(value) for items in chosen.values() for item in items for value in item.values()],
        ),
    }
    return Setup(Plan((Job(f"0 {BASE}"), *every.first), then, count), run, about)


def split_name(name: str) -> tuple[int, str]:
    """(part of the items, arm) of a job that scores; one that only trains has its arm alone.

    >>> split_name("2 guidance"), split_name("guidance")
    ((2, 'guidance'), (0, 'guidance'))
    """
    part, _, arm = name.rpartition(" ")
    return int(part or 0), arm


def scores(model: nn.Module, golds: Sequence[Gold], tokens_per_pass: int) -> list[dict[str, Any]]:
    """For each problem what its solution costs in nats, and by how much likelier it is than each wrong one.

    Returns:
        For each item: "name", "tokens" of the solution, "nats" that it costs, "split" as the number of tokens and the
        nats before the sentence with the answer, and "margins": pairs of the kind of a perturbation and
        log p(gold) - log p(wrong), which the tokens before the changed one cannot move.
    """
    requests: list[Request] = []
    for gold in golds:
        prompt, solution = list(gold.prompt), list(gold.solution)
        requests += [(prompt, solution), (prompt, solution[: gold.split])]
        for wrong in gold.wrong:
            before = prompt + solution[: wrong.start]
            requests += [(before, solution[wrong.start :]), (before, list(wrong.rest))]
    found = iter(Scorer(model).score(requests, tokens_per_pass).log_probs)
    rows: list[dict[str, Any]] = []
    for gold in golds:
        whole, first = -next(found), -next(found)
        margins = [[wrong.kind, next(found) - next(found)] for wrong in gold.wrong]
        about = {"name": gold.name, "tokens": len(gold.solution), "nats": whole}
        rows.append({**about, "split": [gold.split, first], "margins": margins})
    return rows


def _items() -> dict[str, list[sources.Item]]:
    return {GSM8K: sources.gsm8k(), HUMANEVAL: sources.humaneval()}


def _behind(golds: Sequence[Gold], examples: tuple[int, ...]) -> list[Gold]:
    """The same problems after examples; without wrong solutions."""
    return [Gold(one.name, (*examples, *one.prompt), one.solution, one.split, ()) for one in golds]


def _counted(golds: Sequence[Gold]) -> dict[str, int]:
    return {
        "items": len(golds),
        "tokens of the solutions": sum(len(gold.solution) for gold in golds),
        "perturbations": sum(len(gold.wrong) for gold in golds),
        "items without one": sum(not gold.wrong for gold in golds),
    }


def _train(
    model: nn.Module,
    texts: Practice,
    config: Likelihood,
    folder: Path,
    about: tuple[str, float, int],
    progress: Progress,
) -> list[dict[str, float]]:
    """Train what is added, or take up what has been trained; the log of the losses."""
    name, rate, seed = about

    def losses(now: nn.Module, step: int, part: int) -> dict[str, Tensor]:
        del part
        return {"loss": _of_rows(now, texts.batch(seed, step, config.steps))}

    schedule = cosine(config.steps, config.warmup, 0.1)
    loop = Loop(config.steps, rate, schedule, log_every=max(1, config.steps // 4), save_every=config.steps)
    optimiser = torch.optim.AdamW(decayed(model, 0.01), betas=(0.9, 0.98))
    identity = {**asdict(config), "arm": name, "rate": rate, "arms": "", "seeds": "", "items": ""}
    return train(model, optimiser, losses, loop, folder, seed=seed, identity=identity, progress=progress).log


@torch.no_grad()
def _loss(model: nn.Module, rows: Tensor) -> float:
    model.eval()
    return float(torch.stack([_of_rows(model, some) for some in rows.split(4)]).mean())


def _of_rows(model: nn.Module, ids: Tensor) -> Tensor:
    logits: Tensor = cast(Any, model)(input_ids=ids, use_cache=False).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
