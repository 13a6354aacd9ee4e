"""The verdict on filling gaps; its rule was written after the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.hasse.judging import READABLE, ROUNDING
from experiments.infilling.summary import TABLE
from experiments.runner.experiment import Judgement, Verdict
from experiments.runner.files import read
from experiments.runner.statistics import said

_CLOSE = "random, one by one"  # the way with the lowest loss of those that read both sides
_FAST = "one shot"


def judge(results: Path) -> Sequence[Judgement]:
    """Refuted if what is filled is not what was trained; confirmed if it also beats causal and the table in loss."""
    content = read(results / "results.json")
    ways = {one["way"]: one for one in content["ways"]}
    if not {_CLOSE, _FAST, "causal"} <= ways.keys():
        return []
    compared, differ = (sum(one.get(key, 0) for one in ways.values()) for key in ("compared", "differ"))
    exact = max(one.get("closest", 0.0) for one in ways.values()) <= ROUNDING
    causal = content["differences"][f"{_CLOSE} less causal"]["held_out"]
    table = content["differences"][f"{_FAST} less {TABLE}"]["held_out"]
    useful = causal[2] < 0 and table[2] < 0
    verdict: Verdict = "refuted" if not exact else "confirmed" if useful else "not confirmed"
    words = {way: one["real_words"][0] for way, one in ways.items()}
    sentence = (
        f"{'Exact' if exact else 'Not exact'}, and {'useful' if useful else 'of no use yet at this scale'}: of "
        f"{compared} letters that were filled {differ} are not those of the merged task. Nats per letter: one by one "
        f"less causal, which reads the left side alone, {said(causal)}; in one shot less a table of the two neighbours "
        f"{said(table)}. Letters in real words: one by one {words[_CLOSE]:.0%}, one shot {words[_FAST]:.0%}, causal "
        f"{words['causal']:.0%}, the text itself {content['real_words']:.0%}."
    )
    weak = words[_CLOSE] < READABLE * content["real_words"]
    return [Judgement("H19", verdict, sentence, ("floor",) if weak else ())]
