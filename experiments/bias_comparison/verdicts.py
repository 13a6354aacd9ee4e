"""What the contrasts say of the paper's claims, by the one rule, and what a verdict says beside its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from experiments.runner.experiment import Judgement
from experiments.runner.files import read
from experiments.runner.statistics import Interval
from experiments.runner.verdict import ACCURACY, LOSS, STEPS, UNTESTED, Decision, decide, empty, jointly, no_more

Contrasts = Mapping[str, Interval]

ATTENTION: Final = 0.1  # of a score in front of the softmax: a weight changes by a tenth
CORRELATION: Final = 0.1
_AS_LARGE: Final = ("key", "lowrank", "dense")  # controls of the same size that are no network on query and key
_OPEN_RATE: Final = (
    "The best rate of guidance lies at the low end of its range, and was chosen on one of the seeds that are shown."
)


def judge(results: Path) -> Sequence[Judgement]:
    """Of contrasts that the README names, and with smallest effects that it gives."""
    content = read(results / "results.json")
    contrasts = {name: Interval(*one["t"]) for name, one in content["contrasts"].items()}
    rules: tuple[Callable[[Contrasts], Sequence[Judgement]], ...] = (
        _tuned, _encoder, _text, _recall, _few, _sizes, _shared, _initialisation, _changes,
    )  # fmt: skip
    return [*(one for rule in rules for one in rule(contrasts)), *_sums(contrasts, content["extras"])]


def _with(contrasts: Contrasts, what: str, *arms: str) -> list[Interval]:
    """Guidance less each arm in `what`, if all of them are there."""
    names = [f"{what}, guidance less {arm}" for arm in arms]
    return [contrasts[name] for name in names] if all(name in contrasts for name in names) else []


def _tuned(contrasts: Contrasts) -> list[Judgement]:
    """D20, whose controls are tuned alone, too."""
    found = _with(contrasts, "tuned: loss", "start", "lowrank", "lora")
    if not found:
        return []
    start, lowrank, lora = found
    decision = decide(start, "below", LOSS)
    said = (
        f"Guidance alone tuned to another text, loss less the frozen base's: {start:.3f}; less a product of low rank: "
    )
    said += f"{lowrank:.3f}; less LoRA: {lora:.3f}. {_OPEN_RATE}"
    return [Judgement.of("D20", decision, said, *empty(decision, "below", (lowrank, lora)))]


def _encoder(contrasts: Contrasts) -> list[Judgement]:
    found = _with(contrasts, "encoder: loss", "plain", "dense")
    if not found:
        return []
    decision = decide(found[0], "below", LOSS)
    said = f"Loss on masked tokens, guidance less plain: {found[0]:.3f}; less as many feed-forward parameters: "
    return [Judgement.of("D22", decision, f"{said}{found[1]:.3f}.", *empty(decision, "below", found[1:]))]


def _text(contrasts: Contrasts) -> list[Judgement]:
    """D7, D12, D17, each arm at its own best rate; the differences at equal rates are said with them."""
    found = _with(contrasts, "text: loss", "plain", *_AS_LARGE)
    saved = contrasts.get("text: share of the steps saved, guidance less plain")
    if saved is None or not found:
        return []
    plain, key, lowrank, dense = found
    better = decide(plain, "below", LOSS)
    said = f"Held-out loss at equal tokens, each at its best rate, guidance less plain training: {plain:.4f}"
    said += f"{_at_equal_rates(contrasts, 'plain')}; less a bias of the key alone: {key:.4f}"
    wider = f"Held-out loss, each at its best rate, guidance less as many feed-forward parameters: {dense:.4f}"
    faster = f"Share of the steps that guidance saves over plain training: {saved:.3f}."
    return [
        Judgement.of(
            "D7", better, f"{said}; less a product of low rank: {lowrank:.4f}.", *empty(better, "below", found[1:])
        ),
        Judgement.of("D12", decide(saved, "above", STEPS), faster, "rule after"),
        Judgement.of("D17", decide(dense, "below", LOSS), f"{wider}{_at_equal_rates(contrasts, 'dense')}."),
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
    own, theirs = (contrasts[f"distractors: loss of accuracy, {arm}"] for arm in ("guidance", "plain"))
    less, key = _with(contrasts, "distractors: loss of accuracy", "plain", "key")
    drop = decide(third, "below", ACCURACY)
    said = f"Accuracy lost to 3 to 5 distractor sentences: guidance {own:.3f}, plain {theirs:.3f}; difference of the "
    said += (
        f"drops {less:.3f}, from a bias of the key alone {key:.3f}; guidance's drop less a third of plain's {third:.3f}"
    )
    if not decide(theirs, "above", 0.0).holds:
        drop, said = Decision("not testable here"), f"{said}; plain loses nothing that is clear of 0"
    middle, other = _with(contrasts, "depth: accuracy in the middle", "plain", "key")
    deep = decide(middle, "above", ACCURACY)
    retrieved = f"Accuracy in the middle at 2 and 4 times the length of training, guidance less plain: {middle:.3f}"
    return [
        Judgement.of("D15", drop, f"{said}.", "rule after", *empty(drop, "below", (key,))),
        Judgement.of(
            "D16",
            deep,
            f"{retrieved}; less a bias of the key alone: {other:.3f}.",
            "rule after",
            *empty(deep, "above", (other,)),
        ),
    ]


def _few(contrasts: Contrasts) -> list[Judgement]:
    """D25: after tuning to the fewest rows, against plain training and against as many parameters elsewhere."""
    arms = ("plain", "dense")
    found = {rows: _with(contrasts, f"few: loss after {rows} rows", *arms) for rows in (16, 64)}
    if not all(found.values()):
        return []
    before = contrasts["few: loss before 16 rows, guidance less plain"]
    decision = decide(found[16][0], "below", LOSS)
    said = "; ".join(
        f"{rows} rows, less {arm}: {one:.4f}"
        for rows, both in found.items()
        for arm, one in zip(arms, both, strict=True)
    )
    text = f"Loss after tuning the whole model to few rows of a new text, trained with guidance from its start, {said}"
    tags = empty(decision, "below", found[16][1:])
    return [Judgement.of("D25", decision, f"{text}; before tuning, less plain: {before:.4f}.", *tags)]


def _sizes(contrasts: Contrasts) -> list[Judgement]:
    """Enough: what wider networks and more layers gain is below the smallest effect that matters."""
    names = [f"knobs: loss, width 64 less {arm}" for arm in ("width 128", "every layer", "width 16", "every fourth")]
    if not all(name in contrasts for name in names):
        return []
    wider, denser, narrow, sparser = (contrasts[name] for name in names)
    decision = jointly(no_more(wider, LOSS), no_more(denser, LOSS))
    said = f"Loss of width 64 less width 128: {wider:.3f}; of every other layer less every layer: {denser:.3f}. "
    # The table rises from 16 to 64 and from every fourth to every other layer; without that rise nothing was needed.
    flat = not any(decide(one, "below", LOSS).holds for one in (narrow, sparser))
    said += f"Less width 16: {narrow:.3f}; less every fourth layer: {sparser:.3f}"
    said += ", so that the table's rise up to 64 and to every other layer is not seen." if flat else "."
    return [Judgement.of("D13", decision, said, *(("empty",) if flat else ()))]


def _shared(contrasts: Contrasts) -> list[Judgement]:
    one = contrasts.get("knobs: loss, width 64 less by head")
    if one is None:
        return []
    said = f"Loss of one network for all heads less one network a head, of more parameters: {one:.4f}."
    return [Judgement.of("D24", decide(one, "below", LOSS), said, "rule after")]


def _initialisation(contrasts: Contrasts) -> list[Judgement]:
    before = contrasts.get("knobs: loss before the first step, He less zero")
    if before is None:
        return []
    said = f"Loss before the first step, Kaiming's output layer less a zero one: {before:.4f}, "
    decision = decide(before, "above", LOSS)
    said += "where a spike was claimed" if not decision.holds else "a spike"
    return [Judgement.of("D14", decision, f"{said}.")]


def _sums(contrasts: Contrasts, extras: Mapping[str, Any]) -> list[Judgement]:
    one = contrasts.get("sums: bias of operands less the rest")
    if one is None:
        return []
    own, plain = (max(extras[f"sums {arm}"]["sums"]["mass"]) for arm in ("guidance", "plain"))
    said = f'Row-centred bias at "=", numbers less all else: {one:.2f}. '
    said += f"In one layer {own:.0%} of the attention there lies on the numbers, and {plain:.0%} without a bias"
    as_much = plain > 0.5
    said += ": plain attention points there as well." if as_much else "."
    tags = ("empty",) if as_much else ()
    return [Judgement.of("D18", decide(one, "above", ATTENTION), said, "rule after", *tags)]


def _changes(contrasts: Contrasts) -> list[Judgement]:
    """D21: whether B moves, and whether the way that it moves shows the task, which no run has looked at."""
    one = contrasts.get("changes: correlation of B with its start, new less same text")
    if one is None:
        return []
    moves = decide(one, "below", CORRELATION)
    said = f"Correlation of B with its start, tuned to a new text less to the same text: {one:.3f}. "
    said += "B moves more" if moves.holds else "B does not move more"
    said += "; whether what it does then shows the task is not tested."
    return [Judgement.of("D21", jointly(moves, UNTESTED), said, "rule after")]
