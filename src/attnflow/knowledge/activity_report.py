"""`ActivityReport`: the entries that are active for a token, and those that never are, layer by layer.

Beside `usage`, which counts them in a model, so that a report opens where no transformers is installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from attnflow._core.checks import preview
from attnflow._core.markup import aligned
from attnflow._core.results import Result


@dataclass(frozen=True)
class LayerActivity:
    """The active entries of one layer, counted over tokens; for each token, the sum over heads."""

    layer: int  # the number of the layer
    tokens: int  # how many tokens were counted
    entries: int  # how many entries the layer may read
    read_all: bool  # whether all of them were read; if not, the counts cover the entries that were
    mean: float  # active entries per token
    maximum: int  # the most active entries of any token
    dead: int  # entries that were never active in this layer


@dataclass(frozen=True)
class ActivityReport(Result):
    """Active and dead entries of all layers."""

    layers: tuple[LayerActivity, ...]  # in their order
    entries: int  # how many entries the layers may read
    dead: tuple[int, ...]  # ids of the entries that were never active in any layer

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each layer."""
        return [asdict(one) for one in self.layers]

    def __str__(self) -> str:
        head = ["layer", "tokens", "entries", "mean active", "share", "max active", "never active"]
        rows = [
            [
                str(one.layer),
                f"{one.tokens:,}",
                f"{one.entries:,}",
                f"{one.mean:,.1f}{'' if one.read_all else '*'}",
                f"{100 * one.mean / max(one.entries, 1):.1f}%",
                f"{one.maximum:,}",
                f"{one.dead:,}",
            ]
            for one in self.layers
        ]
        lines = [aligned([head, *rows]), f"never active in any layer: {len(self.dead):,} of {self.entries:,} entries"]
        if self.dead:
            lines[-1] += f": {preview(self.dead)}"
        if not all(one.read_all for one in self.layers):
            lines.append("* counted among the entries that were read")
        return "\n".join(lines)
