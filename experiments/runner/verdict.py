"""The one rule that turns an interval into a verdict on a claim.

A claim says where a quantity lies: above zero, below zero, or at zero. The smallest effect that matters is stated
before the run, in the unit of the quantity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from experiments.runner.statistics import Interval

Verdict = Literal["confirmed", "refuted", "no effect", "not confirmed", "corrected", "not testable here"]
Tag = Literal["empty", "floor", "small", "superseded", "rule after"]
Side = Literal["above", "below", "none"]  # of zero, where the claim says that the quantity lies

_WORST_FIRST: Final[Sequence[Verdict]] = ("refuted", "no effect", "not confirmed", "confirmed")
_SIGNS: Final = {"above": 1, "below": -1, "none": 0}


@dataclass(frozen=True)
class Decision:
    verdict: Verdict
    small: bool = False  # clear of zero, and the mean is below the smallest effect

    @property
    def tags(self) -> tuple[Tag, ...]:
        return ("small",) if self.small else ()


def decide(value: Interval, claimed: Side, smallest: float) -> Decision:
    """The verdict on a claim by the 95 % interval of one quantity.

    - confirmed: the interval is clear of zero on the claimed side, and the mean is at least `smallest` from zero. A
      claim of no difference is confirmed if the interval lies within `smallest` of zero.
    - refuted: the interval is clear of zero on the other side. A claim of no difference is refuted if the interval is
      clear of zero and the mean is at least `smallest` from zero.
    - no effect: the interval lies within `smallest` of zero, on both sides.
    - not confirmed: everything else.

    The first that applies is the verdict. `small` marks an interval that is clear of zero with a mean below `smallest`.

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


def jointly(*parts: Decision) -> Decision:
    """The verdict on a claim of several parts, all of which must hold.

    Refuted if one part is; else no effect if one part has none; confirmed if all are; not confirmed otherwise. It is
    small if a part that decides it is.
    """
    if not parts:
        raise ValueError("expected at least one part")
    worst = next(verdict for verdict in _WORST_FIRST if any(part.verdict == verdict for part in parts))
    return Decision(worst, any(part.small for part in parts if part.verdict == worst))
