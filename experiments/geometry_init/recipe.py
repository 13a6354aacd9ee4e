"""Initialisations and penalties of the bilinear form, as the runner takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from experiments.geometry_init.study import Initialisation, paper, paper_12, rates, setup, sizes, small, tiny
from experiments.geometry_init.summary import summarise
from experiments.runner.experiment import Experiment, Judgement, Verdict
from experiments.runner.files import read

# Name in the results -> (claim, the sign that it asks for, how it is said).
_CONTRASTS: Final = {
    "symmetry at the end, symmetric less scaled": ("G15", 1, "Symmetry at the end, symmetric less scaled start"),
    "spread of symmetry over layers, symmetric less scaled": (
        "G16",
        -1,
        "Range of S over layers, symmetric less scaled",
    ),
}


def miniature(config: Initialisation) -> Initialisation:
    """Two layers of width 8, two steps, two seeds."""
    return replace(
        config,
        tokenizer=300 if isinstance(config.tokenizer, int) else config.tokenizer,
        rows=min(config.rows, 64),
        held_out=8,
        length=16,
        sizes=sizes(8, 2, config.sizes["hidden_dropout_prob"]),
        seeds=config.seeds[:2],
        rates=config.rates[:1],
        steps=2,
        warmup=1,
        batch_size=2,
        measure_every=1,
        save_every=1,
    )


def judge(results: Path) -> Sequence[Judgement]:
    """By intervals over seeds that exclude 0; the rule stands in the README since before the run.

    G9 to G14, G30 and G31 are judged by geometry_training, which reads these results.
    """
    content = read(results / "results.json")
    first = read(results / "study.json")["scale"] == "tiny"
    late_rule = " (rule written after the run)" if first else ""
    compared = {(one["objective"], one["arm"]): one for one in content["comparisons"]}
    contrasts = content["contrasts"]

    def sign(value: Sequence[float], wanted: int) -> Verdict:
        low, high = (wanted * end for end in (value[1:] if wanted > 0 else value[:0:-1]))
        return "confirmed" if low > 0 else "refuted" if high < 0 else "not confirmed"

    def said(value: Sequence[float], digits: int = 2) -> str:
        return "{0:+.{3}f} [{1:+.{3}f}, {2:+.{3}f}]".format(*value, digits)

    found = [
        Judgement(claim, sign(contrasts[name], wanted), f"{sentence}: {said(contrasts[name])}.")
        for name, (claim, wanted, sentence) in _CONTRASTS.items()
        if name in contrasts
    ]
    if ("causal", "penalty columns") in compared:
        value = compared["causal", "penalty columns"]["loss"]
        sentence = f"Held-out loss with a penalty on 1 + D less that without, causal: {said(value, 4)} nats{late_rule}."
        found.append(Judgement("G32", sign(value, -1), sentence))
    return found


EXPERIMENT: Final = Experiment(
    name="geometry_init",
    question="Does a symmetric initialisation make encoders learn better, and how do S and D grow in training?",
    recipes={"tiny": tiny, "rates": rates, "small": small, "paper": paper, "paper-12": paper_12},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
    packages=("torch", "transformers", "tokenizers", "attnflow"),
)
