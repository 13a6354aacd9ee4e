"""S and D at the end of training by learning rate, where every arm has run with every rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from attnflow._core.markup import aligned
from experiments.geometry_init.curves import Choice, Curves
from experiments.runner.statistics import Array, Interval, student

STARTS: Final = ("default", "scaled")
_SETTLED: Final = 0.2  # of the largest distance from the end: within it for good, a layer has settled

SYMMETRY: Final = "S at the end, masked less causal"
DIRECTIONALITY: Final = "D at the end, masked less causal"
LATE_SYMMETRY: Final = "S of late less early layers at the end, masked"
LATE_DIRECTIONALITY: Final = "D of late less early layers at the end, causal"
MIDDLE: Final = "S of the middle layers at the end, causal"
SETTLING: Final = "share of the steps until S has settled, late less early layers, masked"


def choices_of(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """Of each arm, the loss for choosing at every rate, and by how much the best rate is ahead, by seed."""
    found: list[dict[str, Any]] = []
    for one in choices:
        best = np.array(one.losses[one.rate])
        ahead = {
            f"{rate:g}": student((np.array(losses) - best).tolist()).numbers
            for rate, losses in one.losses.items()
            if rate != one.rate
        }
        losses = {f"{rate:g}": float(np.mean(losses)) for rate, losses in one.losses.items()}
        said = {"objective": one.objective, "arm": one.arm, "rate": one.rate, "at_end": one.at_end}
        found.append({**said, "seeds": len(best), "losses": losses, "others less best": ahead})
    return found


def by_rate(every: Sequence[Curves], best: Mapping[tuple[str, str], float]) -> list[dict[str, Any]]:
    """Each contrast from each start: both objectives at one rate, for every rate, and each at its best."""
    of = {(one.objective, one.arm, one.rate): one for one in every}
    rates = sorted({one.rate for one in every})
    found: list[dict[str, Any]] = []

    def add(contrast: str, start: str, which: str, rates: Sequence[float], values: Array) -> None:
        said = {"contrast": contrast, "start": start, "at": which, "rates": list(rates)}
        found.append({**said, "seeds": len(values), "value": student(values.tolist()).numbers})

    for start in STARTS:
        pairs = {f"{rate:g}": (rate, rate) for rate in rates}
        pairs["best"] = (best["masked", start], best["causal", start])
        for which, (one, other) in pairs.items():
            masked, causal = of["masked", start, one], of["causal", start, other]
            for contrast, quantity in ((SYMMETRY, "symmetry"), (DIRECTIONALITY, "directionality")):
                add(contrast, start, which, (one, other), masked.end(quantity) - causal.end(quantity))
            add(LATE_SYMMETRY, start, which, (one,), late(masked.symmetry[:, -1]))
            add(LATE_DIRECTIONALITY, start, which, (other,), late(causal.directionality[:, -1]))
            add(MIDDLE, start, which, (other,), middle(causal))
            add(SETTLING, start, which, (one,), settling(masked))
    return found


def settled(steps: Sequence[int] | Array, curves: Array, share: float = _SETTLED) -> Array:
    """The part of all steps that each curve of [..., steps] needs to stay within a share of where it ends.

    The distance is measured in the largest one that the curve ever has from its end. A curve that never moves has 0.

    >>> float(settled([0, 10, 20, 30, 40], np.array([0.0, 0.5, 0.9, 1.0, 1.0])))
    0.5
    """
    distances = np.abs(curves - curves[..., -1:])
    beyond = distances > share * distances.max(axis=-1, keepdims=True)
    following = np.where(beyond, np.arange(1, len(steps) + 1), 0).max(axis=-1)
    return np.array(steps, dtype=np.float64)[following] / steps[-1]


def late(values: Array) -> Array:
    """From [seeds, layers], the mean of the later half of the layers less that of the earlier half."""
    half = values.shape[1] // 2
    difference: Array = values[:, -half:].mean(axis=1) - values[:, :half].mean(axis=1)
    return difference


def settling(one: Curves) -> Array:
    """[seeds], how much later the later half of the layers settles, in shares of all steps."""
    return late(settled(one.steps, np.moveaxis(one.symmetry, 1, -1)))


def middle(one: Curves) -> Array:
    """[seeds], mean of S over the middle half of the layers."""
    layers = one.symmetry.shape[2]
    found: Array = one.symmetry[:, -1, layers // 4 : layers - layers // 4].mean(axis=1)
    return found


def said_of(choices: Sequence[Mapping[str, Any]], rates: Sequence[Mapping[str, Any]]) -> str:
    lines = [["objective", "arm", "best rate", "loss for choosing by rate", "others less best"]]
    for one in choices:
        losses = ", ".join(f"{rate}: {loss:.4f}" for rate, loss in one["losses"].items())
        ahead = ", ".join("{}: {:+.4f} [{:+.4f}, {:+.4f}]".format(r, *v) for r, v in one["others less best"].items())
        end = " (an end)" if one["at_end"] else ""
        lines.append([one["objective"], one["arm"], f"{one['rate']:g}{end}", losses, ahead])
    more = [["contrast", "start", "rates", "seeds", "value"]]
    more += [[r["contrast"], r["start"], r["at"], str(r["seeds"]), f"{Interval(*r['value']):.2f}"] for r in rates]
    return f"{aligned(lines, left=range(5))}\n{aligned(more, left=range(5))}"
