"""`GeometryScores`: the scores of one model as a table, with median and quartiles over its layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Final, Literal

from attnflow._core.results import Result
from attnflow._core.wrappers import own_name
from attnflow.geometry.in_use import InUse
from attnflow.geometry.published import Matrix, PublishedComparison, Quartiles, Summary, published_of
from attnflow.geometry.scores import FormScores, Mode
from attnflow.models.weights.families.find import Kind, Place

Bands = dict[str, tuple[float, float]]
_SUMMARISED: Final = ("symmetry", "directionality", "norm")

IGNORED: Final = "biases, rotary position embeddings, layer-norm gains and 1/sqrt(head_dim)"
IGNORED_OF_FOLDED: Final = "biases, rotary position embeddings, what norms divide by and 1/sqrt(head_dim)"
ZERO: Final = "zero"  # the matrix is zero: both scores are 0 by definition
NOT_SQUARE: Final = "not square"  # queries and keys have different widths: no symmetry
# The directionality of one matrix of random weights has the standard deviation this / sqrt(width). Simulated for widths
# of 128 to 1,024; at most a tenth less where few key heads serve all query heads, and 6 % more at very large widths.
_SPREAD: Final[dict[Mode, float]] = {"excess": 4.8, "norm": 3.4}
DISCOVERED: Final = "discovered"  # found by names and shapes alone
NOT_FOLDED: Final = "not folded"  # the norms around its queries and keys are not known


@dataclass(frozen=True)
class AtDistance:
    """What no change of basis moves of M_r = W_q^T R_{-r} W_k, of a key r places before its query."""

    distance: int
    symmetry: float
    norm: float


@dataclass(frozen=True)
class MatrixScores:
    """The scores of one matrix of one layer.

    Attributes:
        layer: index within its tower.
        head: index of the query head, or "all" for the full matrix, the sum over the heads.
        kind: "self" or "cross" attention.
        symmetry: in [-1, 1]; NaN for a matrix with the flag "not square".
        directionality: in [-1, 1]; negative where columns, the key's side, dominate.
        norm: Frobenius norm of the matrix.
        outlier_rows: number of rows with a norm above the threshold of directionality.
        outlier_columns: number of such columns.
        tower: "" for a model of one stack, otherwise a name such as "encoder", "decoder", "vision".
        name: the path of the tensor or module that holds the weights.
        flags: "zero" (a zero matrix, whose scores are 0), "not square", "not folded" (as stored, though gains were to
            be folded in), and remarks from reading the model.
        width: the width of the compared vectors, on which chance-level scores depend; 0 if unknown.
        in_use: its geometry among the tokens of a text; None without one, and for cross-attention.
        by_distance: its scores under rotary positions, at each distance that was asked for.
    """

    layer: int
    head: int | Literal["all"]
    kind: Kind
    symmetry: float
    directionality: float
    norm: float
    outlier_rows: int
    outlier_columns: int
    tower: str = ""
    name: str = ""
    flags: tuple[str, ...] = ()
    width: int = 0
    in_use: InUse | None = None
    by_distance: tuple[AtDistance, ...] = ()


def rows_of(place: Place, scores: FormScores, width: int, folded: bool = True) -> list[MatrixScores]:
    """Make table rows: one for the full matrix (0-d scores), or one per head."""
    full = scores.norm.ndim == 0
    rows: list[MatrixScores] = []
    for head in range(scores.norm.numel()):
        values = {field.name: getattr(scores, field.name).reshape(-1)[head].item() for field in fields(scores)}
        flags = {ZERO: values["norm"] == 0, NOT_SQUARE: math.isnan(values["symmetry"]), DISCOVERED: place.discovered}
        flags[NOT_FOLDED] = not folded
        marks = tuple(flag for flag, holds in flags.items() if holds)
        about: dict[str, Any] = {"tower": place.tower, "name": own_name(place.name), "flags": marks, "width": width}
        rows.append(MatrixScores(place.layer, "all" if full else head, place.kind, **values, **about))
    return rows


def chance_bands(width: int, mode: Mode, count: int = 1) -> Bands:
    """Return for each score the interval that holds 19 of 20 medians of `count` random matrices of this width.

    The symmetry of one matrix W_q^T W_k of independent random weights is 1 / width +- sqrt(2) / width, with any number
    of heads, of queries or of keys. The variance of a median of n normal numbers is pi / (2n + pi - 2) of theirs for
    odd n and pi / (2n + 2 pi - 4) for even n, to 3 %.

    >>> {name: f"{low:.3f} to {high:.3f}" for name, (low, high) in chance_bands(576, "excess", 30).items()}
    {'symmetry': '0.001 to 0.003', 'directionality': '-0.090 to 0.090'}
    """
    median = math.sqrt(math.pi / (2 * count + (math.pi - 2) * (1 if count % 2 else 2)))
    spread, around = min(1.0, 2 * _SPREAD[mode] * median / math.sqrt(width)), 2.8 * median
    return {"symmetry": ((1 - around) / width, (1 + around) / width), "directionality": (-spread, spread)}


@dataclass(frozen=True)
class GeometryScores(Result):
    """Symmetry and directionality of every layer, and of every head, of a model.

    M = W_q^T W_k has the query's side in its rows and the key's in its columns. It contains no biases, rotary position
    embeddings and 1/sqrt(head_dim), and gains of norms only if they were folded in.

    Attributes:
        model: name of the scored model.
        matrices: the scores of its matrices, in the order of the layers, the full matrix of a layer before its heads.
        gamma: threshold of directionality, in standard deviations above the mean.
        mode: definition of directionality, "excess" or "norm".
        notes: remarks for readers, such as projections that were found by their shapes alone.
        fold: whether gains of norms were folded into the weights, but for matrices with the flag "not folded".
    """

    model: str
    matrices: tuple[MatrixScores, ...]
    gamma: float = 2.0
    mode: Mode = "excess"
    notes: tuple[str, ...] = ()
    fold: bool = False

    @property
    def ignored(self) -> str:
        """What the scores leave out."""
        return IGNORED_OF_FOLDED if self.fold else IGNORED

    def __len__(self) -> int:
        return len(self.matrices)

    def __iter__(self) -> Iterator[MatrixScores]:
        return iter(self.matrices)

    @cached_property
    def _groups(self) -> dict[tuple[str, Kind, Matrix], list[MatrixScores]]:
        groups: dict[tuple[str, Kind, Matrix], list[MatrixScores]] = {}
        for row in self.matrices:
            groups.setdefault((row.tower, row.kind, "all" if row.head == "all" else "head"), []).append(row)
        return groups

    @cached_property
    def summaries(self) -> tuple[Summary, ...]:
        """The median and quartiles for each tower and kind: of the full matrices, then of the heads."""
        return tuple(
            Summary(
                *group,
                count=len(rows),
                flagged=sum(bool(row.flags) for row in rows),
                **{name: Quartiles.of([getattr(row, name) for row in rows]) for name in _SUMMARISED},
            )
            for group, rows in self._groups.items()
        )

    def extent(self, summary: Summary) -> tuple[int, int]:
        """The width of the narrowest matrix of a summary, and how many matrices it has.

        The width is 0 if it is unknown, or if the attention is to another sequence.
        """
        rows = self._groups.get((summary.tower, summary.kind, summary.matrix), [])
        widths = [row.width for row in rows if not math.isnan(row.symmetry)]
        return (min(widths, default=0) if summary.kind == "self" else 0), len(widths)

    def chance(self, summary: Summary) -> Bands | None:
        """The bands of chance of a summary's medians (`chance_bands`).

        It is None if the width is unknown, and for heads: those that share a key are not independent.
        """
        width, count = self.extent(summary)
        return chance_bands(width, self.mode, count) if width and summary.matrix == "all" else None

    def compare(self) -> tuple[PublishedComparison, ...]:
        """Compare each published record of the model with our scores, with reasons if they must differ.

        The result is empty if the model is not in the published table (`attnflow.geometry.published`).
        """
        comparisons: list[PublishedComparison] = []
        for record in published_of(self.model):
            candidates = [s for s in self.summaries if s.matrix == "all" and s.kind == record.kind]
            fitting = [s for s in candidates if s.tower == record.tower] or (candidates if not record.tower else [])
            ours = fitting[0] if len(fitting) == 1 else None
            reasons = [f"the published record is wrong: {record.fault}"] if record.fault else []
            if ours is None:
                reasons.append("this part of the model was not scored")
            elif ours.count != record.num_layers:
                reasons.append(f"the published record has {record.num_layers} layers, but this model has {ours.count}")
            if (self.gamma, self.mode) != (2.0, "excess"):
                said = f"{self.gamma:g}, {self.mode}"
                reasons.append(f"directionality was published with gamma 2 and mode excess, not {said}")
            if self.fold:
                reasons.append("the published record is of weights as stored, without the gains of norms (fold=False)")
            comparisons.append(PublishedComparison(record, ours, tuple(reasons)))
        return tuple(comparisons)

    def rows(self) -> list[dict[str, object]]:
        """A row for each matrix: the model, then the columns of `MatrixScores`; several flags are joined by ";".

        If a text was read, the columns of `InUse` follow under names that end in `_in_use`; then symmetry and norm at
        each distance, as in `symmetry_at_4`.
        """
        in_use = [field.name for field in fields(InUse)] if any(row.in_use for row in self.matrices) else []
        plain = [field.name for field in fields(MatrixScores) if field.name not in ("in_use", "by_distance")]
        return [
            {
                "model": self.model,
                **{name: getattr(row, name) for name in plain},
                "flags": ";".join(row.flags),
                **{f"{name}_in_use": getattr(row.in_use, name, math.nan) for name in in_use},
                **{f"symmetry_at_{one.distance}": one.symmetry for one in row.by_distance},
                **{f"norm_at_{one.distance}": one.norm for one in row.by_distance},
            }
            for row in self.matrices
        ]

    def __repr__(self) -> str:
        what = f"{len(self.matrices)} matrices; gamma {self.gamma:g}, mode {self.mode}"
        lines = [f"GeometryScores({self.model!r}: {what}{', gains folded in' if self.fold else ''})"]
        for s in self.summaries:
            of = f"{s.count} layers" if s.matrix == "all" else f"{s.count} heads"
            flagged = f", {s.flagged} flagged" if s.flagged else ""
            lines.append(f"  {s.what}, {of}: symmetry {s.symmetry}, directionality {s.directionality}{flagged}")
            rows = self._groups[s.tower, s.kind, s.matrix]
            for place, at in enumerate(rows[0].by_distance):
                median = Quartiles.of([row.by_distance[place].symmetry for row in rows])
                lines.append(f"    at distance {at.distance}: symmetry {median}")
            if used := [row.in_use for row in rows if row.in_use is not None]:
                symmetry = Quartiles.of([scores.symmetry for scores in used])
                directionality = Quartiles.of([scores.directionality for scores in used])
                lines.append(f"    in use: symmetry {symmetry}, directionality {directionality}")
        return "\n".join([*lines, f"  not included: {self.ignored}", *(f"  note: {note}" for note in self.notes)])
