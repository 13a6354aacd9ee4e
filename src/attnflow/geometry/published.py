"""Summaries of scores, those that the paper's authors published, and why some of them differ from ours."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final, Literal

import numpy as np

from attnflow.models.weights.families.find import Kind

Matrix = Literal["all", "head"]

# What is wrong with a record, by the word in the table.
_FAULTS: Final = {
    "pairing": "it pairs query head h with key head h mod n_kv instead of h // (heads / n_kv)",
    "transpose": "it is W_q W_k^T, as the transpose of the fused projection is missing",
    "interleaved": (
        "it cuts a projection that is interleaved by head as if it were contiguous, which mixes query, key and value"
    ),
    "random": "it is of a random initialisation, which reproduces it, not of the trained weights",
    "cross": "it is of the cross-attention, not of the decoder's self-attention",
    "range": "its directionality lies outside [-1, 1], where the definition cannot take it",
    "": "",
}


@dataclass(frozen=True)
class Quartiles:
    """The first quartile, median and third quartile (linear interpolation); NaN without values."""

    q25: float
    median: float
    q75: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        numbers = [value for value in values if not math.isnan(value)]
        return cls(*(float(q) for q in np.quantile(numbers, (0.25, 0.5, 0.75)))) if numbers else cls(*[math.nan] * 3)

    def __str__(self) -> str:
        return f"{self.median:z.3f} [{self.q25:z.3f}, {self.q75:z.3f}]"


@dataclass(frozen=True)
class Summary:
    """The median and quartiles of one kind of attention in one tower.

    Attributes:
        tower: as in `MatrixScores`.
        kind: as in `MatrixScores`.
        matrix: "all" (the full matrix of each layer) or "head" (each head of each layer).
        count: number of matrices.
        flagged: number of matrices with a flag.
        symmetry: over these matrices.
        directionality: over these matrices.
        norm: over these matrices.
    """

    tower: str
    kind: Kind
    matrix: Matrix
    count: int
    flagged: int
    symmetry: Quartiles
    directionality: Quartiles
    norm: Quartiles

    @property
    def what(self) -> str:
        return ", ".join(filter(None, (self.tower, self.kind)))


@dataclass(frozen=True)
class PublishedScores:
    """One published record: quartiles over the layers of a model."""

    modality: str  # "language-models", "vision-models" or "audio-models"
    family: str  # as the authors file it
    model: str
    hub_name: str  # the model's name on the hub, where the authors use another one
    tower: str  # the part of the model: "encoder", "decoder", "vision", or "" if it has one part
    kind: str  # the kind of attention, "self" or "cross"
    record: str  # its layout: "old", "new" or "bare"
    num_layers: int
    parameters: int  # of the whole model
    symmetry: Quartiles
    directionality: Quartiles  # gamma 2, mode "excess"
    fault: str  # the known fault of the record, "" if none


@dataclass(frozen=True)
class PublishedComparison:
    published: PublishedScores
    ours: Summary | None  # over the full matrices; None if this part was not scored
    reasons: tuple[str, ...]  # the known reasons why the two differ

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.published.tower, self.published.kind)))
        line = (
            f"published for {self.published.model} ({where}): symmetry {self.published.symmetry}, directionality "
            f"{self.published.directionality}"
        )
        if self.ours is not None:
            line += f"; ours {self.ours.symmetry} and {self.ours.directionality}"
        return line + "".join(f"; {reason}" for reason in self.reasons)


@cache
def published_scores() -> tuple[PublishedScores, ...]:
    """Return all published records, each once.

    The table is part of the package; `geometry/data/README.md` gives its sources.

    >>> len(published_scores()), published_scores()[0].model
    (210, 'facebook/hubert-base-ls960')
    """
    text = (files("attnflow.geometry") / "data" / "published.csv").read_text(encoding="utf-8")
    return tuple(
        PublishedScores(
            **{name: row[name] for name in ("modality", "family", "model", "hub_name", "tower", "kind")},
            record=row["record_format"],
            num_layers=int(row["n_layers"]),
            parameters=int(row["params_total"]),
            symmetry=Quartiles(*(float(row[f"sym_{q}"]) for q in ("q25", "median", "q75"))),
            directionality=Quartiles(*(float(row[f"dir_{q}"]) for q in ("q25", "median", "q75"))),
            fault=_FAULTS[row["fault"]],
        )
        for row in csv.DictReader(text.splitlines())
    )


def published_of(model: str) -> tuple[PublishedScores, ...]:
    """Return the published records of a model, by its hub id, folder or file name.

    >>> [record.tower for record in published_of("facebook/bart-base")]
    ['decoder', 'encoder']
    """
    name = _plain_name(model)
    found = (record for record in published_scores() if name in (_plain_name(record.model), record.hub_name))
    return tuple(found) if name else ()


def _plain_name(model: str) -> str:
    cached = re.search(r"models--(?:[^/\\]+?--)?([^/\\]+)", model)  # how the hub's cache names folders
    name = (cached[1] if cached else re.split(r"[/\\]", model.rstrip("/\\"))[-1]).lower()
    name = re.sub(r"\.(gguf|safetensors|bin|pt|pth)$", "", name)
    return re.sub(r"[.-](i?q\d\w*|bf16|f16|f32|fp16|fp32)$", "", name)
