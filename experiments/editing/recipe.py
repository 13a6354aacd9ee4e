"""Editing of facts, as the runner takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from experiments.editing import lasting
from experiments.editing.study import ARMS, Editing, paper, setup, small, tiny
from experiments.editing.summary import AIMS, TEXT_AIM, summarise
from experiments.runner.experiment import Experiment, Judgement, Setup, Verdict
from experiments.runner.files import read
from experiments.runner.statistics import said

_CLEAR: Final = 0.1  # how far below its aim the lower end of an interval may lie


def set_up(config: Editing | lasting.Lasting) -> Setup:
    return lasting.setup(config) if isinstance(config, lasting.Lasting) else setup(config)


def miniature(config: Editing | lasting.Lasting) -> Editing | lasting.Lasting:
    if isinstance(config, lasting.Lasting):
        return lasting.miniature(config)
    return replace(config, facts=1, others=1, tokens=64, text_tokens=16)


def judge(results: Path) -> Sequence[Judgement]:
    """Of the public call as it is: confirmed if all that was aimed at is reached, and corrected if the facts alone are.

    Reached: the mean is, and the lower end of the interval over relations lies less than ten points below the aim.
    Corrected: the facts change, and of what should stay the whole interval of something lies below its aim.
    """
    content: Mapping[str, Any] = read(results / "results.json")
    made = {one["arm"]: one for one in content.get("outcomes", ())}
    arm = next(iter(ARMS))
    if arm not in made or not AIMS.keys() <= made[arm]["quantities"].keys():
        return []
    one, shares = made[arm]["quantities"], {name: made[arm]["quantities"][name] for name in AIMS}
    reached = {name: v["mean"] >= AIMS[name] and v["low"] > AIMS[name] - _CLEAR for name, v in shares.items()}
    missed = [name for name in ("same subject", "same relation") if shares[name]["high"] < AIMS[name]]
    verdict: Verdict = "not confirmed"
    if all(reached.values()) and one["text"]["mean"] <= TEXT_AIM:
        verdict = "confirmed"
    elif reached["fact"] and missed:
        verdict = "corrected"

    def shown(name: str) -> str:
        return said([one[name][key] for key in ("mean", "low", "high")], ".0%")

    sentence = (
        f"`knowledge.edit` as it is, one fact at a time: of {made[arm]['count']} facts of "
        f"{len(made[arm]['relations']['fact'])} relations, on which nothing was tuned, {shown('fact')} change; "
        f"{shown('paraphrases understood')} of the paraphrases that the model understood follow. Of other facts of the "
        f"relation {shown('same relation')} stay, of what it says of the subject {shown('same subject')}. Text costs "
        f"{one['text']['mean']:+.4f} nats a token. Intervals are over relations."
    )
    return [Judgement("K20", verdict, sentence)]


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
