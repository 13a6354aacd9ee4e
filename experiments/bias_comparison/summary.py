"""What the runs of a comparison say: a table with intervals, CSV, JSON and the figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from experiments.bias_comparison.compare import BASE, validation_loss
from experiments.runner.figures import canvas, colour, plot_band
from experiments.runner.files import write, write_table
from experiments.runner.jobs import DIVERGED, Job, best_rate
from experiments.runner.statistics import Array, Interval, fraction, interval
from experiments.runner.study import read_study

_MARKS: Final = {"guidance": "o", "key": "s", "lowrank": "^", "lora": "D"}


@dataclass(frozen=True)
class Result:
    """One arm at its chosen learning rate.

    Attributes:
        arm: its name.
        parameters: how many it trains.
        rate: chosen on the validation rows of the first seed.
        validation: mean validation loss of each rate tried.
        seeds: how many have run.
        curve: step -> gain over the frozen base on the test rows, in nats (positive: better).
        per_seed: gain at the end of each seed.
        kept: way of shuffling -> the fraction of the gain that is left; None where the gain is not above 0.
        strength: |B| of each layer at the end, mean over seeds.
    """

    arm: str
    parameters: int
    rate: float
    validation: dict[float, float]
    seeds: int
    curve: dict[int, Interval]
    per_seed: list[float]
    kept: dict[str, Interval | None]
    strength: dict[int, float]

    @property
    def gain(self) -> Interval:
        """At the last step."""
        return self.curve[max(self.curve)]


def read_results(folder: Path) -> tuple[float, list[Result]]:
    """(test loss of the frozen base, the arms that have finished their learning rates).

    Raises:
        FileNotFoundError: no study in the folder, or its base has not been measured.
    """
    about, finished = read_study(folder)
    runs = {Job(**run["job"]): run for run in finished}
    if BASE not in runs:
        raise FileNotFoundError(f"the frozen base has not been measured in {folder}")
    test = np.array(runs[BASE]["test"])
    rates, seeds = about["config"]["rates"], about["config"]["seeds"]
    results: list[Result] = []
    for name in about["arms"]:
        if all(Job(name, rate, seeds[0]) in runs for rate in rates):
            best = best_rate(name, rates, seeds[0], runs.__getitem__, validation_loss)
            first = {rate: runs[Job(name, rate, seeds[0])] for rate in rates}
            tried = {rate: math.inf if DIVERGED in run else validation_loss(run) for rate, run in first.items()}
            every = [runs[Job(name, best, seed)] for seed in seeds if Job(name, best, seed) in runs]
            chosen = [run for run in every if DIVERGED not in run]
            count = len(chosen[0]["validation"])
            results.append(_result({rate: loss / count for rate, loss in tried.items()}, best, chosen, test))
    return float(test.mean()), results


def _result(tried: dict[float, float], rate: float, runs: Sequence[Mapping[str, Any]], test: Array) -> Result:
    def gains(part: str, name: str) -> Array:
        return test[None] - np.array([run[part][name] for run in runs])

    steps = sorted(int(step) for step in runs[0]["curve"])
    curve = {step: interval(gains("curve", str(step))) for step in steps}
    whole = gains("curve", str(steps[-1]))
    kept = {how: fraction(gains("shuffles", how), whole) for how in runs[0]["shuffles"]}
    last = [run["log"][-1] for run in runs]
    layers = [key for key in last[0] if key.startswith("bias/layer_")]
    strength = {int(key.rpartition("_")[2]): float(np.mean([entry[key] for entry in last])) for key in layers}
    arm = runs[0]["arm"]
    return Result(
        arm["name"], arm["parameters"], rate, tried, len(runs), curve, whole.mean(axis=1).tolist(), kept, strength
    )


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and curve.png, and return the table.

    Raises:
        FileNotFoundError: no comparison in the folder.
    """
    base, arms = read_results(folder)
    write(results / "results.json", _json(base, arms))
    rows = [
        [one.arm, one.parameters, one.rate, one.seeds, step, *(f"{value:.6f}" for value in g.numbers)]
        for one in arms
        for step, g in one.curve.items()
    ]
    head = ["arm", "parameters", "learning_rate", "seeds", "step", "gain", "low", "high"]
    write_table(results / "results.csv", head, rows)
    if arms:
        figure(base, arms).savefig(results / "curve.png", dpi=150)
    return table(base, arms)


def table(base: float, results: Sequence[Result]) -> str:
    """The results in text."""
    lines = [f"frozen base: test loss {base:.4f} nats; gains over it, 95 % intervals"]
    for one in results:
        kept = ", ".join(f"{how} shuffled keep {_percent(value)}" for how, value in one.kept.items())
        lines.append(
            f"{one.arm:9} {one.parameters:,} parameters, rate {one.rate:g}, {one.seeds} seeds: {one.gain}; {kept}"
        )
    return "\n".join(line.rstrip("; ") for line in lines)


def figure(base: float, results: Sequence[Result]) -> Any:
    """Held-out loss against steps, each arm with its interval, beside the frozen base; at the right without LoRA.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    drawn, (every, biases) = canvas(9.6, 3.8, 1, 2)
    _curves(every, base, results)
    _curves(biases, base, [one for one in results if one.arm != "lora"])
    every.set_ylabel("held-out loss (nats per token)")
    every.set_title("all arms", fontsize=10)
    biases.set_title("biases alone (another scale)", fontsize=10)
    names = {"frameon": False, "fontsize": 8, "ncols": 7}  # below both panels, where they cover no line
    drawn.legend(*every.get_legend_handles_labels(), loc="outside lower center", **names)
    return drawn


def _curves(axes: Any, base: float, results: Sequence[Result]) -> None:
    axes.axhline(base, color="0.35", linestyle="--", linewidth=1.2, label="frozen base")
    for one in results:
        middle, low, high = (
            [base, *(base - getattr(gain, name) for gain in one.curve.values())] for name in ("mean", "high", "low")
        )
        style = {"color": colour(one.arm), "marker": _MARKS.get(one.arm, "o"), "label": one.arm}
        plot_band(axes, [0, *one.curve], middle, low, high, **style)
    axes.set_xlabel("training step")


def _percent(value: Interval | None) -> str:
    if value is None:
        return "undefined (no gain)"
    return f"{value.mean:.0%} [{value.low:.0%}, {value.high:.0%}]"


def _json(base: float, results: Sequence[Result]) -> dict[str, object]:
    def plain(value: Interval | None) -> list[float] | None:
        return None if value is None else value.numbers

    return {
        "base_test_loss": base,
        "interval": "mean, 2.5 % and 97.5 % of a bootstrap over seeds and rows",
        "arms": [
            {
                "arm": one.arm,
                "parameters": one.parameters,
                "learning_rate": one.rate,
                "validation_loss_by_rate": {f"{rate:g}": loss for rate, loss in one.validation.items()},
                "seeds": one.seeds,
                "gain_by_step": {str(step): plain(gain) for step, gain in one.curve.items()},
                "gain_by_seed": one.per_seed,
                "kept_by_shuffle": {how: plain(value) for how, value in one.kept.items()},
                "strength_by_layer": {str(layer): value for layer, value in one.strength.items()},
            }
            for one in results
        ],
    }
