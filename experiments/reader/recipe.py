"""A pretrained model with a reader, as the runner takes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from experiments.reader.dilution import judge_dilution
from experiments.reader.settings import miniature, paper, small, tiny
from experiments.reader.study import setup
from experiments.reader.summary import share, summarise
from experiments.reader.world import KINDS, WORDINGS
from experiments.runner.experiment import Experiment, Judgement, Verdict
from experiments.runner.files import read

CONTEXT: Final = ("context, 1 fact", "context, 5 facts")


def judge(results: Path) -> Sequence[Judgement]:
    """K21: whether a plugged-in store, searched by its encoder, says more than the same facts in the context.

    This counts whole answers about facts that are there, in trained wordings, as means over seeds. K21 is confirmed if
    the store is ahead for both kinds of facts at every size, and refuted if it is never ahead.
    """
    ways: list[dict[str, Any]] = read(results / "results.json")["ways"]
    means = {
        (way["way"], way["size"], kind): share(way, "whole", WORDINGS[0], False, kind)[0]
        for way in ways
        if way["way"] in ("ask", *CONTEXT)
        for kind in KINDS
    }
    pairs = [
        (kind, mean, max(means[name, size, kind] for name in CONTEXT))
        for (way, size, kind), mean in means.items()
        if way == "ask" and all((name, size, kind) in means for name in CONTEXT)
    ]
    if not pairs:
        return []
    ahead = [mean > other for _, mean, other in pairs]
    verdict: Verdict = "confirmed" if all(ahead) else "not confirmed" if any(ahead) else "refuted"
    each = "; ".join(
        f"{kind} facts {_range([mean for name, mean, _ in pairs if name == kind])} against "
        f"{_range([other for name, _, other in pairs if name == kind])}"
        for kind in KINDS
    )
    sentence = (
        "Readers of a frozen SmolLM2-135M, whose store is searched by the encoder, against the same facts before "
        f"the question, whole answers over all sizes of store: {each}. Other text is as it was."
    )
    return [Judgement("K21", verdict, sentence), *judge_dilution(results, *CONTEXT)]


def _range(shares: Sequence[float]) -> str:
    low, high = (f"{100 * value:.0f}" for value in (min(shares), max(shares)))
    return f"{low} %" if low == high else f"{low} to {high} %"


EXPERIMENT: Final = Experiment(
    name="reader",
    question="Does a frozen pretrained model answer from a store that is edited while it runs, and what beats it?",
    recipes={"tiny": tiny, "small": small, "paper": paper},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
    rule_before=False,
    packages=("torch", "transformers", "peft", "attnflow"),
)
