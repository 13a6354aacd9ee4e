"""Editing of facts, as the runner takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from experiments.editing.study import ARMS, Editing, paper, setup, small, tiny
from experiments.editing.summary import UNSEEN, summarise
from experiments.runner.experiment import Experiment, Judgement
from experiments.runner.files import read


def miniature(config: Editing) -> Editing:
    sizes = {"tuned": 1, "held_out": 2, "others": 1, "constraints": 0, "moment_tokens": 64, "text_tokens": 16}
    return replace(config, layers=(0, 1), entries=8, direct=4, steps=2, **sizes)


def judge(results: Path) -> Sequence[Judgement]:
    """The rule of `knowledge_ablation`, on facts that the method was not tuned on, of the arm with few entries."""
    outcomes: list[dict[str, Any]] = read(results / "results.json")["outcomes"]
    some = next((one for one in outcomes if (one["facts"], one["arm"]) == (UNSEEN, ARMS[2])), None)
    if some is None:
        return []
    changed, leaked, kept, wordings = (some["quantities"][name] for name in ("fact", "leaked", "kept", "paraphrases"))
    specific = changed["low"] > 0.9 and leaked["high"] < 0.05
    sentence = (
        f"By the least change of 64 entries in each of three layers: of {some['count']} facts that the method was not "
        f"tuned on, {changed['mean']:.0%} change [{changed['low']:.1%}, {changed['high']:.1%}], the answer leaks to "
        f"{leaked['mean']:.1%} of other facts [{leaked['low']:.1%}, {leaked['high']:.1%}], {kept['mean']:.0%} of these "
        f"stay, and {wordings['mean']:.0%} of paraphrases follow. The entries are shared by facts: it is their joint "
        "change that is specific."
    )
    return [Judgement("K20", "confirmed" if specific else "not confirmed", sentence)]


EXPERIMENT: Final = Experiment(
    name="editing",
    question="Can a fact of a pretrained model be changed in its entries, in all wordings, while other facts stay?",
    recipes={"tiny": tiny, "small": small, "paper": paper},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
    rule_before=False,  # it was K12's, written after the runs of `knowledge_ablation`
    packages=("torch", "transformers", "attnflow"),
)
