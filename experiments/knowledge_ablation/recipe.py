"""Ablation and editing of entries, as the runner takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from experiments.knowledge_ablation.ablate import Ablation, paper, setup, small, tiny
from experiments.knowledge_ablation.summary import summarise
from experiments.runner.experiment import Experiment, Judgement
from experiments.runner.files import read
from experiments.runner.statistics import Interval
from experiments.runner.verdict import decide, jointly, possible

CHANGED: Final = 0.9  # of the facts, at least
LEAKED: Final = 0.05  # of other facts, at most


def miniature(config: Ablation) -> Ablation:
    return replace(config, dtype="float32", facts=1, others=2, ablated=(1, 4), edited=(4,), text_tokens=16)


def judge(results: Path) -> Sequence[Judgement]:
    """Whether entries are facts that can be changed one by one."""
    outcomes: list[dict[str, Any]] = read(results / "results.json")["outcomes"]
    edit = next(one for one in outcomes if (one["change"], one["method"]) == ("edited", "effect"))
    size = edit["entries"]
    cut = next(
        one["quantities"]
        for one in outcomes
        if (one["change"], one["method"], one["entries"]) == ("ablated", "effect", size)
    )
    changed, leaked = (edit["quantities"][name] for name in ("fact_changed", "other_facts_leaked"))
    of = {name: Interval(one["mean"], one["low"], one["high"]) for name, one in (("to", changed), ("off", leaked))}
    specific = jointly(decide(of["to"].less(CHANGED), "above", 0.0), decide(of["off"].less(LEAKED), "below", 0.0))
    return [
        Judgement.of(
            "K12",
            possible(specific),
            f"Of SmolLM2-135M converted, {size} entries edited change {changed['mean']:.0%} of the facts, and the "
            f"answer leaks to {leaked['mean']:.0%} of other facts; ablated, they cost the fact "
            f"{-cut['fact']['mean']:.1f} nats and other facts of its relation {-cut['other_facts']['mean']:.1f}. "
            "Superseded by the experiment editing (K20), whose edits are found by gradients, and measured on more.",
            "superseded",
            "rule after",
        )
    ]


EXPERIMENT: Final = Experiment(
    name="knowledge_ablation",
    question="Which feed-forward entries carry a fact, and what else changes when they are edited?",
    recipes={"tiny": tiny, "small": small, "paper": paper},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
    packages=("torch", "transformers", "attnflow"),
)
