"""Summaries of scores, beside those that the authors of the paper published, and why some of them differ from ours."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final, Literal

import numpy as np

from attnflow.models.families.find import Kind

Matrix = Literal["all", "head"]

_PAIRING: Final = "it pairs query head h with key head h mod n_kv instead of h // (heads / n_kv)"
_TRANSPOSE: Final = "it is W_q W_k^T, as the transpose of the fused projection is missing"
_INTERLEAVED: Final = (
    "it cuts a projection that is interleaved by head as if it were contiguous, which mixes query, key and value"
)
_RANDOM: Final = "it is of a random initialisation, which reproduces it, not of the trained weights"
_CROSS: Final = "it is of the cross-attention, not of the decoder's self-attention"
_OUT_OF_RANGE: Final = "its directionality lies outside [-1, 1], where the definition cannot take it"

# Records of random weights, by model and layout of the record.
_RANDOM_RECORDS: Final = frozenset(
    {
        ("meta-llama/meta-llama-3-8b", "new"),
        ("meta-llama/llama-3.2-1b", "new"),
        ("microsoft/phi-3-mini-4k-instruct", "new"),
    }
)
# First that matches family and model holds; the 7B and 13B models of LLaMA-2 have as many key heads as query heads.
_WRONG: Final = (
    (r"llama llama2?-?2?-?(7b|13b)", ""),
    (r"llama meta-llama/llama-2-(7b|13b)", ""),
    (r"llama meta-llama/llama-3\.2-11b-vision", ""),
    (r"(llama|mistral|mobilellm) ", _PAIRING),
    (r"(modernbert|phi-3) ", _TRANSPOSE),
    (r"(pythia|deberta microsoft/deberta-(base|large)$)", _INTERLEAVED),
    (r"musicgendecoder ", _CROSS),
)
# Names in the records of the authors' own, by the hub's.
_OTHER_NAMES: Final[Mapping[str, str]] = {
    "bert-base-uncased": "bert-base",
    "bert-large-uncased": "bert-large",
    "distilbert-base-uncased": "bert-distill",
    "openai-gpt": "gpt1",
    "gpt2-xl": "gpt2-xlarge",
    "distilgpt2": "gpt2-distill",
    "meta-llama-3-8b": "llama3-8b",
    "llama-3.1-8b": "llama3.1-8b",
    "llama-3.2-1b": "llama3.2-1b",
    "llama-3.2-3b": "llama3.2-3b",
    "tinystories-1m": "tinygpt-1m",
    "tinystories-3m": "tinygpt-3m",
    "tinystories-8m": "tinygpt-8m",
    "tinystories-1layer-21m": "tinygpt-21m",
    "tinystories-28m": "tinygpt-28m",
}


@dataclass(frozen=True)
class Quartiles:
    """First quartile, median and third quartile (linear interpolation); NaN without values."""

    q25: float
    median: float
    q75: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Of the values that are numbers."""
        numbers = [value for value in values if not math.isnan(value)]
        return cls(*(float(q) for q in np.quantile(numbers, (0.25, 0.5, 0.75)))) if numbers else cls(*[math.nan] * 3)

    def __str__(self) -> str:
        return f"{self.median:z.3f} [{self.q25:z.3f}, {self.q75:z.3f}]"


@dataclass(frozen=True)
class Summary:
    """Median and quartiles of one kind of attention in one tower.

    Attributes:
        tower: as in `MatrixScores`.
        kind: as in `MatrixScores`.
        matrix: "all" (the full matrix of each layer) or "head" (each head of each layer by itself).
        count: matrices.
        flagged: matrices with a flag.
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
        """Tower and kind in words, such as "decoder, cross"."""
        return ", ".join(filter(None, (self.tower, self.kind)))


@dataclass(frozen=True)
class PublishedScores:
    """One published record: quartiles over the layers of a model."""

    modality: str  # "language-models", "vision-models" or "audio-models"
    family: str  # as the authors file it
    model: str
    record: str  # its layout: "old", "new" or "bare"
    num_layers: int
    parameters: int  # of the whole model
    symmetry: Quartiles
    directionality: Quartiles  # gamma 2, mode "excess"

    @property
    def tower(self) -> str:
        """The part of the model that it is about: "encoder", "decoder", "vision", or "" where it has one part."""
        if "vision" in self.model.lower():
            return "vision"
        return next((tower for tower in ("encoder", "decoder") if self.family.lower().endswith(tower)), "")

    @property
    def kind(self) -> str:
        """The attention that it is about, "self" or "cross"."""
        return "cross" if self.fault == _CROSS else "self"

    @property
    def fault(self) -> str:
        """What is wrong with the record, "" if nothing is known to be."""
        name = self.model.lower()
        if (name, self.record) in _RANDOM_RECORDS:
            return _RANDOM
        if max(abs(self.directionality.q25), abs(self.directionality.q75)) > 1:
            return _OUT_OF_RANGE
        subject = f"{self.family.lower()} {name}"
        return next((fault for pattern, fault in _WRONG if re.match(pattern, subject)), "")


@dataclass(frozen=True)
class Comparison:
    """A published record beside our scores of the same part of the same model."""

    published: PublishedScores
    ours: Summary | None  # over the full matrices; None if this part was not scored
    reasons: tuple[str, ...]  # why the two differ, as far as it is known

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
    """All published records, each once.

    The table comes with the package; see `geometry/data/README.md` for where its numbers are from.

    >>> len(published_scores()), published_scores()[0].model
    (210, 'facebook/hubert-base-ls960')
    """
    text = (files("attnflow.geometry") / "data" / "published.csv").read_text(encoding="utf-8")
    records: dict[tuple[object, ...], PublishedScores] = {}
    rows = list(csv.DictReader(text.splitlines()))
    for row in sorted(rows, key=lambda row: row["family"] == "BERT" and "beit" in row["model"]):
        record = PublishedScores(
            row["modality"],
            row["family"],
            row["model"],
            row["record_format"],
            int(row["n_layers"]),
            int(row["params_total"]),
            Quartiles(*(float(row[f"sym_{q}"]) for q in ("q25", "median", "q75"))),
            Quartiles(*(float(row[f"dir_{q}"]) for q in ("q25", "median", "q75"))),
        )
        records.setdefault((record.model, record.tower, record.symmetry, record.directionality), record)
    return tuple(records.values())


def published_of(model: str) -> tuple[PublishedScores, ...]:
    """The published records of a model, by its hub id, folder or file name.

    >>> [record.tower for record in published_of("facebook/bart-base")]
    ['decoder', 'encoder']
    """
    name = _plain_name(model)
    names = {name, _OTHER_NAMES.get(name, name)}
    return tuple(record for record in published_scores() if _plain_name(record.model) in names)


def compare(model: str, summaries: Sequence[Summary], gamma: float, mode: str) -> tuple[Comparison, ...]:
    """Each published record of a model beside the summary of the same part, with the reasons why they differ."""
    comparisons: list[Comparison] = []
    for record in published_of(model):
        candidates = [s for s in summaries if s.matrix == "all" and s.kind == record.kind]
        fitting = [s for s in candidates if s.tower == record.tower] or (candidates if not record.tower else [])
        ours = fitting[0] if len(fitting) == 1 else None
        reasons = [f"the published record is wrong: {record.fault}"] if record.fault else []
        if ours is None:
            reasons.append("this part of the model was not scored here")
        elif ours.count != record.num_layers:
            reasons.append(f"the published record has {record.num_layers} layers, the model here {ours.count}")
        if (gamma, mode) != (2.0, "excess"):
            reasons.append(f"directionality was published with gamma 2 and mode excess, not {gamma:g}, {mode}")
        comparisons.append(Comparison(record, ours, tuple(reasons)))
    return tuple(comparisons)


def _plain_name(model: str) -> str:
    """Strip owner, folder, ending and quantisation from a model's name, in lower case."""
    cached = re.search(r"models--(?:[^/\\]+?--)?([^/\\]+)", model)  # how the hub's cache names folders
    name = (cached[1] if cached else re.split(r"[/\\]", model.rstrip("/\\"))[-1]).lower()
    name = re.sub(r"\.(gguf|safetensors|bin|pt|pth)$", "", name)
    return re.sub(r"[.-](i?q\d\w*|bf16|f16|f32|fp16|fp32)$", "", name)
