"""Cuts: what must be removed from a mask so that nothing of the sources reaches the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from attnflow._core.checks import Indices, IntArray, index_array
from attnflow._core.results import Result
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.numbering import invert
from attnflow.order.hasse import Pair, label
from attnflow.order.reach import layered_path, shortest_path

What = Literal["positions", "pairs"]
Parts: TypeAlias = Sequence[tuple[IntArray, IntArray]]  # (query, key) of each pair, in each layer

_PAIRS: Final = 1 << 24  # of a mask: about 3 GB while the largest flow is computed
_STEPS: Final = 1 << 19  # pairs of all layers of a stack, each a condition of an integer program


@dataclass(frozen=True, repr=False)
class FlowCut(Result):
    """What keeps the information of some positions from others; made by `Flow.cut` and `Flow.only_channel`.

    Attributes:
        sources: where information comes from.
        targets: where it must not arrive.
        positions: the positions that are removed, from every layer.
        pairs: the pairs (query, key) that are removed, from every layer.
        fewest: whether fewer would not do (`cut`), or the positions were given (`only_channel`).
        separated: whether nothing of the sources reaches the targets without them.
        path: a path from a source to a target, as of `Flow.path`. If separated, it passes what is removed, and is empty
            if nothing flows at all; otherwise it goes around.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    positions: tuple[int, ...]
    pairs: tuple[Pair, ...]
    fewest: bool
    separated: bool
    path: tuple[int, ...]

    @property
    def ok(self) -> bool:
        """Whether the sources are kept from the targets; for `only_channel` also, whether the channel carries any."""
        return self.separated and (self.fewest or bool(self.path))

    def __str__(self) -> str:
        between = f"from {label(self.sources)} to {label(self.targets)}"
        moves = [p for p, before in zip(self.path, (None, *self.path), strict=False) if p != before]
        path = " -> ".join(map(str, moves))
        if not self.path:
            return f"nothing flows {between}"
        if not self.separated and self.fewest:
            return f"no positions separate {label(self.targets)} from {label(self.sources)}: {path} is direct"
        several = len(self.pairs or self.positions) > 1
        shown = ", ".join(map(str, self.pairs)) if self.pairs else label(self.positions)
        removed = f"{'pair' if self.pairs else 'position'}{'s' * several} {shown}"
        if self.fewest:
            return f"all information {between} passes {removed}: {path}"
        verb = f"{'are' if several else 'is'}{'' if self.separated else ' not'}"
        return f"{removed} {verb} the only channel {between}: {path}{'' if self.separated else ' goes around'}"

    __repr__ = __str__


@dataclass(frozen=True)
class Paths:
    """The paths of information through A = allow | I of every layer of a stack, or of one mask again and again."""

    layers: Sequence[IntervalRows]
    stacked: bool
    rank: IntArray | None  # of each position in `layers`

    def first(self, sources: Sequence[int], targets: Sequence[int], avoid: Sequence[int] = ()) -> list[int]:
        """A path with the fewest moves, as of `Flow.path`."""
        ends = self.number(sources), self.number(targets), self.number(avoid)
        path = layered_path(self.layers, *ends) if self.stacked else shortest_path(self.layers[0], *ends)
        return self.named(np.array(path, np.int64)).tolist()

    def number(self, positions: Sequence[int]) -> IntArray:
        chosen = np.array(positions, np.int64)
        return chosen if self.rank is None else self.rank[chosen]

    def named(self, numbers: IntArray) -> IntArray:
        return numbers if self.rank is None else invert(self.rank)[numbers]


def fewest(paths: Paths, sources: Indices, targets: Indices, what: What) -> FlowCut:
    start, end = _apart(paths, sources=sources, targets=targets)
    if what not in get_args(What):
        raise ValueError(f'what must be "positions" or "pairs", got {what!r}')
    between = np.setdiff1d(np.arange(paths.layers[0].num_rows), [*start, *end]).tolist()
    if what == "positions" and (direct := paths.first(start, end, between)):
        return FlowCut(start, end, (), (), True, False, tuple(direct))
    path = paths.first(start, end)
    if not path:
        return FlowCut(start, end, (), (), True, True, ())
    most = _STEPS if paths.stacked else _PAIRS
    if (count := sum(int(rows.counts().sum()) for rows in paths.layers)) > most:
        raise ValueError(f"a cut looks at every pair, and these are {count:,}, more than {most:,}: take a slice")
    parts = [rows.expand() for rows in paths.layers]
    search = _by_program if paths.stacked else _by_flow
    removed = paths.named(search(parts, paths.layers[0].num_rows, paths.number(start), paths.number(end), what))
    found = tuple(sorted(removed.tolist()))
    positions, pairs = (found, ()) if what == "positions" else ((), tuple((q, k) for q, k in found))
    return FlowCut(start, end, positions, pairs, True, True, tuple(path))


def only_channel(paths: Paths, channel: Indices, sources: Indices, targets: Indices) -> FlowCut:
    inside, start, end = _apart(paths, channel=channel, sources=sources, targets=targets)
    around = paths.first(start, end, inside)
    return FlowCut(start, end, inside, (), False, not around, tuple(around or paths.first(start, end)))


def _apart(paths: Paths, **several: Indices) -> list[tuple[int, ...]]:
    """Positions by name, ascending; raises ValueError where some are missing or shared."""
    chosen = {name: np.unique(index_array(name, some, paths.layers[0].num_rows)) for name, some in several.items()}
    for name, positions in chosen.items():
        if not len(positions):
            raise ValueError(f"{name} must hold at least one position, got none")
    for (name, some), (other, more) in combinations(chosen.items(), 2):
        if len(both := np.intersect1d(some, more)):
            raise ValueError(f"{name} and {other} must not share positions, got {label(tuple(both.tolist()))} in both")
    return [tuple(positions.tolist()) for positions in chosen.values()]


def _by_flow(parts: Parts, n: int, sources: IntArray, targets: IntArray, what: What) -> IntArray:
    """The smallest cut nearest the targets, by the largest flow: a position is an arc from node p to node n + p."""
    [(query, key)] = parts
    query, key = query[query != key], key[query != key]
    node, ends = np.arange(n), np.concatenate([sources, targets])
    out = n if what == "positions" else 0
    units = np.ones(len(query) if not out else n, np.int32)
    unlimited = np.int32(len(units) + 1)
    if out:
        units[ends] = unlimited
        tail, head, capacity = [key + n, node], [query, node + n], [np.full(len(query), unlimited), units]
    else:
        tail, head, capacity = [key], [query], [units]
    first, last = n + out, n + out + 1
    tail += [np.full(len(sources), first), targets + out]
    head += [sources, np.full(len(targets), last)]
    capacity.append(np.full(len(ends), unlimited))
    arcs = np.concatenate(capacity), (np.concatenate(tail), np.concatenate(head))
    graph = csr_array(arcs, shape=(last + 1, last + 1))
    left = csr_array(graph - maximum_flow(graph, first, last).flow)
    left.eliminate_zeros()
    above = np.zeros(last + 1, np.bool_)  # what can still send to the targets
    above[breadth_first_order(csr_array(left.T), last, return_predecessors=False)] = True
    if out:
        return np.flatnonzero(~above[:n] & above[n : 2 * n])
    cut = ~above[key] & above[query]
    return np.stack([query[cut], key[cut]], axis=1)


def _by_program(parts: Parts, n: int, sources: IntArray, targets: IntArray, what: What) -> IntArray:
    """Minimise sum x over x in {0, 1}: y(l + 1, q) <= y(l, k) + x, y(0, sources) = 0, y(L, targets) = 1, 0 <= y <= 1.

    x belongs to the query, or to the pair, and is left out for what keeps its place (k = q).
    """
    query, key = (np.concatenate(sides) for sides in zip(*parts, strict=True))
    layer = np.repeat(np.arange(len(parts)), [len(q) for q, _ in parts])
    moved = query != key
    if what == "positions":
        unit, units = query[moved], np.arange(n)
    else:
        units, unit = np.unique(query[moved] * n + key[moved], return_inverse=True)
    step, y = np.arange(len(query)), len(units) + layer * n
    size = len(units) + (len(parts) + 1) * n
    entries = [(step, y + n + query, 1), (step, y + key, -1), (step[moved], unit, -1)]
    row, column, value = (
        np.concatenate(side) for side in zip(*(np.broadcast_arrays(*e) for e in entries), strict=True)
    )
    low, high = np.zeros(size), np.ones(size)
    if what == "positions":
        high[np.concatenate([sources, targets])] = 0
    high[len(units) + sources] = 0
    low[size - n + targets] = 1
    chosen = (np.arange(size) < len(units)).astype(np.int64)
    conditions = LinearConstraint(csr_array(coo_array((value, (row, column)), shape=(len(query), size))), ub=0)
    # By default a solution may be 0.01 % too large.
    found = milp(
        chosen, integrality=chosen, bounds=Bounds(low, high), constraints=conditions, options={"mip_rel_gap": 0.0}
    )
    assert found.status == 0, found.message
    removed = units[np.flatnonzero(found.x[: len(units)] > 0.5)]
    return removed if what == "positions" else np.stack(np.divmod(removed, n), axis=1)
