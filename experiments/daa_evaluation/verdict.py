"""What the likelihoods say of the paper's claims, by rules that the README has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from experiments.daa_evaluation.compared import CONTROLS, GUIDANCE, MARGIN, NATS, STEPS
from experiments.daa_evaluation.likelihood import ALIBI, BASE, GSM8K, HUMANEVAL, SHOTS
from experiments.runner.experiment import Judgement
from experiments.runner.statistics import Interval, widest
from experiments.runner.verdict import LOSS, UNTESTED, Tag, decide, empty, jointly

PREFERENCE: Final = 0.1  # nats of the margin between a gold solution and a wrong one

_QUALITY: Final = "No package ships QuALITY, and nothing is fetched from a hub; the scale `paper` takes it by name."
_PASSED: Final = {  # of the run before this one, with 16,384 tokens of training
    HUMANEVAL: "Pass rates stay at the floor: in an earlier run, 0 of 20 problems with and without.",
    GSM8K: "Pass rates stay at the floor: in an earlier run, 0 of 25 problems with and 1 of 25 without.",
}
_PROMPTED: Final = "Pass rates are at the floor for every prompting: at most 1 of 25 problems of GSM8k."


def judged(content: Mapping[str, Any]) -> list[Judgement]:
    """D8 to D11; as long as seeds are to come, the floor of the pass rates is all that is said."""
    rows = {(row["arm"], row["benchmark"], row["measure"]): row for row in content["rows"]}
    quality = Judgement("D10", "not testable here", _QUALITY)
    done = rows.get((GUIDANCE, GSM8K, NATS), {"seeds": 0})["seeds"]
    if done < content["seeds"]:
        said = f"The study of likelihoods, which can move, is unfinished: {done} of {content['seeds']} seeds."
        floors = {"D8": _PASSED[HUMANEVAL], "D9": _PASSED[GSM8K], "D11": _PROMPTED}
        waiting = [
            Judgement(claim, "not testable here", f"{floor} {said}", ("floor",)) for claim, floor in floors.items()
        ]
        return [*waiting, quality]
    return [
        _gain("D8", HUMANEVAL, rows, content),
        _gain("D9", GSM8K, rows, content),
        quality,
        _prompting(rows, content["prompting"]),
    ]


def both(difference: Mapping[str, Sequence[float]]) -> Interval:
    """Of a difference what its interval over items says as well as that over seeds."""
    return widest(Interval(*difference["items"]), Interval(*difference["seeds"]))


def _gain(claim: str, name: str, rows: Mapping[tuple[str, str, str], Any], content: Mapping[str, Any]) -> Judgement:
    """Guidance against the base; "empty" if a control gains as much. Pass rates, the claim's, are at the floor."""
    nats, margin = (rows[GUIDANCE, name, measure] for measure in (NATS, MARGIN))
    controls = content["guidance less"].get(name, {})
    cost = both(nats["less base"])
    decision = jointly(decide(cost, "below", LOSS), decide(both(margin["less base"]), "above", PREFERENCE))
    tags: list[Tag] = [*empty(decision, "below", (both(one[NATS]) for one in controls.values()))]
    preferred = rows[BASE, name, "preferred"]["value"]
    beside = "; ".join(f"{_said(controls[arm][NATS])} less {arm}" for arm in CONTROLS if arm in controls)
    about = f"{nats['items']} of {content['items'][name]['items']} items, {nats['seeds']} seeds"
    sentence = (
        f"By likelihood, after {content['trained tokens']:,} tokens of training, nats per token of the gold solutions "
        f"({about}): guidance less base {_said(nats['less base'])}, margin over wrong ones "
        f"{_said(margin['less base'], 2)} nats. At equal parameters: {beside}. The base prefers the gold solution in "
        f"{preferred[0]:.0%}. {_PASSED[name]}"
    )
    return Judgement.of(claim, decision, sentence, "rule after", "floor", *tags)


def _prompting(rows: Mapping[tuple[str, str, str], Any], others: Mapping[str, Any]) -> Judgement:
    """Guidance without examples against the base with them, and against ALiBi: it has to beat all.

    Examples show the form of the last sentence, so that solutions also count without that sentence.
    """
    parts = [
        decide(widest(both(one[NATS]), both(one[STEPS])) if name in SHOTS else both(one[NATS]), "below", LOSS)
        for name, one in others.items()
    ]
    decision = jointly(*parts, *[UNTESTED] * (len(SHOTS) + 1 - len(parts)))
    own = rows[GUIDANCE, GSM8K, NATS]["value"][0]
    said = "; ".join(
        f"{_said(other[NATS], 3)} less {_NAMES[name]} ({other[STEPS]['items'][0]:+.3f} before the last sentence)"
        for name, other in others.items()
    )
    sentence = (
        f"By likelihood, GSM8k's gold solutions cost guidance without examples {own:.3f} nats per token: {said}. "
        f"Untrained ALiBi is a broken model, no rival; self-consistency has no likelihood. {_PROMPTED}"
    )
    return Judgement.of("D11", decision, sentence, "rule after", "floor")


_NAMES: Final = {
    SHOTS[0]: "the base with five answered examples",
    SHOTS[1]: "the base with five reasoned examples",
    ALIBI: "ALiBi untrained",
}


def _said(difference: Mapping[str, Sequence[float]], digits: int = 4) -> str:
    mean, low, high = difference["items"]
    first, last = difference["seeds"][1:]
    numbers = [f"{value:+.{digits}f}" for value in (mean, low, high, first, last)]
    return "{} [{}, {}] (over seeds [{}, {}])".format(*numbers)
