"""The page of claims is what the claims and the committed results give, and all that it points to exists."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.claims import page as pages
from experiments.claims.claim import Claim, Measured, Settled
from experiments.runner.experiment import Judgement, find, names, no_claim


def test_the_committed_page_is_up_to_date() -> None:
    assert pages.PAGE.read_text(encoding="utf-8") == pages.page(), "run python -m experiments.claims"


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


def test_what_has_not_run_says_so() -> None:
    text, judged = pages.page(), pages.judgements()
    for claim in pages.claims():
        row = next(line for line in text.splitlines() if line.startswith(f"| {claim.number} |"))
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
