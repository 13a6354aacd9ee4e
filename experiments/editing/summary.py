"""What edits did, over relations, as facts of one relation are alike; and what training leaves of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np

from attnflow._core.markup import aligned
from experiments.editing.lasting import WAYS
from experiments.editing.study import ARMS
from experiments.knowledge_ablation.summary import share
from experiments.runner.figures import SIZE, canvas, colour, enlarge, plot_band
from experiments.runner.files import write, write_table
from experiments.runner.statistics import Interval, student
from experiments.runner.study import read_study

Measured = Mapping[str, Any]


def _stays(after: Measured, before: Measured) -> list[bool]:
    """Whether each fact about the subject that the model knew, and each statement on it, is as before."""
    return [*after["subject_facts"], *(after["statements"][one] == said for one, said in before["statements"].items())]


def _mean(flags: Sequence[bool]) -> float | None:
    return float(np.mean(flags)) if flags else None


def _among(flags: Sequence[bool], chosen: Sequence[bool]) -> float | None:
    """Mean of those that are chosen; None where none is."""
    return _mean([flag for flag, one in zip(flags, chosen, strict=True) if one])


_QUANTITIES: Final[Mapping[str, Callable[[Measured, Measured], float | None]]] = {
    "fact": lambda after, _: float(after["is_other"][0]),
    "paraphrases": lambda after, _: _mean(after["is_other"][1:]),
    "understood": lambda _, before: _mean(before["is_answer"][1:]),
    "paraphrases understood": lambda after, before: _among(after["is_other"][1:], before["is_answer"][1:]),
    "same subject": lambda after, before: _mean(_stays(after, before)),
    "subject's facts": lambda after, _: _mean(after["subject_facts"]),
    "same relation": lambda after, _: _mean(after["relation_kept"]),
    "leaked": lambda after, _: _mean(after["relation_leaked"]),
    "text": lambda after, before: after["text"] - before["text"],
    "change": lambda after, _: after.get("change"),
    "report ok": lambda after, _: float(after["ok"]) if "ok" in after else None,
}
_NUMBERS: Final = ("text", "change")  # the quantities that are no shares
AIMS: Final = {  # that were set before the run: shares of at least so much
    "fact": 0.95, "paraphrases understood": 0.85, "same subject": 0.85, "same relation": 0.95,
}  # fmt: skip
TEXT_AIM: Final = 0.01  # nats a token, at most


@dataclass(frozen=True)
class Outcome:
    arm: str  # how the model was edited; "before": not
    count: int  # how many facts
    # with a 95 % interval over the means of relations. Shares: of facts and of their paraphrases that the new answer
    # follows; of paraphrases that the model answered as the fact before it was edited (understood) and, of these alone,
    # that the new answer follows; of statements and facts about the subject that stay, and of its facts alone; of other
    # facts of the relation that stay or get the new answer; of reports that are ok. And the change of the loss on other
    # text, in nats a token; the largest relative change of a layer's values.
    quantities: Mapping[str, Interval]
    relations: Mapping[str, Mapping[str, float]]  # of each quantity, the mean of each relation


def outcomes(runs: Sequence[Measured]) -> list[Outcome]:
    """Every arm with its intervals over relations."""
    arms = {"before": [(run, run["before"]) for run in runs]}
    arms |= {arm: [(run, run["arms"][arm]) for run in runs] for arm in ARMS}
    return [_outcome(arm, some) for arm, some in arms.items()]


def _outcome(arm: str, pairs: Sequence[tuple[Measured, Measured]]) -> Outcome:
    means: dict[str, dict[str, float]] = {}
    for name, take in _QUANTITIES.items():
        values: dict[str, list[float]] = {}
        for run, after in pairs:
            if (value := take(after, run["before"])) is not None:
                values.setdefault(run["fact"]["relation"], []).append(value)
        means[name] = {relation: fmean(some) for relation, some in values.items()}
    intervals = {
        name: (student if name in _NUMBERS else share)(list(some.values())) for name, some in means.items() if some
    }
    return Outcome(arm, len(pairs), intervals, {name: some for name, some in means.items() if some})


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and figure.png, and return the table."""
    about, runs = read_study(folder)
    if "way" in runs[0]:
        return _summarise_lasting(about, runs, results)
    made = outcomes(runs)
    content = {
        "interval": "mean, and 95 % over relations: Student's t; Wilson's for shares that are 0 or 1 in every relation",
        "config": about["config"],
        "outcomes": [asdict(one) for one in made],
    }
    write(results / "results.json", content)
    rows = [
        [one.arm, one.count, len(one.relations[name]), name, *(f"{number:.5f}" for number in v.numbers)]
        for one in made
        for name, v in one.quantities.items()
    ]
    write_table(results / "results.csv", ["arm", "facts", "relations", "quantity", "mean", "low", "high"], rows)
    figure(made).savefig(results / "figure.png", dpi=110)
    return table(made)


def figure(made: Sequence[Outcome]) -> Any:
    """Shares of prompts by arm, with intervals over relations, each relation as a point, and what was aimed at."""
    drawn, panels = canvas(11.0, 6.5, 1, 1)
    axes = panels[0]
    for number, one in enumerate(made[1:]):
        for row, (name, aim) in enumerate(AIMS.items()):
            if name not in one.quantities:
                continue
            middle, low, high = one.quantities[name].numbers
            place, shade = row + 0.22 * number - 0.22, colour(one.arm)
            points = list(one.relations[name].values())
            axes.plot(points, [place] * len(points), "|", color=shade, markersize=11, alpha=0.6)
            label = one.arm if row == 0 else None
            span = [[middle - low], [high - middle]]
            axes.errorbar([middle], [place], xerr=span, fmt="o", color=shade, label=label, markersize=8)
            axes.plot([aim, aim], [row - 0.4, row + 0.4], color="0.6", linewidth=1, linestyle="--")
    axes.set(xlabel="share of prompts; bars: relations; dashed: the aim", xlim=(-0.03, 1.03))
    axes.set_yticks(range(len(AIMS)), [name.replace(" ", "\n") for name in AIMS])
    axes.invert_yaxis()
    enlarge(axes)
    axes.legend(fontsize=SIZE, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return drawn


def table(made: Sequence[Outcome]) -> str:
    lines = [["arm", "facts", *_QUANTITIES]]
    for one in made:
        numbers = {name: f"{100 * value.mean:.0f} %" for name, value in one.quantities.items()}
        numbers |= {name: f"{one.quantities[name]:.3f}" for name in _NUMBERS if name in one.quantities}
        lines.append([one.arm, str(one.count), *(numbers.get(name, "-") for name in _QUANTITIES)])
    return aligned(lines, left=[0])


_LASTING: Final[Mapping[str, Callable[[Measured, Measured], float | None]]] = {
    name: _QUANTITIES[name] for name in ("fact", "paraphrases understood", "same relation", "leaked")
}


def lasted(runs: Sequence[Measured]) -> list[dict[str, Any]]:
    """Rows by way and step: the mean of each quantity, with its interval over seeds, or over the facts of one seed."""
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        mine = [run for run in runs if run["way"] == way]
        for place, step in enumerate([one["step"] for one in mine[0]["measured"]] if mine else []):
            seeds: dict[str, list[list[float]]] = {}
            for run in mine:
                now = run["measured"][place]
                for name, take in _LASTING.items():
                    pairs = zip(now["cases"], run["before"]["cases"], strict=True)
                    if values := [value for pair in pairs if (value := take(*pair)) is not None]:
                        seeds.setdefault(name, []).append(values)
                seeds.setdefault("text", []).append([now["text"] - run["before"]["text"]])
            rows += [{"way": way, "step": step, "quantity": name, **_of_seeds(some)} for name, some in seeds.items()]
    return rows


def _of_seeds(values: Sequence[Sequence[float]]) -> dict[str, Any]:
    by_seed = [fmean(some) for some in values]
    found = student(by_seed) if len(by_seed) > 1 else share(values[0])
    low, high = (end if np.isfinite(end) else None for end in (found.low, found.high))
    return {"by_seed": by_seed, "mean": found.mean, "low": low, "high": high}


def _summarise_lasting(about: Measured, runs: Sequence[Measured], results: Path) -> str:
    rows = lasted(runs)
    spent = {way: [run["steps"] for run in runs if run["way"] == way] for way in WAYS}
    content = {
        "interval": "mean, and 95 % over seeds, or over the facts of one seed: Student's t",
        "config": about["config"],
    }
    write(results / "results.json", {**content, "steps_of_teaching": spent, "rows": rows})
    ends = ("mean", "low", "high")
    cells = [
        [row["way"], row["step"], len(row["by_seed"]), row["quantity"], *(_cell(row[end]) for end in ends)]
        for row in rows
    ]
    write_table(results / "results.csv", ["way", "step", "seeds", "quantity", "mean", "low", "high"], cells)
    drawn, panels = canvas(12.0, 4.6, 1, 3)
    for axes, name in zip(panels, ("fact", "paraphrases understood", "same relation"), strict=True):
        for way in WAYS:
            some = [row for row in rows if (row["way"], row["quantity"]) == (way, name)]
            if not some:
                continue
            curve = ([row[key] for row in some] for key in ends)
            plot_band(axes, [row["step"] for row in some], *curve, color=colour(way), label=way)
        axes.set(title=name, xlabel="steps on other text", ylim=(-0.03, 1.03))
        enlarge(axes)
    panels[0].legend(fontsize=SIZE, frameon=False)
    drawn.savefig(results / "figure.png", dpi=110)
    lines = [["way", "step", *_LASTING, "text"]]
    for way, step in dict.fromkeys((row["way"], row["step"]) for row in rows):
        some = {row["quantity"]: row["mean"] for row in rows if (row["way"], row["step"]) == (way, step)}
        shares = [f"{100 * some[name]:.0f} %" if name in some else "-" for name in _LASTING]
        lines.append([way, str(step), *shares, f"{some['text']:+.3f}"])
    return aligned(lines, left=[0])


def _cell(number: float | None) -> str:
    return "" if number is None else f"{number:.5f}"
