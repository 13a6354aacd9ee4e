"""The probe of encoders as the runner takes it, and the rules that judge the claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from experiments.bias_comparison.settings import bert
from experiments.encoder_probe.study import Probe, setup
from experiments.encoder_probe.summary import HEADS, summarise
from experiments.runner.experiment import Experiment, Judgement
from experiments.runner.files import read
from experiments.runner.statistics import Interval, said
from experiments.runner.verdict import ACCURACY, decide, jointly, partly

ASYMMETRIC: Final = 0.05  # antisymmetric share of scores


def miniature(config: Probe) -> Probe:
    """Two steps of four sentences, a width of 16, two seeds, no real encoder."""
    return replace(
        config,
        sizes={**bert(16, 2, 2), "initializer_range": 0.1},
        hidden_dim=64,
        rates=config.rates[:1],
        seeds=config.seeds[:2],
        choosing=1,
        steps=2,
        batch_size=4,
        tested=4,
        looked_at=2,
        encoder="untrained",
        sentences=2,
    )


def judge(results: Path) -> Sequence[Judgement]:
    """By the rules that stand in the README since before the run."""
    content = read(results / "results.json")
    found = {name: Interval(*one["t"]) for name, one in content["quantities"].items()}
    return [*_links(found), *_symmetry(content["symmetry"])]


def _links(found: dict[str, Interval]) -> list[Judgement]:
    """D26: do links point, and does it help?"""
    pairs = [f"{kind} to {head}" for kind, head in HEADS.items()]
    needed = [f"B, {pair}: less {other}" for pair in pairs for other in ("half", "random")]
    way = "B, effect and cause, one way: less half"
    gains = [f"right, far: guidance less {arm}" for arm in ("plain", "key", "dense")]
    if not all(name in found for name in (*needed, way, *gains)):
        return []
    points = jointly(*(decide(found[name], "above", ACCURACY) for name in needed))
    helps = jointly(*(decide(found[name], "above", ACCURACY) for name in gains))
    one_way = decide(found[way], "above", ACCURACY)
    decision = partly(points, one_way, helps)
    plain = [f"scores of plain, {pair}: less half" for pair in pairs]
    attends = jointly(*(decide(found[name], "above", ACCURACY) for name in plain))

    def share(name: str) -> str:
        return said([min(max(one, 0.0), 1.0) for one in found[name].less(-0.5).numbers], ".0%")  # no share lies beyond

    shares = ", ".join(
        f"{pair} {share(f'B, {pair}: less half')} (plain attention's scores {share(name)})"
        for pair, name in zip(pairs, plain, strict=True)
    )
    sentence = (
        f"Share of sentences in which the row-centred B is higher at the right word than at distractors: {shares}; "
        f"higher from effect to cause than back: {share(way)}. Linked words filled in rightly in longer "
        f"sentences, guidance less plain: {found[gains[0]]:.3f}, less key: {found[gains[1]]:.3f}, less "
        f"dense: {found[gains[2]]:.3f}."
    )
    return [Judgement.of("D26", decision, sentence, *(("empty",) if attends.holds else ()))]


def _symmetry(content: dict[str, Any] | None) -> list[Judgement]:
    """D27: the mean over layers in the kindest reading, which is that of words alone with rows and columns centred."""
    if content is None or content["encoder"] == "untrained":
        return []
    heads = content["heads"]
    real, random = (heads[name]["words"] for name in ("real", "random"))
    kind, layers = real["double-centred"], Interval(*content["layers"]["words"]["double-centred"])
    sentence = (
        f"Antisymmetric share (0: symmetric, 0.5: unrelated) in the median head of {content['encoder']} on "
        f"{content['sentences']} sentences: scores {real['scores'][0]:.2f}, with rows and columns centred "
        f"{kind[0]:.2f} (least head {kind[3]:.2f}; mean over layers {layers:.2f}), weights "
        f"{real['weights'][0]:.2f}; a random network {random['double-centred'][0]:.2f}. "
        "Scores are symmetric for all inputs only if W_q^T W_k is, and weights not even then."
    )
    return [Judgement.of("D27", decide(layers, "none", ASYMMETRIC), sentence, "rule after")]


EXPERIMENT: Final = Experiment(
    name="encoder_probe",
    question="Does a dense bias in an encoder point from a word to the one that it depends on, and does that help?",
    recipes={"tiny": Probe},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
    packages=("torch", "transformers", "attnflow"),
)
