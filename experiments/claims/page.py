"""`docs/claims.md`, from the claims and from the results of the experiments that judge them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Final

from experiments.claims.claim import PAPERS, Claim, Measured, Settled
from experiments.claims.findings import findings
from experiments.runner.experiment import ROOT, Judgement, find, names
from experiments.runner.verdict import ACCURACY, LOSS, MEANINGS, OF_PARTS, SCORE, STEPS, TAGS, Tag, Verdict

PAGE: Final = ROOT.parent / "docs" / "claims.md"
NOT_RUN: Final = "not run yet"
_SCALES: Final = {"small": "one GPU", "paper": "cluster"}  # what they need; all others are parts of "tiny"
_SMALLEST: Final = {"loss": LOSS, "accuracy": ACCURACY, "score": SCORE, "steps": STEPS}
Judged = dict[str, tuple[Judgement, str, str]]  # claim -> (what the results say, experiment, scale)

_HEAD: Final = """# Is it true? The papers, claim by claim

attnflow rests on four papers. Here are their {count} claims, each with a verdict and with what stands behind it: a
proof, a test, or an experiment that you can run. Ten findings that surprised us come first. Then come
[what the words mean](#what-the-words-mean) and every claim.

`python -m experiments.claims` makes this page from `experiments/claims/` and from the committed results of the
[experiments](../experiments/README.md). No number is copied by hand, and a test fails where page and results differ.

## Ten findings
"""

_WORDS: Final = """## What the words mean

A verdict on an experiment is computed by [one function](../experiments/runner/verdict.py) from an interval, from where
the claim has the effect, and from the smallest effect that matters. Of the first four it is the first that applies:

{meanings}
- **not run yet**: there is an experiment, and it has no results so far.

{of_parts}

The smallest effects are {loss:g} nats per token of a loss, {accuracy:.0%} of the answers, {score:g} of the scores S
and D, and {steps:.0%} of the steps of training. The README of an experiment says which others it has.

Words in italics stand below a verdict that needs a qualification.

- *tiny*, *one GPU* and *cluster* are scales of experiments. *Tiny* is two CPU cores, for minutes or hours. Models that
  are trained from scratch have at most about a million parameters, pretrained ones at most 135 million. It says nothing
  about billions.
- *published checkpoints*: the results are about models that others trained and published. *authors' runs*: they are
  about training runs whose scores the paper's authors published, and the sentence says what ours at *tiny* say.
{tags}

Claims about all masks or all weights are settled by proofs and tests, claims about training by experiments. The paper's
effect is the size that the paper prints, in its own setting: it is not comparable with ours directly. Numbers in
brackets are 95 % intervals, by Student's t over seeds where nothing else is said. Verdicts on directionality are on the
paper's D, which belongs to the axes of a checkpoint: another basis of the same function has another D
([geometry function](../experiments/geometry_function/README.md)).
"""


def words() -> str:
    """What verdicts and tags mean, in the rule's own words."""

    def listed(mark: str, meanings: Mapping[Verdict, str] | Mapping[Tag, str]) -> str:
        lines = (f"- {mark}{name}{mark}: {meaning}" for name, meaning in meanings.items())
        return "\n".join(fill(line, 120, subsequent_indent="  ", break_on_hyphens=False) for line in lines)

    parts = fill(OF_PARTS, 120, break_on_hyphens=False)
    return _WORDS.format(meanings=listed("**", MEANINGS), of_parts=parts, tags=listed("*", TAGS), **_SMALLEST)


def page() -> str:
    judged = judgements()
    lines = [_HEAD.format(count=len(claims())), *_findings(), words(), "## How many", "", _counts(judged), ""]
    for paper in PAPERS:
        lines += [f"## {paper.title}", "", f'Called "{paper.name}" in docstrings.', ""]
        lines += ["| | claim | paper's effect | verdict | what we have | by |", "|---|---|---|---|---|---|"]
        lines += [_row(claim, judged) for claim in paper.claims]
        lines.append("")
    return "\n".join(lines)


def _findings() -> list[str]:
    lines: list[str] = []
    by_number = {claim.number: claim for claim in claims()}
    for place, one in enumerate(findings(claims()), 1):
        numbers = ", ".join(f"[{number}](#{number.lower()})" for number in one.claims if number in by_number)
        source = _experiment(one.experiment) if one.experiment else _by(by_number[one.claims[0]])
        lines.append(f"{place}. **{one.title}.** {one.text} (By {source}; {numbers}.)")
        if one.picture:
            file, shown = one.picture
            lines += ["", f"    ![{shown}](../experiments/{one.experiment}/results/{file})", ""]
    return [*lines, ""]


def judgements() -> Judged:
    """Number of a claim -> (what the results say, experiment, scale); results of the largest scale count."""
    own = {claim.number: claim.by.experiment for claim in claims() if isinstance(claim.by, Measured)}
    found: Judged = {}
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


def _row(claim: Claim, judged: Judged) -> str:
    number = f'<a id="{claim.number.lower()}"></a>{claim.number}'
    cells = [number, f"{claim.text} ({claim.where})", claim.effect, *_outcome(claim, judged), _by(claim)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _outcome(claim: Claim, judged: Judged) -> tuple[str, str]:
    if isinstance(claim.by, Settled):
        return _qualified(claim.by.verdict, claim.by.tags), claim.by.sentence
    if claim.number not in judged:
        return NOT_RUN, ""
    one, _, scale = judged[claim.number]
    size = next((need for start, need in _SCALES.items() if scale.startswith(start)), "tiny")
    return _qualified(one.verdict, (one.evidence or size, *one.tags)), one.sentence


def _qualified(verdict: str, words: Sequence[str]) -> str:
    return f"{verdict}<br>*{', '.join(words)}*" if words else verdict


def _by(claim: Claim) -> str:
    if isinstance(claim.by, Settled):
        return ", ".join(_link(proof) for proof in claim.by.proof)
    return _experiment(claim.by.experiment)


def _experiment(name: str) -> str:
    words = name.replace("_", " ")  # lines end between words
    readme = ROOT / name / "README.md"
    return f"[{words}](../experiments/{name}/README.md)" if readme.is_file() else f"{words}, to come"


def _link(proof: str) -> str:
    if proof.startswith("docs/"):
        return f"[proof]({proof.removeprefix('docs/')})"
    file, _, name = proof.partition("::")
    return f'[test](../{file} "{name}")' if name else f"[tests](../{file})"


def _counts(judged: Judged) -> str:
    verdicts: dict[str, Counter[str]] = {paper.name: Counter() for paper in PAPERS}
    for paper in PAPERS:
        for claim in paper.claims:
            one = claim.by
            if isinstance(one, Measured):
                one = judged[claim.number][0] if claim.number in judged else None
            verdicts[paper.name].update((NOT_RUN,) if one is None else (one.verdict, *one.tags))
    order = {name: name for name in (*MEANINGS, NOT_RUN)} | {name: f"of these *{name}*" for name in TAGS}
    lines = ["| | " + " | ".join(verdicts) + " |", "|---" * (len(PAPERS) + 1) + "|"]
    for name, shown in order.items():
        counts = [of[name] for of in verdicts.values()]
        if any(counts):
            lines.append(f"| {shown} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines)


def write_page(path: Path = PAGE) -> None:
    """Write it, if nothing is wrong with the claims."""
    wrong = check()
    if wrong:
        raise ValueError("; ".join(wrong))
    path.write_text(page(), encoding="utf-8")
