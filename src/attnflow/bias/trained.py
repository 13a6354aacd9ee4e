"""`Trained`: what came out of training a bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnflow._core.results import Result


@dataclass(frozen=True)
class Trained(Result):
    """What came out of training a bias; its table is the curve.

    Attributes:
        folder: where everything lies: the bias (`af.bias.load`), training.json (this), curve.csv, curve.png,
            checkpoints, and `model/` if the base model was trained, too.
        steps: optimiser steps.
        before: held-out loss without training, in nats per token.
        after: the same at the end.
        num_parameters: of the bias.
        num_trained: parameters that were trained, of bias and model.
        curve: one entry for each logged step: `step`, `loss`, `learning_rate`, `eval_loss`, and `bias/layer_<n>`, the
            |B| of a layer, as far as they were logged there.
        settings: of the run, by which it is recognised when it goes on.
        versions: of the packages.
    """

    folder: Path
    steps: int
    before: float
    after: float
    num_parameters: int
    num_trained: int
    curve: tuple[dict[str, float], ...]
    settings: dict[str, Any]
    versions: dict[str, str]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """The curve; None where a step has no such number."""
        names = dict.fromkeys(name for entry in self.curve for name in entry)
        return [{name: entry.get(name) for name in names} | {"step": int(entry["step"])} for entry in self.curve]

    @property
    def layers(self) -> list[str]:
        """Names of the columns of |B|, one for each layer."""
        return list(dict.fromkeys(name for entry in self.curve for name in entry if name.startswith("bias/")))

    def __str__(self) -> str:
        return (
            f"held-out loss {self.before:.4f} -> {self.after:.4f} nats per token, in {self.steps:,} steps; "
            f"{self.num_trained:,} parameters trained"
        )
