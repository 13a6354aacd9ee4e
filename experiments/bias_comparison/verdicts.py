"""The rules that judge the paper's claims by the results, and what a verdict says beside its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from experiments.bias_comparison.summary import SMALLEST
from experiments.runner.experiment import Judgement, Verdict
from experiments.runner.files import read
from experiments.runner.statistics import Interval

Contrasts = Mapping[str, Interval]

# Claim -> (contrast, sign of the effect that the claim says, what it says in words).
_SIGNS: Final[Mapping[str, tuple[str, int, str]]] = {
    "D20": (
        "tuned: loss, guidance less start",
        -1,
        "Guidance alone tuned to another text, loss less the frozen base's",
    ),
    "D22": ("encoder: loss, guidance less plain", -1, "Loss on masked tokens, guidance less plain"),
}
_ALSO: Final[Mapping[str, tuple[str, str]]] = {
    "D20": ("tuned: loss, guidance less lora", "less LoRA"),
    "D22": ("encoder: loss, guidance less dense", "less as many feed-forward parameters"),
}
_AS_LARGE: Final = ("key", "lowrank", "dense")  # controls of the same size that are no network on query and key


def judge(results: Path) -> Sequence[Judgement]:
    """By intervals over seeds that exclude 0, of contrasts named in the README since before the run."""
    content = read(results / "results.json")
    contrasts = {name: Interval(*one["t"]) for name, one in content["contrasts"].items()}
    found: list[Judgement] = []
    for claim, (name, sign, words) in _SIGNS.items():
        if name in contrasts:
            sentence = f"{words}: {contrasts[name]:.3f}"
            if _ALSO[claim][0] in contrasts:
                sentence += f"; {_ALSO[claim][1]}: {contrasts[_ALSO[claim][0]]:.3f}"
            found.append(Judgement(claim, by_sign(contrasts[name], sign), f"{sentence}."))
    rules: tuple[Callable[[Contrasts], Sequence[Judgement]], ...] = (
        _text, _recall, _few, _sizes, _shared, _initialisation, _changes,
    )  # fmt: skip
    return [*found, *(one for rule in rules for one in rule(contrasts)), *_sums(contrasts, content["extras"])]


def by_sign(value: Interval, sign: int) -> Verdict:
    """Whether a difference lies on the side of 0 that a claim says."""
    found = value.side * sign
    return "confirmed" if found > 0 else "refuted" if found < 0 else "not confirmed"


def _text(contrasts: Contrasts) -> list[Judgement]:
    """D7, D12, D17, each arm at its own best rate; the differences at equal rates are said with them."""
    names = {arm: f"text: loss, guidance less {arm}" for arm in ("plain", *_AS_LARGE)}
    saved = contrasts.get("text: share of the steps saved, guidance less plain")
    if saved is None or not all(name in contrasts for name in names.values()):
        return []
    loss = {arm: contrasts[name] for arm, name in names.items()}
    better = by_sign(loss["plain"], -1)
    said = f"Held-out loss at equal tokens, each at its best rate, guidance less plain training: {loss['plain']:.4f}"
    said += _at_equal_rates(contrasts, "plain") + "".join(
        f"; less {words}: {loss[arm]:.4f}"
        for arm, words in (("key", "a bias of the key alone"), ("lowrank", "a product of low rank"))
    )
    # What a bias of the key alone gains as well is no gain of a network on query and key.
    empty = better == "confirmed" and any(loss[arm].high >= 0 for arm in _AS_LARGE)
    first = Judgement("D7", better, f"{said}.", ("empty",) if empty else ())
    wider = f"Held-out loss, each at its best rate, guidance less as many feed-forward parameters: {loss['dense']:.4f}"
    return [
        first,
        Judgement(
            "D12", by_sign(saved, 1), f"Share of the steps that guidance saves over plain training: {saved:.3f}."
        ),
        Judgement("D17", by_sign(loss["dense"], -1), f"{wider}{_at_equal_rates(contrasts, 'dense')}."),
    ]


def _at_equal_rates(contrasts: Contrasts, arm: str) -> str:
    start, end = "text: loss at ", f", guidance less {arm}"
    rates = {
        float(name.removeprefix(start).removesuffix(end)): value
        for name, value in contrasts.items()
        if name.startswith(start) and name.endswith(end)
    }
    return "".join(f"; both at {rate:g}: {rates[rate]:.4f}" for rate in sorted(rates))


def _recall(contrasts: Contrasts) -> list[Judgement]:
    """D15: a drop of less than a third of the baseline's. D16: the middle of sequences of 2 and 4 times the length."""
    third = contrasts.get("distractors: loss of accuracy, guidance less a third of plain")
    if third is None:
        return []
    own, plain = (contrasts[f"distractors: loss of accuracy, {arm}"] for arm in ("guidance", "plain"))
    less, key = (contrasts[f"distractors: loss of accuracy, guidance less {arm}"] for arm in ("plain", "key"))
    verdict = by_sign(third, -1)
    said = f"Accuracy lost to 3 to 5 distractor sentences: guidance {own:.3f}, plain {plain:.3f}; difference of the "
    said += (
        f"drops {less:.3f}, from a bias of the key alone {key:.3f}; guidance's drop less a third of plain's {third:.3f}"
    )
    if plain.low <= 0:
        verdict, said = "not testable here", f"{said}; plain loses nothing that is clear of 0"
    empty = verdict == "confirmed" and key.high >= 0
    middle, other = (contrasts[f"depth: accuracy in the middle, guidance less {arm}"] for arm in ("plain", "key"))
    deep = f"Accuracy in the middle at 2 and 4 times the length of training, guidance less plain: {middle:.3f}"
    hollow = by_sign(middle, 1) == "confirmed" and other.low <= 0
    return [
        Judgement("D15", verdict, f"{said}.", ("empty",) if empty else ()),
        Judgement(
            "D16",
            by_sign(middle, 1),
            f"{deep}; less a bias of the key alone: {other:.3f}.",
            ("empty",) if hollow else (),
        ),
    ]


def _few(contrasts: Contrasts) -> list[Judgement]:
    """D25: after tuning to the fewest rows, against plain training and against as many parameters elsewhere."""
    names = {
        (rows, arm): f"few: loss after {rows} rows, guidance less {arm}"
        for rows in (16, 64)
        for arm in ("plain", "dense")
    }
    if not all(name in contrasts for name in names.values()):
        return []
    found = {key: contrasts[name] for key, name in names.items()}
    before = contrasts["few: loss before 16 rows, guidance less plain"]
    verdict = by_sign(found[16, "plain"], -1)
    said = "; ".join(f"{rows} rows, less {arm}: {found[rows, arm]:.4f}" for rows, arm in names)
    empty = verdict == "confirmed" and found[16, "dense"].high >= 0
    text = f"Loss after tuning the whole model to few rows of a new text, trained with guidance from its start, {said}"
    return [Judgement("D25", verdict, f"{text}; before tuning, less plain: {before:.4f}.", ("empty",) if empty else ())]


def _sizes(contrasts: Contrasts) -> list[Judgement]:
    """Enough: what wider networks and more layers gain is below the smallest effect of interest, both ends."""
    names = [f"knobs: loss, width 64 less {arm}" for arm in ("width 128", "every layer", "width 16", "every fourth")]
    if not all(name in contrasts for name in names):
        return []
    wider, denser, narrow, sparser = (contrasts[name] for name in names)
    enough = max(wider.high, denser.high) < SMALLEST
    verdict: Verdict = (
        "confirmed" if enough else "refuted" if max(wider.low, denser.low) > SMALLEST else "not confirmed"
    )
    said = f"Loss of width 64 less width 128: {wider:.3f}; of every other layer less every layer: {denser:.3f}. "
    # The table rises from 16 to 64 and from every fourth to every other layer; without that rise nothing was needed.
    flat = max(-narrow.low, -sparser.low) < SMALLEST
    said += f"Less width 16: {narrow:.3f}; less every fourth layer: {sparser:.3f}"
    said += ", so that the table's rise up to 64 and to every other layer is not seen." if flat else "."
    return [Judgement("D13", verdict, said, ("empty",) if flat and verdict == "confirmed" else ())]


def _shared(contrasts: Contrasts) -> list[Judgement]:
    """D24, a rule that was written after the run."""
    one = contrasts.get("knobs: loss, width 64 less by head")
    if one is None:
        return []
    verdict: Verdict = "confirmed" if one.high < 0 else "refuted" if one.low > SMALLEST else "not confirmed"
    said = f"Loss of one network for all heads less one network a head, of more parameters: {one:.4f}"
    small = max(abs(one.low), abs(one.high)) < SMALLEST
    said += f", less than the {SMALLEST} nats that count as an effect" if small else ""
    return [Judgement("D24", verdict, f"{said} (rule written after the run).")]


def _initialisation(contrasts: Contrasts) -> list[Judgement]:
    before = contrasts.get("knobs: loss before the first step, He less zero")
    if before is None:
        return []
    verdict = by_sign(before, 1)
    said = f"Loss before the first step, Kaiming's output layer less a zero one: {before:.4f}"
    small = verdict == "confirmed" and before.high < SMALLEST
    return [Judgement("D14", verdict, said + (": higher, but no spike." if small else "."))]


def _sums(contrasts: Contrasts, extras: Mapping[str, Any]) -> list[Judgement]:
    one = contrasts.get("sums: bias of operands less the rest")
    if one is None:
        return []
    own, plain = (max(extras[f"sums {arm}"]["sums"]["mass"]) for arm in ("guidance", "plain"))
    verdict = by_sign(one, 1)
    said = f'Row-centred bias at "=", numbers less all else: {one:.2f}. '
    said += f"In one layer {own:.0%} of the attention there lies on the numbers, and {plain:.0%} without a bias"
    as_much = plain > 0.5
    said += ": plain attention points there as well." if as_much else "."
    return [Judgement("D18", verdict, said, ("empty",) if as_much and verdict == "confirmed" else ())]


def _changes(contrasts: Contrasts) -> list[Judgement]:
    one = contrasts.get("changes: correlation of B with its start, new less same text")
    if one is None:
        return []
    said = f"Correlation of B with its start, tuned to a new text less to the same text: {one:.3f}"
    moved = ": B moves more. Whether what it does then shows the task is not tested."
    verdict = by_sign(one, -1)
    return [Judgement("D21", verdict, said + (moved if verdict == "confirmed" else "."))]
