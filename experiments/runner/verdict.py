"""The one rule that turns an interval into a verdict on a claim.

A claim says where a quantity lies: above zero, below zero, or at zero. The smallest effect that matters is stated in
the unit of the quantity, before the run. A claim that names a bar, such as "right in 90 %", is about the quantity less
its bar.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from experiments.runner.statistics import Interval

Verdict = Literal["confirmed", "refuted", "no effect", "not confirmed", "corrected", "not testable here"]
Tag = Literal["empty", "floor", "small", "superseded", "rule after"]
Side = Literal["above", "below", "none"]  # of zero, where the claim says that the quantity lies

LOSS: Final = 0.02  # nats per token: the smallest difference of losses that matters, in every experiment
ACCURACY: Final = 0.02  # of all answers
SCORE: Final = 0.05  # of the scores S and D, which lie in [-1, 1]
STEPS: Final = 0.05  # of the steps of training

# What the words of a verdict mean, in the order in which they are tried.
MEANINGS: Final[Mapping[Verdict, str]] = {
    "confirmed": "the 95 % interval of the effect is clear of zero on the claim's side, and the mean is at least the "
    "smallest effect that matters. A claim of no difference is confirmed if the interval lies within the smallest "
    "effect of zero, and one about all masks or all weights by a proof or a test.",
    "refuted": "the interval is clear of zero on the other side, or there is a counterexample. A claim of no "
    "difference is refuted if the interval is clear of zero and the mean is at least the smallest effect.",
    "no effect": "the interval lies within the smallest effect of zero, on both sides.",
    "not confirmed": "everything else. The claim may hold or not.",
    "corrected": "something close to the claim holds, and the table says what. The printed statement is wrong, or "
    "leaves out what it needs.",
    "not testable here": "it takes a model, data or hardware that we do not have. The table says which.",
}
OF_PARTS: Final = (
    "Of a claim of several parts all must hold: it is refuted if one part is, confirmed if all are, without effect if "
    "one part has none and none is confirmed, and otherwise not confirmed. Where the experiment names a main part, "
    "that decides alone unless it is confirmed; if it is, and another part is refuted or without effect, the claim is "
    "corrected. What can be done or could help is not refuted by an attempt that fails: it is not confirmed. "
    "Of two scales the larger one decides, and of two measures the main one; what one of them confirms and the other "
    "refutes is not confirmed."
)
TAGS: Final[Mapping[Tag, str]] = {
    "empty": "the verdict follows its rule and says little, because a control does as well, or as badly.",
    "floor": "the model is too weak to show the effect, with and without what is tested.",
    "small": "the interval is clear of zero, and the mean is below the smallest effect.",
    "superseded": "another experiment answers the question better, and the table names it.",
    "rule after": "the smallest effect or the contrast was written after the run. All others were committed before it.",
}

_SIGNS: Final = {"above": 1, "below": -1, "none": 0}


@dataclass(frozen=True)
class Decision:
    verdict: Verdict
    small: bool = False  # clear of zero, and the mean is below the smallest effect

    @property
    def tags(self) -> tuple[Tag, ...]:
        return ("small",) if self.small else ()

    @property
    def holds(self) -> bool:
        return self.verdict == "confirmed"


UNTESTED: Final = Decision("not confirmed")  # a part of a claim on which there is no evidence


def decide(value: Interval, claimed: Side, smallest: float) -> Decision:
    """The verdict on a claim by the 95 % interval of one quantity: the first of `MEANINGS` that applies.

    `small` marks an interval that is clear of zero with a mean below `smallest`.

    >>> decide(Interval(0.03, 0.01, 0.05), "above", 0.02).verdict
    'confirmed'
    >>> decide(Interval(-0.001, -0.002, -0.0005), "above", 0.02)
    Decision(verdict='refuted', small=True)
    >>> decide(Interval(0.001, -0.002, 0.004), "above", 0.02).verdict
    'no effect'
    """
    if smallest < 0:
        raise ValueError(f"expected a smallest effect of at least 0, got {smallest}")
    within = -smallest <= value.low and value.high <= smallest
    large = abs(value.mean) >= smallest
    small = value.side != 0 and not large
    if claimed == "none":
        if within:
            return Decision("confirmed", small)
        return Decision("refuted" if value.side and large else "not confirmed", small)
    side = value.side * _SIGNS[claimed]
    if side > 0 and large:
        return Decision("confirmed")
    if side < 0:
        return Decision("refuted", small)
    return Decision("no effect" if within else "not confirmed", small)


def no_more(excess: Interval, margin: float) -> Decision:
    """The verdict on a claim that something is as good as another, by what it costs more: less than the margin."""
    return decide(excess.less(margin), "below", 0.0)


def exactly(exceptions: int, checked: int) -> Decision:
    """The verdict on a claim without exceptions, by how many were found: one is a counterexample."""
    return Decision("refuted") if exceptions else Decision("confirmed") if checked else UNTESTED


def jointly(*parts: Decision) -> Decision:
    """The verdict on a claim of several parts, all of which must hold, as `OF_PARTS` has it.

    It is small if a part that has this verdict is.
    """
    if not parts:
        raise ValueError("expected at least one part")
    verdicts = [part.verdict for part in parts]
    worst: Verdict = "not confirmed"
    if "refuted" in verdicts:
        worst = "refuted"
    elif all(part.holds for part in parts):
        worst = "confirmed"
    elif "no effect" in verdicts and "confirmed" not in verdicts:
        worst = "no effect"
    return Decision(worst, any(part.small for part in parts if part.verdict == worst))


def partly(main: Decision, *others: Decision) -> Decision:
    """As `jointly`, of a claim with a main part: that decides alone unless it is confirmed.

    If it is, and another part is refuted or without effect, the claim is corrected.
    """
    if not main.holds:
        return main
    if {"refuted", "no effect"} & {one.verdict for one in others}:
        return Decision("corrected")
    return jointly(main, *others)


def possible(attempt: Decision) -> Decision:
    """The verdict on a claim that something can be done or could help, by one attempt."""
    return UNTESTED if attempt.verdict == "refuted" else attempt


def uncontradicted(main: Decision, other: Decision) -> Decision:
    """The verdict of the larger scale, or of the main measure, unless one confirms what the other refutes."""
    return UNTESTED if {main.verdict, other.verdict} == {"confirmed", "refuted"} else main


def empty(decision: Decision, claimed: Side, less_controls: Iterable[Interval]) -> tuple[Tag, ...]:
    """The tag, if what is tested less a control is not clear of zero on the side of the verdict."""
    side = _SIGNS[claimed] * (-1 if decision.verdict == "refuted" else 1)
    return ("empty",) if any(one.side != side for one in less_controls) else ()
