"""DAA on language-model benchmarks, as the runner takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from experiments.daa_evaluation import compared, likelihood, study, summary
from experiments.daa_evaluation.likelihood import Likelihood
from experiments.daa_evaluation.study import PROMPTED, Evaluation, paper, small
from experiments.daa_evaluation.summary import BASE
from experiments.daa_evaluation.verdict import judged
from experiments.runner.experiment import Experiment, Judgement, Setup
from experiments.runner.files import read
from experiments.runner.statistics import Interval, interval
from experiments.runner.study import read_study
from experiments.runner.verdict import ACCURACY, UNTESTED, decide, jointly

FLOOR: Final = 5  # right answers of two arms together below which nothing is said of a benchmark
DAA: Final = ("guidance continued", "guidance")  # the first that has been run is judged


Config = Likelihood | Evaluation  # "tiny" measures likelihoods, the others the benchmarks as they are


def setup(config: Config) -> Setup:
    return likelihood.setup(config) if isinstance(config, Likelihood) else study.setup(config)


def summarise(folder: Path, results: Path) -> str:
    about, _ = read_study(folder)
    kind = compared if "held_out" in about["config"] else summary
    return kind.summarise(folder, results)


def miniature(config: Config) -> Config:
    """Two steps of short rows, two items of each benchmark."""
    if isinstance(config, Likelihood):
        arms = ("guidance", "key")
        return replace(config, arms=arms, seeds=(0, 1), length=16, steps=2, warmup=1, held_out=4, items=2, parts=1)
    return replace(
        config,
        dtype="float32",
        arms=config.arms[:2],
        rows=min(config.rows, 64),
        length=16,
        steps=2,
        warmup=1,
        batch_size=1,
        parts=1,
        save_every=1,
        seeds=config.seeds[:1],
        items={name: 2 for name in config.items if name in ("perplexity", "gsm8k zero-shot", "quality")},
        batch=2,
    )


def judge(results: Path) -> Sequence[Judgement]:
    """Likelihoods as `verdict` has it; benchmarks by the paired interval over items, with a floor of right answers."""
    content = read(results / "results.json")
    if "guidance less" in content:
        return judged(content)
    rows = {(row["arm"], row["benchmark"]): row for row in content["rows"]}
    daa = next((arm for arm in DAA if any(arm == one for one, _ in rows)), None)
    if daa is None:
        return []
    found = [
        _compared(claim, daa, name, rows, content["not_run"])
        for claim, name in (("D8", "humaneval"), ("D9", "gsm8k zero-shot"), ("D10", "quality"))
    ]
    return [*found, _best(daa, rows)]


def _compared(
    claim: str, arm: str, name: str, rows: Mapping[tuple[str, str], Any], not_run: Mapping[str, str]
) -> Judgement:
    if name in not_run:
        return Judgement(claim, "not testable here", f"Not run: {not_run[name]}.")
    one, base = rows[arm, name], rows[BASE, name]
    said = f"{_said(one)} ({arm}) against {_said(base)} (base); paired difference {_points(one['difference'])}."
    if one["right"] + base["right"] < FLOOR:
        return Judgement(claim, "not testable here", f"The model is too weak: {said}", ("floor",))
    return Judgement.of(claim, decide(Interval(*one["difference"]), "above", ACCURACY), said)


def _best(arm: str, rows: Mapping[tuple[str, str], Any]) -> Judgement:
    """An arm without examples against ALiBi, and against the base with examples, on GSM8k."""
    own = rows[arm, "gsm8k zero-shot"]
    keys = [(BASE, name) for name in PROMPTED]
    keys += [(name, "gsm8k zero-shot") for name in ("alibi", "alibi continued")]
    others = {key: rows[key] for key in keys if key in rows}
    said = ", ".join(
        f"{_said(row)} ({name if name != BASE else bench.removeprefix('gsm8k ')})"
        for (name, bench), row in others.items()
    )
    sentence = f"GSM8k: {_said(own)} ({arm}, zero-shot) against {said}."
    if own["right"] + max((row["right"] for row in others.values()), default=0) < FLOOR:
        return Judgement("D11", "not testable here", f"The model is too weak: {sentence}", ("floor",))
    parts = [decide(Interval(*_difference(own, row)), "above", ACCURACY) for row in others.values()]
    return Judgement.of("D11", jointly(*parts or [UNTESTED]), sentence)


def _difference(one: Any, other: Any) -> list[float]:
    """Paired over the items that both have: fewer items at equal distances are some of the others'."""
    mine, theirs = np.array(one["by_item"]), np.array(other["by_item"]).mean(axis=0)
    step, rest = divmod(mine.shape[1], len(theirs))
    if rest or one["total"] % mine.shape[1] or one["total"] % len(theirs) or one["total"] != other["total"]:
        low, high = one["value"][1] - other["value"][2], one["value"][2] - other["value"][1]
        return [one["value"][0] - other["value"][0], low, high]  # wider than 95 %: what it decides is decided
    return interval(mine[:, ::step] - theirs[None]).numbers


def _said(row: Any) -> str:
    return f"{row['value'][0]:.1%} [{row['value'][1]:.1%}, {row['value'][2]:.1%}] of {row['items']}"


def _points(value: Sequence[float]) -> str:
    return "{:+.1f} [{:+.1f}, {:+.1f}] points".format(*(100 * number for number in value))


EXPERIMENT: Final = Experiment(
    name="daa_evaluation",
    question="Does a learned bias raise language-model benchmarks above the base, ALiBi and prompting?",
    recipes={"tiny": Likelihood, "small": small, "paper": paper},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
    packages=("torch", "transformers", "lm_eval", "networkx", "peft", "attnflow"),
)
