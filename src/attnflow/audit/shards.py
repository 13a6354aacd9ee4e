"""A step that runs on several processes: which positions each rank returns, and all of them as one output."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, cast

import torch
from torch import Tensor

from attnflow._core.markup import plural
from attnflow.audit import rounding
from attnflow.audit.report import Violation
from attnflow.audit.rows import as_numbers
from attnflow.models.passes.processes import Processes, by_rank

Places = slice | Sequence[int] | Tensor
Shard = Places | str | tuple[Places, Places] | None
NAMED: Final = ("contiguous", "zigzag")


def positions_of(shard: Shard, size: tuple[int, int], index: int, ranks: int) -> Tensor:
    """The places [rows, positions] in the flattened ids [batch, n] that rank number `index` of `ranks` returns."""
    grid = torch.arange(math.prod(size)).view(size)
    if shard is None:
        return grid
    if isinstance(shard, str):
        parts = {"contiguous": ranks, "zigzag": 2 * ranks}.get(shard)
        if parts is None:
            raise ValueError(f"shard must be one of {', '.join(map(repr, NAMED))} or positions, got {shard!r}")
        if size[1] % parts:
            raise ValueError(
                f"shard={shard!r} cuts {size[1]} positions into {parts} equal parts, which leaves {size[1] % parts}: "
                "pass another length, or the positions of each rank"
            )
        chunks = grid.chunk(parts, 1)
        return chunks[index] if shard == "contiguous" else torch.cat([chunks[index], chunks[-1 - index]], 1)
    if isinstance(shard, tuple) and len(cast("tuple[Places, ...]", shard)) != 2:
        raise ValueError(f"shard must be a pair (rows, positions), a slice, a list or a tensor, got {shard!r}")
    rows, positions = cast("tuple[Places, Places]", shard) if isinstance(shard, tuple) else (slice(None), shard)
    try:
        places = grid[_indices(rows)][:, _indices(positions)]
    except (IndexError, TypeError) as error:
        raise ValueError(
            f"shard must name positions of ids of shape {size} by a slice, by indices, or as (rows, positions), got "
            f"{shard!r}: {error}"
        ) from error
    if len(places.unique()) < places.numel():
        raise ValueError(f"shard must name each position of a rank once, got {shard!r}")
    return places


def _indices(places: Places) -> slice | Tensor:
    return places if isinstance(places, slice) else torch.as_tensor(places).reshape(-1)


@dataclass
class Shards:
    """What the ranks of a step return, put together; all ranks call the same methods in the same order."""

    processes: Processes | None
    shard: Shard  # of this rank
    size: tuple[int, int] = (0, 0)  # of the ids that the step was called with
    places: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # {rank: flat places [rows, positions]}
    covered: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # {output: bool [batch, n]}
    batched: bool = True  # whether the ids have a batch axis
    placed: set[str] = field(default_factory=set[str])  # outputs [batch, n, ...] that parts were put together to
    doubts: dict[str, None] = field(default_factory=dict[str, None])  # what keeps outputs from being judged

    def called(self, call: Callable[[], Mapping[str, object]], size: tuple[int, int]) -> dict[str, object]:
        """What all ranks returned for ids of this size, by name; each under its rank's name without a shard."""
        ranks, index = (0,), 0
        if self.processes is not None:
            ranks, index = self.processes.ranks, self.processes.ranks.index(self.processes.rank)
        answers = by_rank(self.processes, lambda: (positions_of(self.shard, size, index, len(ranks)), dict(call())))
        returned = {rank: outputs for rank, (_, outputs) in answers.items()}
        self.size, self.places = size, {rank: places for rank, (places, _) in answers.items()}
        if self.shard is None:
            outputs = {f"rank {r}: {name}": value for r in ranks for name, value in returned[r].items()}
            part = size[1] // len(ranks) if len(ranks) > 1 else 0
            for name, value in outputs.items():
                if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == part:
                    self.doubts[f"{name} holds {part} of {size[1]} positions: say with shard= which they are"] = None
            return outputs
        outputs: dict[str, object] = {}
        for name in dict.fromkeys(name for rank in ranks for name in returned[rank]):
            parts = {rank: returned[rank][name] for rank in ranks if name in returned[rank]}
            pieces = {rank: _piece(value, self.places[rank]) for rank, value in parts.items()}
            outputs |= {f"rank {rank}: {name}": parts[rank] for rank, piece in pieces.items() if piece is None}
            if whole := {rank: piece for rank, piece in pieces.items() if piece is not None}:
                outputs |= (joined := self._joined(name, whole))
                self.placed |= set(joined)
        return outputs

    def _joined(self, name: str, pieces: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """All parts as one output; positions that a rank before returned, too, stand in one of the later rank."""
        first = next(iter(pieces.values()))
        whole = first.new_zeros(math.prod(self.size), *first.shape[1:])
        covered = torch.zeros(math.prod(self.size), dtype=torch.bool)
        outputs: dict[str, Tensor] = {}
        for rank, piece in pieces.items():
            places = self.places[rank].flatten()
            if (piece.shape[1:], piece.dtype) != (first.shape[1:], first.dtype):
                self.doubts[f"{name} of rank {rank}, {list(piece.shape)} of {piece.dtype}, unlike other ranks"] = None
                continue
            again = covered[places]
            if again.any():
                if _differ(piece[again], whole[places[again]]).any():
                    words = "returns other values than another rank for the same positions"
                    self.doubts[f"{name}: rank {rank} {words}"] = None
                own = torch.zeros_like(whole)
                own[places] = piece
                outputs[f"rank {rank}: {name}"] = own.view(*self.size, *first.shape[1:])
            new = ~again
            whole[places[new]], covered[places] = piece[new], True
        self.covered[name] = covered.view(self.size)
        absent = (~self.covered[name]).any(0).nonzero()[:, 0].tolist()
        if absent and not (first.ndim == 1 and absent == [self.size[1] - 1]):  # no label follows the last
            self.doubts[f"{name} at {_runs(absent)}, which no rank returned"] = None
        return {name: whole.view(*self.size, *first.shape[1:]), **outputs}

    def named(self, violation: Violation, ahead: bool) -> Violation:
        """The violation with the ranks that hold its target and its source; `ahead`, a number scores the next token."""
        scored = ahead and bool(violation.tokens) and violation.target > 0
        target = self._rank_of(violation.target_row, violation.target - scored)
        source = self._rank_of(violation.source_row, violation.source)
        what = f"the score of {violation.target}" if scored else violation.target
        words = f"{what} is of {target}" if target else ""
        words += f"{', ' * bool(words)}{violation.source} of {source}" if source else ""
        return replace(violation, ranks=words)

    def _rank_of(self, row: int | None, position: int | None) -> str:
        if self.shard is None or row is None or position is None or position >= self.size[1]:
            return ""
        place = row * self.size[1] + position
        ranks = [rank for rank, places in self.places.items() if bool((places == place).any())]
        return f"rank {' and '.join(map(str, ranks))}" if ranks else ""

    def beside(self, outputs: Mapping[str, object], reference: Mapping[str, object], step: str) -> list[Violation]:
        """Where outputs differ from those of one process; what has no counterpart there is a doubt."""
        violations: list[Violation] = []
        for name, value in outputs.items():
            if isinstance(value, Tensor) and not value.ndim:  # a number for the whole batch
                continue
            named = [v for n, v in reference.items() if n == name.rpartition(": ")[2] and _fits(value, v)]
            fitting = named or [v for v in reference.values() if _fits(value, v)]
            if not isinstance(value, Tensor) or len(fitting) != 1:
                shape = f"{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                what = "several outputs" if fitting else "nothing"
                self.doubts[f"{name} {shape} beside the reference, which returns {what} of this shape"] = None
                continue
            other = cast(Tensor, fitting[0]).cpu()
            value, other = (tensor if self.batched else tensor[None] for tensor in (value, other))
            if value.ndim < 2 or value.shape[0] != self.size[0]:
                self.doubts[f"{name} {list(value.shape)} beside the reference: it has no axis of positions"] = None
                continue
            n = min(value.shape[1], other.shape[1])
            there = self.covered.get(name, torch.ones(len(value), value.shape[1], dtype=torch.bool))
            if there[:, n:].any() and value.ndim > 2:
                self.doubts[f"{name} from position {n} on, where the reference has no value"] = None
            wrong = _differ(value[:, :n].flatten(0, 1), other[:, :n].flatten(0, 1)).view(len(value), n)
            wrong &= there[:, :n]
            if wrong.any():
                row, target = wrong.nonzero()[0].tolist()
                why = f"{plural(int(wrong.sum()), 'position')}: {_runs(wrong[row].nonzero()[:, 0].tolist())}"
                largest = float(_change(value[:, :n][wrong], other[:, :n][wrong]).max())
                place = "reference", None, f"{step}.{name}", None, target, largest, None, row
                violations.append(Violation(*place, why=f"{why} of sequence {row}"))
        return violations


def _piece(value: object, places: Tensor) -> Tensor | None:
    """A rank's output as [rows * positions, ...], in the order of its places; None if it has another shape."""
    if not isinstance(value, Tensor) or not places.numel():
        return None
    if value.shape[:2] == places.shape:
        return value.flatten(0, 1)
    return value if value.shape[:1] == (places.numel(),) else None


def _fits(value: object, other: object) -> bool:
    """Whether both are [batch, n, ...] of the same widths; of n and n - 1 positions, the first are compared."""
    if not isinstance(value, Tensor) or not isinstance(other, Tensor) or not value.ndim == other.ndim > 0:
        return False
    differ = [axis for axis, (a, b) in enumerate(zip(value.shape, other.shape, strict=True)) if a != b]
    return not differ or (differ in ([0], [1]) and abs(value.shape[differ[0]] - other.shape[differ[0]]) == 1)


def _change(one: Tensor, other: Tensor) -> Tensor:
    """The largest change of each row of [rows, ...]."""
    one, other = (as_numbers(tensor).reshape(len(tensor), -1) for tensor in (one, other))
    return rounding.row_change(one, other)


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Which rows of [rows, ...] differ by more than rounding: of each number, or of the median where that is more."""
    one, other = (as_numbers(tensor).reshape(len(tensor), -1) for tensor in (one, other))
    eps = max(torch.finfo(tensor.dtype).eps for tensor in (one, other))
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    sizes = torch.maximum(one.abs(), other.abs()).nan_to_num(nan=0.0, posinf=0.0)
    border = math.sqrt(eps) * sizes.clamp(min=float(sizes[sizes > 0].median()) if (sizes > 0).any() else 0.0)
    return (~same & ~((one - other).abs() <= border)).any(-1)


def _runs(positions: Sequence[int]) -> str:
    """
    >>> _runs([0, 1, 2, 7])
    'positions 0 to 2, 7'
    """
    parts: list[list[int]] = []
    for position in positions:
        if parts and parts[-1][-1] == position - 1:
            parts[-1].append(position)
        else:
            parts.append([position])
    words = [f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in parts]
    return f"position{'s' * (len(positions) > 1)} {', '.join(words)}"
