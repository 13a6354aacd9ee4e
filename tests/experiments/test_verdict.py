"""One rule gives every verdict: what the page says of it, on random intervals, and no other rule beside it."""

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.runner.experiment import ROOT
from experiments.runner.statistics import Interval, widest
from experiments.runner.verdict import (
    MEANINGS,
    UNTESTED,
    Decision,
    Side,
    decide,
    empty,
    exactly,
    jointly,
    no_more,
    partly,
    possible,
    uncontradicted,
)  # fmt: skip

GRID = st.integers(-8, 8).map(lambda number: number / 4)  # exact, and ends meet 0 and the smallest effect often
SMALLEST = st.integers(0, 8).map(lambda number: number / 4)
SIDES = st.sampled_from(("above", "below", "none"))
DECISIONS = st.sampled_from([Decision(word, small) for word in list(MEANINGS)[:4] for small in (False, True)])
OPPOSITE: dict[Side, Side] = {"above": "below", "below": "above", "none": "none"}


@st.composite
def intervals(draw: st.DrawFn) -> Interval:
    low, mean, high = sorted(draw(st.tuples(GRID, GRID, GRID)))
    return Interval(mean, low, high)


def by_the_page(value: Interval, claimed: Side, smallest: float) -> str:
    """The sentences of the page, one after the other."""
    clear = {"above": value.low > 0, "below": value.high < 0}
    lies_within = max(-value.low, value.high) <= smallest
    matters = max(value.mean, -value.mean) >= smallest
    if claimed == "none":
        if lies_within:
            return "confirmed"
        return "refuted" if any(clear.values()) and matters else "not confirmed"
    if clear[claimed] and matters:
        return "confirmed"
    if clear[OPPOSITE[claimed]]:
        return "refuted"
    return "no effect" if lies_within else "not confirmed"


@given(intervals(), SIDES, SMALLEST)
def test_the_rule_is_what_the_page_says(value: Interval, claimed: Side, smallest: float) -> None:
    found = decide(value, claimed, smallest)
    assert found.verdict == by_the_page(value, claimed, smallest)
    clear, below = value.low > 0 or value.high < 0, abs(value.mean) < smallest
    assert found.small == (clear and below)
    mirrored = Interval(-value.mean, -value.high, -value.low)
    assert decide(mirrored, OPPOSITE[claimed], smallest) == found


@given(intervals(), SMALLEST)
def test_a_claim_and_its_opposite_are_not_both_confirmed(value: Interval, smallest: float) -> None:
    above, below, none = (decide(value, side, smallest).verdict for side in ("above", "below", "none"))
    assert above != "confirmed" or below == "refuted"
    assert (above == "no effect") <= (none == "confirmed")
    assert (no_more(value, smallest).verdict == "confirmed") == (value.high < smallest)


@given(st.lists(DECISIONS, min_size=1, max_size=4))
def test_parts_make_a_whole(parts: list[Decision]) -> None:
    words = {part.verdict for part in parts}
    whole = jointly(*parts)
    expected = "not confirmed"
    if "refuted" in words or words == {"confirmed"}:
        expected = "refuted" if "refuted" in words else "confirmed"
    elif "no effect" in words and "confirmed" not in words:
        expected = "no effect"
    assert whole.verdict == expected
    assert whole.small == any(part.small for part in parts if part.verdict == expected)
    assert jointly(*reversed(parts)) == whole
    main, *others = parts
    if main.verdict != "confirmed":
        assert partly(*parts) == main
    elif {one.verdict for one in others} & {"refuted", "no effect"}:
        assert partly(*parts).verdict == "corrected"
    else:
        assert partly(*parts) == whole


def test_what_stands_beside_the_rule() -> None:
    good, bad, nothing = Interval(3, 2, 4), Interval(-3, -4, -2), Interval(0, -1, 1)
    assert [possible(decide(one, "above", 1)).verdict for one in (good, bad, nothing)] == [
        "confirmed", "not confirmed", "no effect",
    ]  # fmt: skip
    found = [exactly(*counts).verdict for counts in ((0, 5), (1, 5), (0, 0))]
    assert found == ["confirmed", "refuted", "not confirmed"]
    yes, no, none = (decide(one, "above", 1) for one in (good, bad, nothing))
    assert uncontradicted(yes, no) == uncontradicted(no, yes) == UNTESTED
    assert [uncontradicted(*pair) for pair in ((yes, none), (none, no), (no, none))] == [yes, none, no]
    assert (empty(none, "above", [good]), empty(none, "above", [nothing])) == ((), ("empty",))
    assert widest(good, nothing) == Interval(0, -1, 4)
    assert widest(good, bad) in (Interval(3, -4, 4), Interval(-3, -4, 4))
    # A control that does as well, or as badly, empties a verdict; one that does worse, or better, does not.
    for decision, side in ((decide(good, "above", 1), "above"), (decide(bad, "below", 1), "below")):
        assert empty(decision, side, [good, nothing]) == ("empty",)
        assert empty(decision, side, [good if side == "above" else bad]) == ()
    refuted = decide(bad, "above", 1)
    assert (empty(refuted, "above", [bad]), empty(refuted, "above", [nothing])) == ((), ("empty",))
    with pytest.raises(ValueError, match="smallest effect of at least 0"):
        decide(good, "above", -1)
    with pytest.raises(ValueError, match="at least one part"):
        jointly()


def test_no_experiment_has_a_rule_of_its_own() -> None:
    """Words of a verdict that the rule gives stand in no other module, and none counts signs."""
    words = set(list(MEANINGS)[:4])
    for path in sorted(ROOT.rglob("*.py")):
        if path != ROOT / "runner" / "verdict.py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            said = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)} & words
            assert not said, f"{path.relative_to(ROOT)} says {said}"
    judges = [
        path
        for path in ROOT.glob("*/*.py")
        if "-> list[Judgement]" in (text := path.read_text()) or "-> Sequence[Judgement]" in text
    ]
    assert len(judges) > 15
    for path in judges:
        assert not _counts_signs(path), f"{path.relative_to(ROOT)} reads the side of an interval"


def _counts_signs(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.Attribute) and node.attr in ("side", "low", "high") for node in ast.walk(tree))
