"""Initialisations and penalties of the bilinear form, as the runner takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from experiments.geometry_init.rates import STARTS
from experiments.geometry_init.study import Initialisation, paper, paper_12, rates, setup, sizes, small, tiny
from experiments.geometry_init.summary import summarise
from experiments.runner.experiment import Experiment, Judgement
from experiments.runner.files import read
from experiments.runner.statistics import Interval
from experiments.runner.verdict import LOSS, SCORE, decide, jointly, possible


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
    """By intervals over seeds, with smallest effects of after the run; geometry_training judges the rest."""
    content = read(results / "results.json")
    compared = {(one["objective"], one["arm"]): one for one in content["comparisons"]}
    contrasts = {name: Interval(*value) for name, value in content["contrasts"].items()}
    found = _symmetric(contrasts)
    if ("causal", "penalty columns") in compared:
        value = Interval(*compared["causal", "penalty columns"]["loss"])
        sentence = (
            f"Held-out loss with a penalty on 1 + D, of one strength, less that without, causal: {value:.4f} nats."
        )
        found.append(Judgement.of("G32", possible(decide(value, "below", LOSS)), sentence, "rule after"))
    return found


def _symmetric(contrasts: Mapping[str, Interval]) -> list[Judgement]:
    """G15, both halves; G16 against the default start, as the paper has it, with the start of equal scale beside."""
    lost = contrasts.get("symmetry, end less start, symmetric")
    above = contrasts.get("symmetry at the end, symmetric less scaled")
    default, scaled = (contrasts.get(f"spread of symmetry over layers, symmetric less {arm}") for arm in STARTS)
    found: list[Judgement] = []
    if lost and above:
        decision = jointly(decide(lost, "below", SCORE), decide(above, "above", SCORE))
        sentence = (
            f"Symmetry at the end less at the start: {lost:.2f}; at the end, symmetric less scaled start: {above:.2f}."
        )
        found.append(Judgement.of("G15", decision, sentence, "rule after"))
    if default and scaled:
        sentence = (
            f"Range of S over layers, symmetric less default start: {default:.3f}; less scaled start: {scaled:.3f}."
        )
        found.append(Judgement.of("G16", decide(default, "below", SCORE), sentence, "rule after"))
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
