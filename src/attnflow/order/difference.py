"""`OrderDifference`: which pairs one flow has and another has not, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnflow._core.markup import plural
from attnflow._core.results import Result
from attnflow.masks.mask import Mask

_SHOWN = 8  # layers that a summary lists
_PAIRS = 5  # pairs that it lists of each

Pair = tuple[int, int]


@dataclass(frozen=True)
class LayerDifference:
    """How one layer differs.

    Attributes:
        layer: its number; None where one mask stands for all layers.
        extra: number of pairs that the new flow has and the old one has not.
        missing: number of pairs that the old flow has and the new one has not.
        extra_pairs: the first of them, (query, key).
        missing_pairs: the first of them.
    """

    layer: int | None
    extra: int
    missing: int
    extra_pairs: tuple[Pair, ...]
    missing_pairs: tuple[Pair, ...]


@dataclass(frozen=True, repr=False)
class OrderDifference(Result):
    """Where the flow of one model, version or backend differs from that of another.

    Attributes:
        layers: those that differ, first layer first.
        compared: how many were compared.
    """

    layers: tuple[LayerDifference, ...]
    compared: int

    @property
    def ok(self) -> bool:
        """Whether the two are the same."""
        return not self.layers

    def rows(self) -> list[dict[str, object]]:
        """One row for each layer that differs: its number, how many pairs are extra and missing."""
        return [{"layer": each.layer, "extra": each.extra, "missing": each.missing} for each in self.layers]

    def __repr__(self) -> str:
        return f"<OrderDifference {self._summary()}>"

    def __str__(self) -> str:
        lines = [self._summary()]
        for each in self.layers[:_SHOWN]:
            place = "" if each.layer is None else f"layer {each.layer}: "
            parts = [
                f"{plural(count, f'{what} pair')} (query, key): {_list(pairs, count)}"
                for what, count, pairs in (
                    ("extra", each.extra, each.extra_pairs),
                    ("missing", each.missing, each.missing_pairs),
                )
                if count
            ]
            lines.append(place + "; ".join(parts))
        if len(self.layers) > _SHOWN:
            lines.append(f"and {len(self.layers) - _SHOWN} more")
        return "\n".join(lines)

    def _summary(self) -> str:
        if self.ok:
            return f"the same in {plural(self.compared, 'layer')}"
        extra, missing = (sum(getattr(each, name) for each in self.layers) for name in ("extra", "missing"))
        return f"DIFFERENT in {len(self.layers)} of {plural(self.compared, 'layer')}: {extra} extra, {missing} missing"


def difference_of(new: Sequence[Mask], old: Sequence[Mask], stacked: bool) -> OrderDifference:
    """Compares masks of one size, layer by layer, with one set operation each."""
    layers: list[LayerDifference] = []
    for number, (one, other) in enumerate(zip(new, old, strict=True)):
        if one == other:
            continue
        extra, missing = one & ~other, other & ~one
        layers.append(
            LayerDifference(number if stacked else None, extra.nnz, missing.nnz, _first(extra), _first(missing))
        )
    return OrderDifference(tuple(layers), len(new))


def _first(pairs: Mask) -> tuple[Pair, ...]:
    first: list[Pair] = []
    for query, count in enumerate(pairs.row_counts().tolist()):
        if count:
            first += [(query, int(key)) for key in pairs.keys(query)[: _PAIRS - len(first)]]
        if len(first) == _PAIRS:
            break
    return tuple(first)


def _list(pairs: Sequence[Pair], count: int) -> str:
    return ", ".join(f"({query}, {key})" for query, key in pairs) + (", ..." if count > len(pairs) else "")
