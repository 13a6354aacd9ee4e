"""What edits did, over facts: shares with intervals, for held-out facts and for those the method was tuned on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from attnflow._core.markup import aligned
from experiments.editing.study import ARMS
from experiments.knowledge_ablation.summary import share
from experiments.runner.figures import SIZE, canvas, colour, enlarge
from experiments.runner.files import write, write_table
from experiments.runner.statistics import Interval, student
from experiments.runner.study import read_study

Measured = Mapping[str, Any]

_QUANTITIES: Final[Mapping[str, Callable[[Measured, Measured], float | None]]] = {
    "fact": lambda after, _: float(after["is_other"][0]),
    "paraphrases": lambda after, _: float(np.mean(after["is_other"][1:])),
    "understood": lambda _, before: float(np.mean(before["is_answer"][1:])),
    "paraphrases understood": lambda after, before: _share(after["is_other"][1:], before["is_answer"][1:]),
    "kept": lambda after, _: float(np.mean(after["other_facts_kept"])),
    "leaked": lambda after, _: float(np.mean(after["other_facts_leaked"])),
    "text": lambda after, before: after["text"] - before["text"],
    "change": lambda after, _: after.get("relative_change", 0.0),
}


_NUMBERS: Final = ("text", "change")  # the quantities that are no shares
UNSEEN: Final = "not tuned on"
TUNED_ON: Final = frozenset(  # on which layers, ridge, steps and rate were chosen
    {("capital", "France"), ("capital", "Spain"), ("language", "France"), ("language", "Japan")}
    | {("opposite", "hot"), ("opposite", "fast")}
)

# Those that are drawn, with their names there.
_SHARES: Final = {
    "fact": "the fact",
    "paraphrases": "paraphrases",
    "paraphrases understood": "paraphrases that the\nmodel understood",
    "kept": "other facts kept",
}


@dataclass(frozen=True)
class Outcome:
    # "held out"; "tuned", those of `knowledge_ablation`, of which six tuned the method; or "not tuned on", all but
    # these six
    facts: str
    arm: str  # how the model was edited; "before": not
    count: int  # how many facts
    # with a 95 % interval over facts. Shares of prompts: of the fact and of its paraphrases that the new answer
    # follows, of paraphrases that the model answered as the fact before it was edited (understood) and, of these alone,
    # that the new answer follows, of other facts that keep their answer or get the new one; the change of the loss on
    # other text, in nats; the largest relative change of a layer's values.
    quantities: Mapping[str, Interval]


def outcomes(runs: Sequence[Measured]) -> list[Outcome]:
    """Every arm with its intervals; one that has not been run is left out."""
    before = {_key(run): run["before"] for run in runs if "before" in run}
    known = [run for run in runs if _key(run) in before]
    sets = {
        "held out": [run for run in known if run["held_out"]],
        "tuned": [run for run in known if not run["held_out"]],
        UNSEEN: [run for run in known if _key(run) not in TUNED_ON],
    }
    made: list[Outcome] = []
    for name, mine in sets.items():
        plain = [(run["before"], run["before"]) for run in mine if "before" in run]
        pairs = {arm: [(r["arms"][arm], before[_key(r)]) for r in mine if arm in r["arms"]] for arm in ARMS}
        made += [Outcome(name, arm, len(some), _over(some)) for arm, some in {"before": plain, **pairs}.items() if some]
    return made


def _over(pairs: Sequence[tuple[Measured, Measured]]) -> dict[str, Interval]:
    taken = {key: [take(*pair) for pair in pairs] for key, take in _QUANTITIES.items()}
    values = {key: [one for one in row if one is not None] for key, row in taken.items()}
    return {key: student(row) if key in _NUMBERS else share(row) for key, row in values.items() if row}


def _share(flags: Sequence[bool], among: Sequence[bool]) -> float | None:
    """Of those that are among; None where none is."""
    some = [flag for flag, chosen in zip(flags, among, strict=True) if chosen]
    return float(np.mean(some)) if some else None


def _key(run: Measured) -> tuple[str, str]:
    return run["fact"]["relation"], run["fact"]["subject"]


def summarise(folder: Path, results: Path) -> str:
    about, runs = read_study(folder)
    made = outcomes(runs)
    content = {
        "interval": "mean, and 95 % over facts: Student's t; Wilson's for shares that are 0 or 1 for every fact",
        "config": about["config"],
        "outcomes": [asdict(one) for one in made],
    }
    write(results / "results.json", content)
    rows = [
        [one.facts, one.arm, one.count, name, *(f"{number:.5f}" for number in v.numbers)]
        for one in made
        for name, v in one.quantities.items()
    ]
    write_table(results / "results.csv", ["facts", "arm", "count", "quantity", "mean", "low", "high"], rows)
    figure([one for one in made if one.facts != UNSEEN]).savefig(results / "figure.png", dpi=110)
    return table(made)


def figure(made: Sequence[Outcome]) -> Any:
    """Shares of prompts by arm, with intervals: held-out facts, and those that the method was tuned on."""
    sets = list(dict.fromkeys(one.facts for one in made))
    drawn, panels = canvas(9.0 * len(sets), 6.5, 1, len(sets))
    for axes, name in zip(panels, sets, strict=True):
        mine = [one for one in made if one.facts == name and one.arm != "before"]
        for number, one in enumerate(mine):
            middle, low, high = zip(*(one.quantities[q].numbers for q in _SHARES if q in one.quantities), strict=True)
            places = np.array([row for row, q in enumerate(_SHARES) if q in one.quantities]) + 0.14 * number - 0.28
            span = [np.subtract(middle, low), np.subtract(high, middle)]
            axes.errorbar(middle, places, xerr=span, fmt="o", color=colour(one.arm), label=one.arm, markersize=7)
        axes.set(title=f"{name} facts", xlabel="share of prompts", xlim=(-0.03, 1.03))
        axes.set_yticks(range(len(_SHARES)), list(_SHARES.values()) if axes is panels[0] else [""] * len(_SHARES))
        axes.invert_yaxis()
        enlarge(axes)
    panels[-1].legend(fontsize=SIZE, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return drawn


def table(made: Sequence[Outcome]) -> str:
    lines = [["facts", "arm", "number", *_QUANTITIES]]
    for one in made:
        numbers = {name: f"{100 * value.mean:.0f} %" for name, value in one.quantities.items()}
        shares = [numbers.get(name, "-") for name in _QUANTITIES if name not in _NUMBERS]
        lines.append(
            [one.facts, one.arm, str(one.count), *shares, str(one.quantities["text"]),
             f"{one.quantities['change'].mean:.2g}"]
        )  # fmt: skip
    return aligned(lines, left=[0, 1])
