"""The claims of the papers, read from `claims.csv`, and what settles each.

A row names an experiment, or gives a verdict with the proofs of it and their tags, separated by spaces.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from experiments.runner.verdict import Tag, Verdict


@dataclass(frozen=True)
class Settled:
    """By a proof or a test, which hold for all that the claim is about."""

    verdict: Verdict  # on the claim as printed
    sentence: str  # what is true
    # test as `tests/FILE.py::NAME`, or a heading of a page as `docs/PAGE.md#HEADING`; one or more, but for "not
    # testable here", whose sentence gives the reason
    proof: tuple[str, ...] = ()
    tags: tuple[Tag, ...] = ()  # as `Judgement` has them


@dataclass(frozen=True)
class Measured:
    """By an experiment, whose results are judged by a rule of its own."""

    experiment: str  # its name; a folder of `experiments`, or one that is still to come


@dataclass(frozen=True)
class Claim:
    number: str  # letter of the paper and a number, which stays
    where: str  # in the paper
    text: str  # what it says, in our words
    by: Settled | Measured  # what settles it
    effect: str = ""  # the size of it that the paper prints, with its unit; "" if it prints none


@dataclass(frozen=True)
class Paper:
    name: str  # as docstrings have it
    title: str  # of the paper
    claims: tuple[Claim, ...]  # in the order of the paper


_TITLES: Final = {
    "hasse": "Hasse Diagrams for Attention: A Partial Order Framework for Designing Transformer Masks",
    "daa": "Dynamic Asymmetric Attention",
    "geometry": "The underlying structures of self-attention: symmetry, directionality, and emergent dynamics in "
    "Transformer training",
    "knowledge": "Decoupling Knowledge and Reasoning in Transformers: A Modular Architecture with Generalized "
    "Cross-Attention",
}


def _read() -> Iterator[Paper]:
    with Path(__file__).with_name("claims.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for name, title in _TITLES.items():
        yield Paper(name, title, tuple(_claim(row) for row in rows if row["paper"] == name))


def _claim(row: Mapping[str, str]) -> Claim:
    by: Settled | Measured = Measured(row["experiment"])
    if not row["experiment"]:
        proof, tags = tuple(row["proof"].split()), cast("tuple[Tag, ...]", tuple(row["tags"].split()))
        by = Settled(cast("Verdict", row["verdict"]), row["sentence"], proof, tags)
    return Claim(row["number"], row["where"], row["text"], by, row["effect"])


PAPERS: Final = tuple(_read())
