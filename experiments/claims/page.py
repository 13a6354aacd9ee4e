"""`docs/claims.md`, from the claims and from the results of the experiments that judge them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Final

from experiments.claims.claim import Claim, Measured, Settled
from experiments.claims.daa import DAA
from experiments.claims.geometry import GEOMETRY
from experiments.claims.hasse import HASSE
from experiments.claims.knowledge import KNOWLEDGE
from experiments.runner.experiment import ROOT, Judgement, find, names

PAPERS: Final = (HASSE, DAA, GEOMETRY, KNOWLEDGE)
PAGE: Final = ROOT.parent / "docs" / "claims.md"
NOT_RUN: Final = "not run yet"

_HEAD: Final = """# Is it true? The papers, claim by claim

Made by `python -m experiments.claims` from the claims in `experiments/claims/` and the committed results of the
experiments; a test keeps it so. A claim about all masks or all weights is settled by a proof or a test, one about
training by an experiment, whose rule was written before its run where nothing else is said. Verdicts are on
the claim as printed, at the scale that is named; `tiny` is two CPU cores, and says nothing of billions of parameters.
"""


def page() -> str:
    """The page as it should be now."""
    judged = judgements()
    lines = [_HEAD, _counts(judged), ""]
    for paper in PAPERS:
        lines += [f"## {paper.title}", "", f'Called "{paper.name}" in docstrings.', ""]
        lines += ["| | where | claim | verdict | what we have | by |", "|---|---|---|---|---|---|"]
        lines += [_row(claim, judged) for claim in paper.claims]
        lines.append("")
    return "\n".join(lines)


def judgements() -> dict[str, tuple[Judgement, str, str]]:
    """Number of a claim -> (what the results say, experiment, scale); results of the largest scale count.

    Raises:
        ValueError: an experiment judges a claim that is not its own.
    """
    own = {claim.number: claim.by.experiment for claim in claims() if isinstance(claim.by, Measured)}
    found: dict[str, tuple[Judgement, str, str]] = {}
    for name in names():
        experiment = find(name)
        for scale in experiment.recipes:
            folder = experiment.results(scale)
            if (folder / "results.json").is_file():
                for one in experiment.judge(folder):
                    if own.get(one.claim) != name:
                        raise ValueError(f"{name} judges {one.claim}, which is settled by {own.get(one.claim)}")
                    found[one.claim] = one, name, scale
    return found


def claims() -> list[Claim]:
    """Of all papers."""
    return [claim for paper in PAPERS for claim in paper.claims]


def check() -> list[str]:
    """What is wrong with the claims: numbers that are not in order, tests and headings that are not there."""
    wrong: list[str] = []
    for paper in PAPERS:
        letter = paper.name[0].upper()
        expected = [f"{letter}{number}" for number in range(1, len(paper.claims) + 1)]
        if [claim.number for claim in paper.claims] != expected:
            wrong.append(f"the claims of {paper.name} are not numbered {expected[0]} to {expected[-1]}")
    for claim in claims():
        if isinstance(claim.by, Settled):
            wrong += [f"{claim.number}: {proof} does not exist" for proof in claim.by.proof if not _exists(proof)]
    return wrong


def _exists(proof: str) -> bool:
    name, _, part = proof.partition("#" if proof.startswith("docs/") else "::")
    path = ROOT.parent / name
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8")
    if proof.startswith("docs/"):
        seen = Counter[str]()
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
            slug = re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")
            if part == (f"{slug}_{seen[slug]}" if seen[slug] else slug):
                return True
            seen[slug] += 1
        return False
    return not part or re.search(rf"^def {part}\(", text, re.MULTILINE) is not None


def _row(claim: Claim, judged: dict[str, tuple[Judgement, str, str]]) -> str:
    if isinstance(claim.by, Settled):
        links = "<br>".join(_link(proof) for proof in claim.by.proof)
        cells = [claim.by.verdict, claim.by.sentence, links]
    elif claim.number in judged:
        one, name, scale = judged[claim.number]
        when = "" if find(name).rule_before else "; rule written after the run"
        cells = [f"{one.verdict} ({scale}{when})", one.sentence, f"[{name}](../experiments/{name}/README.md)"]
    else:
        name = claim.by.experiment
        readme = (ROOT / name / "README.md").is_file()
        cells = [NOT_RUN, "", f"[{name}](../experiments/{name}/README.md)" if readme else f"{name}, to come"]
    return (
        "| " + " | ".join(cell.replace("|", "\\|") for cell in (claim.number, claim.where, claim.text, *cells)) + " |"
    )


def _link(proof: str) -> str:
    if proof.startswith("docs/"):
        return f"[proof]({proof.removeprefix('docs/')})"
    names = [re.sub("([/_])", r"\1<wbr>", name) for name in proof.split("::")]  # lines end between words
    return " ".join(f"<code>{name}</code>" for name in names)


def _counts(judged: dict[str, tuple[Judgement, str, str]]) -> str:
    def verdict(claim: Claim) -> str:
        if isinstance(claim.by, Settled):
            return claim.by.verdict
        return judged[claim.number][0].verdict if claim.number in judged else NOT_RUN

    order = ("confirmed", "corrected", "refuted", "not confirmed", "not testable here", NOT_RUN)
    lines = ["| paper | " + " | ".join(order) + " |", "|---" * (len(order) + 1) + "|"]
    for paper in PAPERS:
        counts = Counter(verdict(claim) for claim in paper.claims)
        lines.append(f"| {paper.name} | " + " | ".join(str(counts[name]) for name in order) + " |")
    return "\n".join(lines)


def write_page(path: Path = PAGE) -> None:
    """Write it, if nothing is wrong with the claims.

    Raises:
        ValueError: something is.
    """
    wrong = check()
    if wrong:
        raise ValueError("; ".join(wrong))
    path.write_text(page(), encoding="utf-8")
