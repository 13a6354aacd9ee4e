"""A pretrained model with a reader, as the runner takes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from experiments.reader.settings import miniature, paper, small, tiny
from experiments.reader.study import setup
from experiments.reader.summary import CONTEXT, share, summarise
from experiments.reader.world import KINDS, WORDINGS
from experiments.runner.experiment import Experiment, Judgement
from experiments.runner.files import read
from experiments.runner.statistics import Interval, said
from experiments.runner.verdict import ACCURACY, decide, jointly, possible


def judge(results: Path) -> Sequence[Judgement]:
    """K21: whether a plugged-in store, searched by its encoder, says more than the same facts in the context.

    This counts whole answers about facts that are there, in trained wordings, at every size and for both kinds of
    facts, against one fact in the context and against five.
    """
    content = read(results / "results.json")
    if not content["ask_less_context"]:
        return []
    parts = [decide(Interval(*one["whole"]), "above", ACCURACY) for one in content["ask_less_context"]]
    means = {
        (way["way"], way["size"], kind): share(way, "whole", WORDINGS[0], False, kind)[0]
        for way in content["ways"]
        if way["way"] in ("ask", *CONTEXT)
        for kind in KINDS
    }
    pairs = [
        (kind, mean, max(means[name, size, kind] for name in CONTEXT))
        for (way, size, kind), mean in means.items()
        if way == "ask" and all((name, size, kind) in means for name in CONTEXT)
    ]
    each = "; ".join(
        f"{kind} facts {_range([mean for name, mean, _ in pairs if name == kind])} against "
        f"{_range([other for name, _, other in pairs if name == kind])}"
        for kind in KINDS
    )
    least, most = (pick(content["ask_less_context"], key=lambda one: one["whole"][0])["whole"] for pick in (min, max))
    sentence = (
        "Readers of a frozen SmolLM2-135M, whose store is searched by the encoder, against the same facts before "
        f"the question, whole answers over all sizes of store: {each}; store less context "
        f"{said(least)} to {said(most)}. Other text is as it was."
    )
    return [Judgement.of("K21", possible(jointly(*parts)), sentence, "rule after")]


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
    packages=("torch", "transformers", "peft", "attnflow"),
)
