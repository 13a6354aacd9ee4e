"""`GeometryScores`: the scores of one model as a table, with median and quartiles over its layers."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import numpy as np

from attnflow.geometry.scores import Mode

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Group

    from attnflow.geometry.factored import Scores
    from attnflow.geometry.published import Comparison
    from attnflow.models.query_key import QueryKey

Picture = Literal["plane", "layers", "heads"]

IGNORED: Final = "biases, rotary position embeddings, layer-norm gains and 1/sqrt(head_dim)"
SCHEMA: Final = "attnflow.geometry.scores/1"
ZERO: Final = "zero"  # the matrix is zero: both scores are 0 by definition
NOT_SQUARE: Final = "not square"  # queries and keys have different widths: no symmetry


@dataclass(frozen=True)
class ScoreRow:
    """The scores of one matrix of one layer.

    Attributes:
        layer: index within its tower.
        head: index of the query head, or "all" for the full matrix, the sum over the heads.
        kind: "self" or "cross" attention.
        symmetry: in [-1, 1]; NaN where it has no meaning (see the flag "not square").
        directionality: in [-1, 1]; negative where columns, the key's side, dominate.
        norm: Frobenius norm of the matrix.
        outlier_rows: rows whose norm exceeds the threshold of directionality.
        outlier_columns: columns whose norm does.
        tower: "" for a model of one stack, else such as "encoder", "decoder", "vision".
        name: where the weights are, a path of a tensor or of a module.
        flags: "zero" (a zero matrix, whose scores are 0), "not square", and what the reader of the model remarked.
    """

    layer: int
    head: int | Literal["all"]
    kind: Literal["self", "cross"]
    symmetry: float
    directionality: float
    norm: float
    outlier_rows: int
    outlier_columns: int
    tower: str = ""
    name: str = ""
    flags: tuple[str, ...] = ()


COLUMNS: Final = ("model", *(field.name for field in fields(ScoreRow)))


def rows_of(source: QueryKey, scores: Scores) -> list[ScoreRow]:
    """Rows of the table: one for the full matrix (0-d scores), or one per head."""
    found: list[ScoreRow] = []
    full = scores.norm.ndim == 0
    for head in range(scores.norm.numel()):
        values = {field.name: getattr(scores, field.name).reshape(-1)[head].item() for field in fields(scores)}
        checks = ((ZERO, values["norm"] == 0), (NOT_SQUARE, math.isnan(values["symmetry"])))
        found.append(
            ScoreRow(
                layer=source.layer,
                head="all" if full else head,
                kind=source.kind,
                tower=source.tower,
                name=source.name,
                flags=tuple(flag for flag, holds in checks if holds),
                **values,
            )
        )
    return found


@dataclass(frozen=True)
class Quartiles:
    """First quartile, median and third quartile over layers (linear interpolation); NaN without values."""

    q25: float
    median: float
    q75: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Of the values that are numbers."""
        known = [value for value in values if not math.isnan(value)]
        return cls(*(float(q) for q in np.quantile(known, (0.25, 0.5, 0.75)))) if known else cls(*[math.nan] * 3)

    def __str__(self) -> str:
        return f"{self.median:z.3f} [{self.q25:z.3f}, {self.q75:z.3f}]"


@dataclass(frozen=True)
class Summary:
    """Median and quartiles of one kind of attention in one tower.

    Attributes:
        tower: as in `ScoreRow`.
        kind: as in `ScoreRow`.
        matrix: "all" (the full matrix of each layer) or "head" (each head of each layer by itself).
        count: matrices.
        flagged: matrices with a flag.
        symmetry: over these matrices.
        directionality: over these matrices.
        norm: over these matrices.
    """

    tower: str
    kind: Literal["self", "cross"]
    matrix: Literal["all", "head"]
    count: int
    flagged: int
    symmetry: Quartiles
    directionality: Quartiles
    norm: Quartiles

    @property
    def what(self) -> str:
        """Tower and kind in words, such as "decoder, cross"."""
        return ", ".join(filter(None, (self.tower, self.kind)))


@dataclass(frozen=True)
class GeometryScores:
    """Symmetry and directionality of every layer, and of every head, of a model.

    M = W_q^T W_k has the query's side in its rows and the key's in its columns. Biases, rotary position embeddings,
    layer-norm gains and 1/sqrt(head_dim) have no part in it.

    Attributes:
        model: what was scored.
        rows: one for each matrix, in the order of the layers, the full matrix of a layer before its heads.
        gamma: threshold of directionality, in standard deviations above the mean.
        mode: reading of directionality, "excess" or "norm".
        notes: what a reader should know, such as projections that were found by their shapes alone.
    """

    model: str
    rows: tuple[ScoreRow, ...]
    gamma: float = 2.0
    mode: Mode = "excess"
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ScoreRow]:
        return iter(self.rows)

    @cached_property
    def summaries(self) -> tuple[Summary, ...]:
        """Median and quartiles, for each tower and kind: of the full matrices, then of the heads."""
        groups: dict[tuple[str, Literal["self", "cross"], Literal["all", "head"]], list[ScoreRow]] = {}
        for row in self.rows:
            groups.setdefault((row.tower, row.kind, "all" if row.head == "all" else "head"), []).append(row)
        return tuple(
            Summary(
                *group,
                count=len(rows),
                flagged=sum(bool(row.flags) for row in rows),
                symmetry=Quartiles.of([row.symmetry for row in rows]),
                directionality=Quartiles.of([row.directionality for row in rows]),
                norm=Quartiles.of([row.norm for row in rows]),
            )
            for group, rows in groups.items()
        )

    def summary(
        self,
        matrix: Literal["all", "head"] = "all",
        *,
        tower: str | None = None,
        kind: Literal["self", "cross"] | None = None,
    ) -> Summary:
        """The one summary that fits.

        Args:
            matrix: of the full matrices, or of the heads.
            tower: needed where the model has several.
            kind: needed where it has self- and cross-attention.

        Raises:
            ValueError: none fits, or several do; the message lists what there is.
        """
        found = [
            s for s in self.summaries if s.matrix == matrix and tower in (None, s.tower) and kind in (None, s.kind)
        ]
        if len(found) == 1:
            return found[0]
        there = "; ".join(f"matrix={s.matrix!r}, tower={s.tower!r}, kind={s.kind!r}" for s in self.summaries)
        raise ValueError(f"{len(found)} summaries of {self.model} fit, expected one; there are: {there}")

    def compare(self) -> tuple[Comparison, ...]:
        """Each published median of the same model beside ours, with the reason where they must differ.

        Empty where the model is not in the published table (`attnflow.geometry.published`).
        """
        from attnflow.geometry.published import compare

        return compare(self)

    def figure(self, picture: Picture = "plane", *others: GeometryScores) -> Figure:
        """The scores as a matplotlib figure.

        Args:
            picture: "plane" (median and quartiles of symmetry against directionality, a mark per model), "layers" (both
                scores by layer, a line per model) or "heads" (a heat map of heads by layers, of this model alone).
            others: more models for "plane" and "layers".

        Raises:
            MissingExtra: matplotlib is not installed.
            ValueError: there is no such picture, or "heads" of several models or of a table without heads.
        """
        from attnflow.report import score_figures as figures

        if picture == "heads":
            if others:
                raise ValueError('a heat map shows one model: call figure("heads") of each')
            return figures.heads(self)
        if picture not in ("plane", "layers"):
            raise ValueError(f'picture must be "plane", "layers" or "heads", got {picture!r}')
        return (figures.plane if picture == "plane" else figures.layers)((self, *others))

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame` with the columns of `ScoreRow` after the model.

        Raises:
            ImportError: pandas is not installed; no extra of this package brings it.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            message = "a table of scores as a DataFrame needs pandas, which is not installed: pip install pandas"
            raise ImportError(message) from error
        return pandas.DataFrame(self._records(), columns=list(COLUMNS))

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """The rows as CSV text, written to `path` if it is given; several flags are joined by ";"."""
        buffer = io.StringIO(newline="")
        writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._records())
        if path is not None:
            Path(path).write_text(buffer.getvalue(), encoding="utf-8")
        return buffer.getvalue()

    def to_dict(self) -> dict[str, object]:
        """Everything as plain Python values, ready for `json.dumps`; NaN is None."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "gamma": self.gamma,
            "mode": self.mode,
            "ignored": IGNORED,
            "notes": list(self.notes),
            "summaries": [_plain(asdict(summary)) for summary in self.summaries],
            "published": [_plain({**asdict(c.published), "reasons": c.reasons}) for c in self.compare()],
            "rows": [_plain(asdict(row)) for row in self.rows],
        }

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Everything as JSON text, written to `path` if it is given; `from_json` reads it back."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, text: str) -> GeometryScores:
        """The scores that `to_json` wrote.

        Raises:
            ValueError: the text is of another kind.
        """
        found = json.loads(text)
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            raise ValueError(f'expected the JSON text of GeometryScores, with "schema": "{SCHEMA}"')
        return cls.from_dict(cast(dict[str, Any], found))

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> GeometryScores:
        """The scores that `to_dict` gave."""
        rows: list[ScoreRow] = []
        for row in found["rows"]:
            values: dict[str, Any] = {**row, "symmetry": _number(row["symmetry"]), "flags": tuple(row["flags"])}
            rows.append(ScoreRow(**values))
        return cls(found["model"], tuple(rows), found["gamma"], found["mode"], tuple(found["notes"]))

    def _records(self) -> list[dict[str, object]]:
        return [{"model": self.model, **asdict(row), "flags": ";".join(row.flags)} for row in self.rows]

    def __repr__(self) -> str:
        lines = [f"GeometryScores({self.model!r}: {len(self.rows)} rows; gamma {self.gamma:g}, {self.mode})"]
        for s in self.summaries:
            of = f"{s.count} layers" if s.matrix == "all" else f"{s.count} heads"
            flagged = f", {s.flagged} flagged" if s.flagged else ""
            lines.append(f"  {s.what}, {of}: symmetry {s.symmetry}, directionality {s.directionality}{flagged}")
        return "\n".join([*lines, f"  ignored: {IGNORED}", *(f"  note: {note}" for note in self.notes)])

    def __rich__(self) -> Group:
        from attnflow.report.score_text import overview

        return overview([self])

    def __str__(self) -> str:
        from attnflow.report.score_text import overview, text

        return text(overview([self]))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return _plain(cast(dict[str, Any], value))
        return None if isinstance(value, float) and math.isnan(value) else value

    return {name: plain(value) for name, value in values.items()}


def _number(value: float | None) -> float:
    return math.nan if value is None else value
