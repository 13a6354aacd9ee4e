"""Initialisations and penalties of the bilinear form, as the runner takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from experiments.geometry_init.rates import MIDDLE, SETTLING, judge_rates
from experiments.geometry_init.study import Initialisation, paper, paper_12, rates, setup, sizes, small, tiny
from experiments.geometry_init.summary import summarise
from experiments.runner.experiment import Experiment, Judgement, Tag, Verdict
from experiments.runner.files import read

# Name in the results -> (claim, the sign that it asks for, how it is said).
_CONTRASTS: Final = {
    "symmetry, masked less causal": ("G9", 1, "Symmetry at the end of training, masked less causal"),
    "directionality, masked less causal": ("G10", 1, "Directionality (columns: negative), masked less causal"),
    MIDDLE: ("G30", -1, MIDDLE),
    SETTLING: ("G31", -1, "Share of the steps until S has settled, late less early layers, masked"),
    "symmetry, late less early layers, masked": ("G11", 1, "Symmetry of late less early layers, masked"),
    "directionality, late less early layers, causal": (
        "G12",
        -1,
        "Directionality of late less early layers, causal",
    ),
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
    """By intervals over seeds that exclude 0; the rule stands in the README since before the run."""
    content = read(results / "results.json")
    # Encoders of this scale gain 0.2 nats over a table of frequencies: how W_q and W_k begin can hardly show yet.
    first = read(results / "study.json")["scale"] == "tiny"
    tags: tuple[Tag, ...] = ("floor",) if first else ()
    late_rule = " (rule written after the run)" if first else ""
    compared = {(one["objective"], one["arm"]): one for one in content["comparisons"]}
    contrasts = content["contrasts"]

    def sign(value: Sequence[float], wanted: int) -> Verdict:
        low, high = (wanted * end for end in (value[1:] if wanted > 0 else value[:0:-1]))
        return "confirmed" if low > 0 else "refuted" if high < 0 else "not confirmed"

    def said(value: Sequence[float], digits: int = 2) -> str:
        return "{0:+.{3}f} [{1:+.{3}f}, {2:+.{3}f}]".format(*value, digits)

    found = judge_rates(content) if "rates" in content else []
    if ("masked", "symmetric") in compared:
        one, small_one = compared["masked", "symmetric"], compared.get(("masked", "symmetric small"))
        beside = "" if small_one is None else f"; at the scale of the default {said(small_one['loss'], 4)}"
        sentence = f"Held-out loss of symmetric less scale-matched: {said(one['loss'], 4)} nats{beside}."
        found.append(Judgement("G13", sign(one["loss"], -1), sentence, tags))
        fast = one["speed_up"] > one["null"][2]
        slow = one["speed_up"] < one["null"][1]
        null = f"{one['null'][0]:.0%}, 95 % of its pairs in [{one['null'][1]:.0%}, {one['null'][2]:.0%}]"
        sentence = f"Speed-up over the scale-matched control {one['speed_up']:.0%}; control against itself {null}."
        verdict: Verdict = "confirmed" if fast else "refuted" if slow else "not confirmed"
        found.append(Judgement("G14", verdict, sentence, tags))
    # One rate for both objectives, or the difference is not of objectives alone.
    used = {one["objective"]: one["rate"] for one in content["arms"] if one["arm"] == "default"}
    for name, (claim, wanted, sentence) in _CONTRASTS.items():
        if name in contrasts and claim not in {one.claim for one in found}:
            uneven = claim in ("G9", "G10") and len(set(used.values())) > 1
            more = f", but with a rate of {used['masked']:g} and one of {used['causal']:g}" if uneven else ""
            more += late_rule if claim in ("G30", "G31") else ""
            verdict = "not confirmed" if uneven else sign(contrasts[name], wanted)
            found.append(Judgement(claim, verdict, f"{sentence}: {said(contrasts[name])}{more}."))
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
