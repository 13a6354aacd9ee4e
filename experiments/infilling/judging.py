"""The verdict on filling gaps; its rule was written after the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.hasse.judging import READABLE, ROUNDING
from experiments.infilling.summary import TABLE
from experiments.runner.experiment import Judgement
from experiments.runner.files import read
from experiments.runner.statistics import Interval, said
from experiments.runner.verdict import ACCURACY, LOSS, decide, exactly, jointly, uncontradicted

_CLOSE = "random, one by one"  # the way with the lowest loss of those that read both sides
_FAST = "one shot"


def judge(results: Path) -> Sequence[Judgement]:
    """Whether what is filled is what was trained, and beats causal, by loss and right letters, and the table."""
    content = read(results / "results.json")
    ways = {one["way"]: one for one in content["ways"]}
    if not {_CLOSE, _FAST, "causal"} <= ways.keys():
        return []
    compared, differ = (sum(one.get(key, 0) for one in ways.values()) for key in ("compared", "differ"))
    exact = exactly(sum(one["closest"] > ROUNDING for one in ways.values() if "closest" in one), compared)
    causal, right = (content["differences"][f"{_CLOSE} less causal"][name] for name in ("held_out", "right"))
    table = content["differences"][f"{_FAST} less {TABLE}"]["held_out"]
    better = uncontradicted(decide(Interval(*causal), "below", LOSS), decide(Interval(*right), "above", ACCURACY))
    useful = jointly(better, decide(Interval(*table), "below", LOSS))
    words = {way: one["real_words"][0] for way, one in ways.items()}
    sentence = (
        f"{'Exact' if exact.holds else 'Not exact'}, and {'useful' if useful.holds else 'of no use yet at this scale'}"
        f": of {compared} letters that were filled {differ} are not those of the merged task. Nats per letter: one by "
        f"one less causal, which reads the left side alone, {said(causal)}; share of right letters, likewise, "
        f"{said(right, '.1%')}. In one shot less a table of the two "
        f"neighbours {said(table)}. Letters in real words: one by one {words[_CLOSE]:.0%}, one shot "
        f"{words[_FAST]:.0%}, causal {words['causal']:.0%}, the text itself {content['real_words']:.0%}."
    )
    weak = words[_CLOSE] < READABLE * content["real_words"]
    return [Judgement.of("H19", jointly(exact, useful), sentence, *(("floor",) if weak else ()), "rule after")]
