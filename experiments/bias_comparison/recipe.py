"""The comparison of biases as the runner takes it, and the rules by which it judges claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from experiments.bias_comparison.settings import Comparison, Part, bert, control, llama, paper, small, smollm2, tiny
from experiments.bias_comparison.study import setup
from experiments.bias_comparison.summary import SMALLEST, summarise
from experiments.runner.experiment import Experiment, Judgement, Verdict
from experiments.runner.files import read
from experiments.runner.statistics import Interval


def miniature(config: Comparison) -> Comparison:
    """Two steps of two sequences, models of width 16, one rate, two seeds."""

    def smaller(part: Part) -> Part:
        named, masked = isinstance(part.model, str), part.kind == "masked"
        sizes = part.model if named else bert(16, 2, 2) if masked else llama(16, 2, 2, 8, 16)
        short = replace(part, model=sizes, steps=2, batch_size=2, passes=1, start=part.start and 2)
        return replace(short, rates=part.rates[:1], hidden_dim=64)

    return replace(
        config,
        parts=tuple(smaller(part) for part in config.parts),
        seeds=config.seeds[:2],
        tokenizer=300 if isinstance(config.tokenizer, int) else config.tokenizer,
        rows=min(config.rows, 64),
        held_out=8,
        length=16,
        tested=8,
        dtype="float32",
        measure_every=1,
        save_every=1,
    )


# Claim -> (contrast, sign of the effect that the claim says, what it says in words).
_SIGNS: Final[Mapping[str, tuple[str, int, str]]] = {
    "D7": ("text: loss, guidance less plain", -1, "Held-out loss at equal tokens, guidance less plain training"),
    "D14": (
        "knobs: loss before the first step, He less zero",
        1,
        "Loss before the first step, He's output layer less a zero one",
    ),
    "D16": (
        "depth: accuracy in the middle at 8 lengths, guidance less plain",
        1,
        "Accuracy in the middle at 8 times the length of training, guidance less plain",
    ),
    "D17": ("text: loss, guidance less dense", -1, "Held-out loss, guidance less as many feed-forward parameters"),
    "D18": ("sums: bias of operands less the rest", 1, 'Row-centred bias at "=", numbers less all else'),
    "D20": (
        "tuned: loss, guidance less start",
        -1,
        "Guidance alone tuned to another text, loss less the frozen base's",
    ),
    "D21": (
        "changes: correlation of B with its start, new less same text",
        -1,
        "Correlation of B with its start, tuned to a new text less to the same text",
    ),
    "D22": ("encoder: loss, guidance less plain", -1, "Loss on masked tokens, guidance less plain"),
}
_ALSO: Final[Mapping[str, tuple[str, str]]] = {
    "D7": ("text: loss, guidance less key", "less a bias of the key alone"),
    "D17": ("text: loss, guidance less gate", "less a gate"),
    "D20": ("tuned: loss, guidance less lora", "less LoRA"),
    "D22": ("encoder: loss, guidance less dense", "less as many feed-forward parameters"),
}


def judge(results: Path) -> Sequence[Judgement]:
    """By intervals over seeds that exclude 0, of contrasts named in the README since before the run."""
    content = read(results / "results.json")
    contrasts = {name: Interval(*one["t"]) for name, one in content["contrasts"].items()}
    found: list[Judgement] = []
    for claim, (name, sign, words) in _SIGNS.items():
        if name in contrasts:
            sentence = f"{words}: {contrasts[name]:.3f}"
            if claim in _ALSO and _ALSO[claim][0] in contrasts:
                sentence += f"; {_ALSO[claim][1]}: {contrasts[_ALSO[claim][0]]:.3f}"
            found.append(Judgement(claim, _by_sign(contrasts[name], sign), f"{sentence}."))
    return [*found, *_speed(content["speed"]), *_knobs(contrasts), *_distractors(contrasts)]


def _by_sign(value: Interval, sign: int) -> Verdict:
    low, high = (value.low, value.high) if sign > 0 else (-value.high, -value.low)
    return "confirmed" if low > 0 else "refuted" if high < 0 else "not confirmed"


def _speed(speed: Mapping[str, Any] | None) -> list[Judgement]:
    if speed is None:
        return []
    own, null = speed["speed_up"], speed["null"]
    verdict: Verdict = "confirmed" if own[0] > null[2] else "refuted" if own[0] < null[1] else "not confirmed"
    said = f"Share of the steps saved over plain training {own[0]:.0%}; plain against itself {null[0]:.0%}, 95 % of "
    return [Judgement("D12", verdict, f"{said}its pairs in [{null[1]:.0%}, {null[2]:.0%}].")]


def _knobs(contrasts: Mapping[str, Interval]) -> list[Judgement]:
    """Enough: what wider networks and more layers gain is below the smallest effect of interest, both ends."""
    names = ("knobs: loss, width 64 less width 128", "knobs: loss, width 64 less every layer")
    if not all(name in contrasts for name in names):
        return []
    wider, denser = (contrasts[name] for name in names)
    enough = max(wider.high, denser.high) < SMALLEST
    verdict: Verdict = (
        "confirmed" if enough else "refuted" if max(wider.low, denser.low) > SMALLEST else "not confirmed"
    )
    narrow = contrasts.get("knobs: loss, width 64 less width 16")
    more = "" if narrow is None else f"; less width 16: {narrow:.3f}"
    said = f"Loss of width 64 less width 128: {wider:.3f}; of every other layer less every layer: {denser:.3f}{more}."
    return [Judgement("D13", verdict, said)]


def _distractors(contrasts: Mapping[str, Interval]) -> list[Judgement]:
    name = "distractors: loss of accuracy, guidance less a third of plain"
    if name not in contrasts:
        return []
    own, plain = (contrasts[f"distractors: loss of accuracy, {arm}"] for arm in ("guidance", "plain"))
    verdict = _by_sign(contrasts[name], -1)
    said = f"Accuracy lost to 3 to 5 distractor sentences: guidance {own:.3f}, plain {plain:.3f}"
    if plain.low <= 0:  # nothing to lose a third of
        verdict = "not testable here"
        said += ", which is not clear of 0"
    return [Judgement("D15", verdict, f"{said}.")]


EXPERIMENT: Final = Experiment(
    name="bias_comparison",
    question="Does a learned bias train better than its controls at equal parameters?",
    recipes={"tiny": tiny, "control": control, "smollm2": smollm2, "small": small, "paper": paper},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
    packages=("torch", "transformers", "tokenizers", "peft", "attnflow"),
)
