"""What the runs of the comparison say: differences paired by seed, a table, CSV, JSON and the figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from attnflow._core.markup import aligned
from experiments.bias_comparison import figures
from experiments.bias_comparison.maps import OPERANDS, WORDS
from experiments.runner.files import write, write_table
from experiments.runner.jobs import DIVERGED, Job, Record, best_rate
from experiments.runner.statistics import Interval, detectable, speed_up, student
from experiments.runner.study import read_study

SMALLEST: Final = 0.02  # nats: the smallest effect of interest
SOLVED: Final = 0.95  # accuracy
_CONTROLS: Final = ("key", "lowrank", "lora", "gate", "dense", "cumulative")
_MIDDLE: Final = ("0.25", "0.5", "0.75")


@dataclass(frozen=True)
class Result:
    """One arm of a part, at its own learning rate.

    Attributes:
        part: its name.
        arm: its name.
        rate: chosen on the first seed.
        tried: loss for choosing, by rate; infinite if it diverged.
        runs: by seed.
    """

    part: str
    arm: str
    rate: float
    tried: Mapping[float, float]
    runs: Mapping[int, Record]

    @property
    def parameters(self) -> int:
        """Added to the model."""
        return self._any["parameters"]

    @property
    def steps(self) -> list[int]:
        """At which it was measured."""
        return [entry["step"] for entry in self._any["measured"]]

    @property
    def probe(self) -> bool:
        """Whether it has an accuracy."""
        return "accuracy" in self._any["measured"][-1]

    @property
    def _any(self) -> Record:
        return next(iter(self.runs.values()))

    def end(self, quantity: str = "loss") -> dict[int, float]:
        """At the last step, by seed."""
        return {seed: run["measured"][-1][quantity] for seed, run in self.runs.items()}

    def curve(self, quantity: str = "loss") -> dict[int, list[float]]:
        """By seed."""
        return {seed: [entry[quantity] for entry in run["measured"]] for seed, run in self.runs.items()}

    def extra(self, take: Callable[[Any], float]) -> dict[int, float]:
        """Something of the extras, by seed."""
        return {seed: take(run["extras"]) for seed, run in self.runs.items()}


Results = Mapping[tuple[str, str], Result]


def read_results(folder: Path) -> tuple[Mapping[str, Any], dict[tuple[str, str], Result]]:
    """(config, every arm whose learning rates have all been tried) of a study.

    Raises:
        FileNotFoundError: no study in the folder, or none of its jobs is finished.
    """
    about, finished = read_study(folder)
    runs = {Job(**run["job"]): run for run in finished}
    config, results = about["config"], dict[tuple[str, str], Result]()
    seeds = config["seeds"]
    for part in config["parts"]:
        for arm in part["arms"]:
            name = f"{part['name']} {arm}"
            first = {rate: runs.get(Job(name, rate, seeds[0])) for rate in part["rates"]}
            tried = {rate: float("inf") if DIVERGED in run else run["choosing"] for rate, run in first.items() if run}
            if len(tried) < len(first) or min(tried.values()) == float("inf"):
                continue
            best = best_rate(name, part["rates"], seeds[:1], runs.__getitem__, lambda run: run["choosing"])
            chosen = {seed: runs.get(Job(name, best, seed)) for seed in seeds}
            whole = {seed: run for seed, run in chosen.items() if run and DIVERGED not in run}
            results[part["name"], arm] = Result(part["name"], arm, best, tried, whole)
    return config, results


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """Differences on the seeds that both have."""
    return [one[seed] - other[seed] for seed in one if seed in other]


def contrasts(results: Results) -> dict[str, list[float]]:
    """What the claims are judged by: name -> a difference by seed; see the README."""
    made: dict[str, list[float]] = {}

    def add(name: str, part: str, one: str, other: str, take: Callable[[Result], Mapping[int, float]]) -> None:
        if (part, one) in results and (part, other) in results:
            made[name] = paired(take(results[part, one]), take(results[part, other]))

    for part in dict.fromkeys(part for part, _ in results):
        for arm in dict.fromkeys(arm for where, arm in results if where == part and arm != "guidance"):
            add(f"{part}: loss, guidance less {arm}", part, "guidance", arm, lambda one: one.end())
            if results[part, arm].probe:
                add(f"{part}: accuracy, guidance less {arm}", part, "guidance", arm, lambda one: one.end("accuracy"))
    for arm in ("width 16", "width 128", "every layer", "every fourth", "by head", "bilinear", "dot", "He init"):
        add(f"knobs: loss, width 64 less {arm}", "knobs", "width 64", arm, lambda one: one.end())

    def start(one: Result) -> Mapping[int, float]:
        return {seed: curve[0] for seed, curve in one.curve().items()}

    add("knobs: loss before the first step, He less zero", "knobs", "He init", "width 64", start)
    if ("tuned", "guidance") in results:
        one = results["tuned", "guidance"]
        made["tuned: loss, guidance less start"] = paired(one.end(), start(one))
    if {("recall", "guidance"), ("recall", "plain")} <= results.keys():
        own, base = (results["recall", arm].extra(_hurt) for arm in ("guidance", "plain"))
        made["distractors: loss of accuracy, guidance"] = list(own.values())
        made["distractors: loss of accuracy, plain"] = list(base.values())
        made["distractors: loss of accuracy, guidance less a third of plain"] = [
            own[seed] - base[seed] / 3 for seed in own if seed in base
        ]
    add("depth: accuracy in the middle at 8 lengths, guidance less plain", "recall", "guidance", "plain", _middle)
    if ("sums", "guidance") in results:
        own = results["sums", "guidance"].extra(lambda extras: float(np.mean(extras["sums"]["contrast"])))
        made["sums: bias of operands less the rest"] = list(own.values())
    if {("changes", "new text"), ("changes", "same text")} <= results.keys():

        def take(extras: Any) -> float:
            return float(np.mean(extras["kept"]["correlation"]))

        new, same = (results["changes", arm].extra(take) for arm in ("new text", "same text"))
        made["changes: correlation of B with its start, new text"] = list(new.values())
        made["changes: correlation of B with its start, new less same text"] = paired(new, same)
    return {name: values for name, values in made.items() if values}


def _hurt(extras: Any) -> float:
    by_count = extras["distractors"]
    return by_count["0"] - float(np.mean([value for count, value in by_count.items() if count != "0"]))


def _middle(one: Result) -> Mapping[int, float]:
    return one.extra(lambda extras: float(np.mean([extras["depth"][f"8x {depth}"] for depth in _MIDDLE])))


def first_line(results: Results) -> str:
    """Whether guidance is better than what else the same parameters buy."""
    said: list[str] = []
    for part in ("text", "tuned", "encoder"):
        better, worse, level = list[str](), list[str](), list[str]()
        for arm in _CONTROLS:
            if {(part, arm), (part, "guidance")} <= results.keys():
                one = student(paired(results[part, "guidance"].end(), results[part, arm].end()))
                (better if one.high < 0 else worse if one.low > 0 else level).append(arm)
        verdicts = {"better than": better, "no better than": level, "worse than": worse}
        if any(verdicts.values()):
            said.append(f"{part}: " + ", ".join(f"{how} {', '.join(arms)}" for how, arms in verdicts.items() if arms))
    return "Guidance is, on " + "; ".join(said) if said else "Guidance has not been compared on text yet"


def speed(results: Results) -> dict[str, Any] | None:
    """Share of the steps that guidance saves over plain training on text, with the null of plain against itself."""
    if not {("text", "guidance"), ("text", "plain")} <= results.keys():
        return None
    one, other = results["text", "guidance"], results["text", "plain"]
    mine, theirs = one.curve(), other.curve()
    window = min(3, len(one.steps))
    pairs = [speed_up(one.steps, mine[seed], theirs[seed], window) for seed in mine if seed in theirs]
    null = [speed_up(one.steps, theirs[a], theirs[b], window) for a in theirs for b in theirs if a != b] or [0.0]
    low, high = np.percentile(null, [2.5, 97.5])
    return {"speed_up": student(pairs).numbers, "null": [float(np.mean(null)), float(low), float(high)]}


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and the figures, and return the table.

    Raises:
        FileNotFoundError: no study in the folder, or none of its jobs is finished.
        MissingExtra: matplotlib is not installed.
    """
    config, every = read_results(folder)
    if not every:
        raise FileNotFoundError(f"no arm in {folder} has run with all its learning rates")
    compared = contrasts(every)
    arms = [_entry(one) for one in every.values()]
    content: dict[str, Any] = {
        "first_line": first_line(every),
        "interval": "mean, and 95 % of Student's t over seeds; differences are paired by seed",
        "smallest_effect_of_interest": SMALLEST,
        "arms": arms,
        "contrasts": {name: {"by_seed": values, "t": student(values).numbers} for name, values in compared.items()},
        "seen_with_80_%": {name: detectable(values) for name, values in compared.items() if len(set(values)) > 1},
        "speed": speed(every),
        "extras": {f"{part} {arm}": _extras(one) for (part, arm), one in every.items() if _extras(one)},
        "words": list(WORDS),
        "operands": list(OPERANDS),
    }
    write(results / "results.json", content)
    rows = [
        [one.part, one.arm, f"{one.rate:g}", seed, entry["step"], *(f"{entry.get(q, float('nan')):.6f}" for q in _BOTH)]
        for one in every.values()
        for seed, run in one.runs.items()
        for entry in run["measured"]
    ]
    write_table(results / "results.csv", ["part", "arm", "rate", "seed", "step", *_BOTH], rows)
    for name, drawn in figures.draw(every, config["parts"]).items():
        drawn.savefig(results / f"{name}.png", dpi=110)
    return table(content)


_BOTH: Final = ("loss", "accuracy")


def _entry(one: Result) -> dict[str, Any]:
    accuracy = list(one.end("accuracy").values()) if one.probe else []
    return {
        "part": one.part,
        "arm": one.arm,
        "parameters": one.parameters,
        "rate": one.rate,
        "choosing_loss_by_rate": {f"{rate:g}": loss for rate, loss in one.tried.items()},
        "seeds": list(one.runs),
        "loss": student(list(one.end().values())).numbers,
        "accuracy": student(accuracy).numbers if accuracy else None,
        "solved": float(np.mean([value >= SOLVED for value in accuracy])) if accuracy else None,
        "seconds": float(np.mean([run["seconds"] for run in one.runs.values()])),
    }


def _extras(one: Result) -> dict[str, Any]:
    """Means over seeds of all numbers in the extras."""
    return _mean([run["extras"] for run in one.runs.values()])


def _mean(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return {key: _mean([value[key] for value in values]) for key in values[0]}
    return np.mean(np.array(values, dtype=np.float64), axis=0).tolist()


def table(content: Mapping[str, Any]) -> str:
    """The results in text; the first line says whether guidance is worth it.

    "seen": the smallest difference that would be told apart from 0 in four of five such studies.
    """
    head = ["part", "arm", "added", "rate", "seeds", "held-out loss", "guidance less this", "seen", "right", "solved"]
    lines = [head]
    for one in content["arms"]:
        name = f"{one['part']}: loss, guidance less {one['arm']}"
        less = content["contrasts"].get(name)
        seen = content["seen_with_80_%"].get(name)
        lines.append(
            [
                one["part"],
                one["arm"],
                f"{one['parameters']:,}",
                f"{one['rate']:g}",
                str(len(one["seeds"])),
                f"{one['loss'][0]:.4f}",
                "" if less is None else f"{Interval(*less['t']):.4f}",
                "" if seen is None else f"{seen:.4f}",
                *(("", "") if one["solved"] is None else (f"{one['accuracy'][0]:.3f}", f"{one['solved']:.0%}")),
            ]
        )
    more = [
        f"{name}: {Interval(*value['t']):.3f}"
        for name, value in content["contrasts"].items()
        if not any(f": {quantity}, guidance less" in name for quantity in _BOTH)
        or name == "tuned: loss, guidance less start"
    ]
    return "\n".join([content["first_line"], "", aligned(lines, left=range(2)), "", *more])
