"""The page of claims is what the claims and the committed results give, and all that it points to exists."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from experiments.claims import findings
from experiments.claims import page as pages
from experiments.claims.claim import Claim, Measured, Settled
from experiments.runner.experiment import ROOT, Judgement, find, names, no_claim


@pytest.fixture(scope="module")
def text() -> str:
    return pages.page()


def test_the_committed_page_is_up_to_date(text: str) -> None:
    assert pages.PAGE.read_text(encoding="utf-8") == text, "run python -m experiments.claims"


def test_claims_are_numbered_and_their_proofs_exist() -> None:
    assert pages.check() == []
    numbers = [claim.number for claim in pages.claims()]
    assert len(set(numbers)) == len(numbers)


def test_a_proof_that_is_not_there_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = (
        "tests/order/test_flow.py::test_nothing",
        "docs/maths.md#nothing",
        "tests/nothing.py",
        "docs/maths.md#bias_1",
    )
    good = ("tests/order/test_flow.py", "docs/maths.md#bias", "docs/maths.md#what-the-paper-prints-and-what-is-right_1")
    claim = Claim("H1", "", "", Settled("confirmed", "", bad + good))
    monkeypatch.setattr(pages, "PAPERS", (replace(pages.PAPERS[0], claims=(claim, replace(claim, number="H3"))),))
    wrong = pages.check()
    assert wrong[0] == "the claims of hasse are not numbered H1 to H2"
    assert wrong[1:5] == [f"H1: {proof} does not exist" for proof in bad]
    assert len(wrong) == 9
    with pytest.raises(ValueError, match="does not exist"):
        pages.write_page(tmp_path / "claims.md")


def test_what_has_not_run_says_so(text: str) -> None:
    judged = pages.judgements()
    for claim in pages.claims():
        row = next(line for line in text.splitlines() if f"</a>{claim.number} |" in line)
        waits = isinstance(claim.by, Measured) and claim.number not in judged
        assert (f"| {pages.NOT_RUN} |" in row) == waits


def test_experiments_judge_their_own_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {claim.by.experiment for claim in pages.claims() if isinstance(claim.by, Measured)}
    assert {name for name in names() if find(name).judge is not no_claim} <= own
    judge = lambda _: [Judgement("H1", "confirmed", "")]  # noqa: E731
    stranger = replace(find("facts"), judge=judge)
    monkeypatch.setattr(pages, "find", lambda name: stranger if name == "facts" else find(name))
    with pytest.raises(ValueError, match="facts judges H1"):
        pages.page()


def test_a_row_shows_the_effect_and_what_qualifies_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    hasse, *others = pages.PAPERS
    one, two, *rest = hasse.claims
    one = replace(one, effect="a | b", by=Settled("confirmed", "So it is.", ("docs/maths.md",), ("empty", "floor")))
    shown = replace(hasse, claims=(one, replace(two, by=Measured("facts")), *rest))
    judge = lambda _: [Judgement("H2", "refuted", "No.", ("superseded", "rule after"), "elsewhere")]  # noqa: E731
    later = replace(find("facts"), judge=judge)
    own = [claim for paper in others for claim in paper.claims if claim.by != Measured("facts")]
    monkeypatch.setattr(pages, "PAPERS", (shown, replace(others[0], claims=tuple(own))))
    monkeypatch.setattr(pages, "find", lambda name: later if name == "facts" else find(name))
    text = pages.page()
    assert "| a \\| b | confirmed<br>*empty, floor* | So it is. | [proof](maths.md) |" in text
    assert "| refuted<br>*elsewhere, superseded, rule after* | No. | [facts](../experiments/facts/README.md) |" in text


def test_links_of_the_page_lead_somewhere(text: str) -> None:
    targets = set(re.findall(r"\]\((\.\./[^)# ]+)", text))
    assert any(target.endswith(".png") for target in targets)
    assert [target for target in targets if not (pages.PAGE.parent / target).exists()] == []
    anchors = set(re.findall(r"\]\(#(\w+)\)", text))
    assert anchors <= set(re.findall(r'id="(\w+)"', text))


def test_ten_findings_say_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(findings.findings(pages.claims())) == 10
    arms = findings.results_of("hasse")["arms"]
    deep = next(one for one in arms if one["arm"] == "repeats depth 4")

    def results(loss: float) -> Any:
        return lambda *_: {"arms": [{**one, "held_out": [loss] * 3} if one is deep else one for one in arms]}

    monkeypatch.setattr(findings, "FINDINGS", (findings.depth_is_not_enough,))
    monkeypatch.setattr(findings, "results_of", results(9.87))
    (found,) = findings.findings(pages.claims())
    assert "ends at 9.87 nats" in found.text
    monkeypatch.setattr(findings, "results_of", results(0.02))
    assert findings.findings(pages.claims()) == []


def test_the_list_of_experiments_has_all_of_them_and_their_columns() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[(\w+)\]\(\1/README\.md\) \| (.*) \|$", text, re.MULTILINE))
    assert sorted(rows) == names()
    for name, row in rows.items():
        assert row.startswith(f"{find(name).question} |")
    described: dict[str, list[str]] = {}
    for head, table in pairwise(text.split("\n\n")):
        if table.startswith("| column |"):
            columns = [name for line in table.splitlines()[2:] for name in re.findall("`([^`]+)`", line.split("|")[1])]
            described |= dict.fromkeys(re.findall(r"`([\w/]+\.csv)`", head), columns)
    for path in sorted(ROOT.glob("*/results/**/*.csv")):
        name = path.relative_to(ROOT)  # a scale with columns of its own is described by itself
        columns = described.get(name.as_posix(), described[f"{name.parts[0]}/results/results.csv"])
        assert columns == path.read_text(encoding="utf-8").partition("\n")[0].split(","), name
    assert {name.partition("/")[0] for name in described} == set(names())
