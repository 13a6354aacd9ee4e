"""A pretrained model with a reader, as the runner takes it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Final

from experiments.reader.dilution import judge_dilution
from experiments.reader.settings import miniature, paper, small, tiny
from experiments.reader.study import setup
from experiments.reader.summary import CONTEXT, summarise
from experiments.reader.world import KINDS
from experiments.runner.experiment import Experiment, Judgement
from experiments.runner.files import read
from experiments.runner.statistics import Interval, said
from experiments.runner.verdict import ACCURACY, decide, jointly, possible


def judge(results: Path) -> Sequence[Judgement]:
    """K21: whether a plugged-in store, searched by its encoder, says more than the same facts in the context.

    This counts whole answers about facts that are there, in trained wordings, at every size and for both kinds of
    facts, against one fact in the context and against five.
    """
    rows = read(results / "results.json")["ask_less_context"]
    if not rows:
        return []
    each = "; ".join(
        f"{kind} facts {_range([row['ask'] for row in rows if row['kind'] == kind])} against "
        f"{_range([row['told'] for row in rows if row['kind'] == kind])}"
        for kind in KINDS
    )
    least, most = (pick((row["whole"] for row in rows), key=itemgetter(0)) for pick in (min, max))
    sentence = (
        "Readers of a frozen SmolLM2-135M, whose store is searched by the encoder, against the same facts before "
        f"the question, whole answers over all sizes of store: {each}; store less context {said(least)} to "
        f"{said(most)}. Other text is as it was."
    )
    parts = (decide(Interval(*row["whole"]), "above", ACCURACY) for row in rows)
    return [Judgement.of("K21", possible(jointly(*parts)), sentence, "rule after"), *judge_dilution(results, *CONTEXT)]


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
