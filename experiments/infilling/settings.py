"""What is trained and filled, at each scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from experiments.hasse.arms import Arm
from experiments.hasse.settings import Training
from experiments.hasse.settings import paper as hasse_paper
from experiments.hasse.settings import small as hasse_small


@dataclass(frozen=True)
class Way:
    arm: str  # whose model does it
    per_pass: int | None  # letters that a pass fills; None for a causal model, which writes on from the left side


@dataclass(frozen=True)
class Infilling(Training):
    """What is trained, as in the experiment hasse, with arms of its own. The defaults are the scale "tiny"."""

    layers: tuple[int, ...] = (4,)  # one number
    blocks: tuple[int, ...] = (4,)  # one number, the tokens of a gap
    depths: tuple[int, ...] = ()
    repeats: tuple[int, ...] = ()
    measure_every: int = 200
    agreed: int = 4  # held-out rows whose gaps are compared with the merged task

    @property
    def block(self) -> int:
        return self.blocks[0]

    @property
    def firsts(self) -> Sequence[int]:
        """Where the gaps of a row begin: every block but the first and the last, each filled alone."""
        return range(self.block, self.length - self.block, self.block)

    @property
    def arms(self) -> dict[str, Arm]:
        """By name; both kinds of gaps are causal for the first half of the steps."""
        layers = self.layers[-1]
        return {
            "causal": Arm("causal", layers),
            "one shot": Arm("gaps", layers, self.block, warm=True),
            "random": Arm("random gaps", layers, self.block, warm=True),
        }

    @property
    def ways(self) -> dict[str, Way]:
        return {
            "causal": Way("causal", None),
            "one shot": Way("one shot", self.block),
            "random, one shot": Way("random", self.block),
            "random, half": Way("random", self.block // 2),
            "random, one by one": Way("random", 1),
        }


def _of(training: Training) -> Infilling:
    """The same text, sizes and schedule, with gaps of four tokens."""
    own = ("layers", "blocks", "depths", "repeats")
    same: dict[str, Any] = {one.name: getattr(training, one.name) for one in fields(Training) if one.name not in own}
    return Infilling(**same, layers=training.layers[-1:])


def tiny() -> Infilling:
    """One CPU core; the README says how long."""
    return Infilling()


def small() -> Infilling:
    """One GPU: rows of 256 bytes of Shakespeare, 8 layers of width 256."""
    return _of(hasse_small())


def paper() -> Infilling:
    """FineWeb-Edu, 12 layers of width 768; the paper fills no gaps, this is the field's size."""
    return _of(hasse_paper())
