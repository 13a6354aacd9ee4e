"""What the runs of the comparison say: differences paired by seed, a table, CSV, JSON and the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from attnflow._core.markup import aligned
from experiments.bias_comparison import figures
from experiments.bias_comparison.contrasts import contrasts
from experiments.bias_comparison.maps import OPERANDS, WORDS
from experiments.bias_comparison.results import SOLVED, Result, Results, paired, read_results
from experiments.runner.files import write, write_table
from experiments.runner.statistics import Interval, detectable, student
from experiments.runner.verdict import LOSS

_CONTROLS: Final = ("key", "lowrank", "lora", "gate", "dense", "cumulative")


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


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and the figures, and return the table."""
    config, every = read_results(folder)
    if not every:
        raise FileNotFoundError(f"no arm in {folder} has run with all its learning rates")
    compared = contrasts(every)
    arms = [_entry(one) for one in every.values()]
    content: dict[str, Any] = {
        "first_line": first_line(every),
        "interval": "mean, and 95 % of Student's t over seeds; differences are paired by seed",
        "smallest_effect_of_interest": LOSS,
        "arms": arms,
        "contrasts": {name: {"by_seed": values, "t": student(values).numbers} for name, values in compared.items()},
        "seen_with_80_%": {name: detectable(values) for name, values in compared.items() if len(set(values)) > 1},
        "extras": {f"{part} {arm}": _extras(one) for (part, arm), one in every.items() if _extras(one)},
        "words": list(WORDS),
        "operands": list(OPERANDS),
    }
    write(results / "results.json", content)
    rows = [
        [one.part, one.arm, f"{rate:g}", seed, entry["step"], *(f"{entry.get(q, float('nan')):.6f}" for q in _BOTH)]
        for one in every.values()
        for rate, runs in {**one.by_rate, one.rate: one.runs}.items()
        for seed, run in runs.items()
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
        "rate_at_end_of_range": one.at_end,
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

    "seen": the smallest difference that four of five such studies would distinguish from 0.
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
