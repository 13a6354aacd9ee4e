"""A claim of a paper, and what settles it."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.runner.experiment import Tag, Verdict


@dataclass(frozen=True)
class Settled:
    """By a proof or a test, which hold for all that the claim is about.

    Attributes:
        verdict: on the claim as printed.
        sentence: what is true.
        proof: test as `tests/FILE.py::NAME`, or a heading of a page as `docs/PAGE.md#HEADING`; one or more, but for
            "not testable here", whose sentence gives the reason.
        tags: as `Judgement` has them.
    """

    verdict: Verdict
    sentence: str
    proof: tuple[str, ...] = ()
    tags: tuple[Tag, ...] = ()


@dataclass(frozen=True)
class Measured:
    """By an experiment, whose results are judged by a rule of its own.

    Attributes:
        experiment: its name; a folder of `experiments`, or one that is still to come.
    """

    experiment: str


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        number: letter of the paper and a number, which stays.
        where: in the paper.
        text: what it says, in our words.
        by: what settles it.
        effect: the size of it that the paper prints, with its unit; "" if it prints none.
    """

    number: str
    where: str
    text: str
    by: Settled | Measured
    effect: str = ""


@dataclass(frozen=True)
class Paper:
    """A paper and its claims.

    Attributes:
        name: as docstrings have it.
        title: of the paper.
        claims: in the order of the paper.
    """

    name: str
    title: str
    claims: tuple[Claim, ...]
