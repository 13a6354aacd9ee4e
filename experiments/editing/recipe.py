"""Editing of facts, as the runner takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from experiments.editing import lasting
from experiments.editing.study import ARMS, Editing, paper, setup, small, tiny
from experiments.editing.summary import AIMS, TEXT_AIM, summarise
from experiments.runner.experiment import Experiment, Judgement, Setup
from experiments.runner.files import read
from experiments.runner.statistics import Interval, said
from experiments.runner.verdict import decide, no_more, partly, possible

CLEAR: Final = 0.1  # of all prompts: how far below its aim the lower end of an interval may lie


def set_up(config: Editing | lasting.Lasting) -> Setup:
    return lasting.setup(config) if isinstance(config, lasting.Lasting) else setup(config)


def miniature(config: Editing | lasting.Lasting) -> Editing | lasting.Lasting:
    if isinstance(config, lasting.Lasting):
        return lasting.miniature(config)
    return replace(config, facts=1, others=1, tokens=64, text_tokens=16)


def judge(results: Path) -> Sequence[Judgement]:
    """K20 of the public call as it is: whether the fact changes, and then all else that was aimed at.

    An aim is reached if the mean is at least the aim, and the interval over relations lies above the aim less `CLEAR`.
    """
    content: Mapping[str, Any] = read(results / "results.json")
    made = {one["arm"]: one for one in content.get("outcomes", ())}
    arm = next(iter(ARMS))
    if arm not in made or not AIMS.keys() <= made[arm]["quantities"].keys():
        return []
    one = made[arm]["quantities"]
    found = {name: Interval(*(one[name][key] for key in ("mean", "low", "high"))) for name in (*AIMS, "text")}
    fact, *others = (decide(found[name].less(aim - CLEAR), "above", CLEAR) for name, aim in AIMS.items())
    decision = possible(partly(fact, *others, no_more(found["text"], TEXT_AIM)))

    def shown(name: str) -> str:
        return said(found[name].numbers, ".0%")

    sentence = (
        f"`knowledge.edit` as it is, one fact at a time: of {made[arm]['count']} facts of "
        f"{len(made[arm]['relations']['fact'])} relations, on which nothing was tuned, {shown('fact')} change; "
        f"{shown('paraphrases understood')} of the paraphrases that the model understood follow. Of other facts of the "
        f"relation {shown('same relation')} stay, of what it says of the subject {shown('same subject')}. Text costs "
        f"{found['text'].mean:+.4f} nats a token. Intervals are over relations."
    )
    return [Judgement.of("K20", decision, sentence)]


EXPERIMENT: Final = Experiment(
    name="editing",
    question="Can a fact of a pretrained model be changed in its entries, in all wordings, while other facts stay?",
    recipes={"tiny": tiny, "lasting": lasting.lasting, "small": small, "paper": paper},
    setup=set_up,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
    packages=("torch", "transformers", "attnflow"),
)
