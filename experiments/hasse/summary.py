"""What the runs say: losses at equal tokens and equal compute, sparse against dense, depth, and what was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnflow._core.markup import aligned
from experiments.hasse.arms import Arm
from experiments.hasse.figure import Curve, figure
from experiments.runner.files import write, write_table
from experiments.runner.jobs import DIVERGED, Chosen, Job, Record, choosing_loss, chosen
from experiments.runner.statistics import Array, said, student
from experiments.runner.study import read_study


def read_curves(folder: Path) -> tuple[Mapping[str, Any], dict[str, Curve]]:
    """(settings, every arm whose learning rates have all been tried)."""
    about, finished = read_study(folder)
    runs = {Job(**run["job"]): run for run in finished}
    config, curves = about["config"], dict[str, Curve]()
    for arm in about["costs"]:
        best = _chosen(arm, config, runs)
        if best is None or not best.runs:
            continue
        steps = [entry["step"] for entry in next(iter(best.runs.values()))["measured"]]
        held = [[entry["held_out"] for entry in run["measured"]] for run in best.runs.values()]
        curves[arm] = curve(arm, best.rate, best.runs, steps, np.array(held), about)
    return about, curves


def curve(
    arm: str, rate: float, runs: Mapping[int, Record], steps: Sequence[int], held_out: Array, about: Mapping[str, Any]
) -> Curve:
    """Of an arm, with the tokens and the compute that its steps have taken."""
    config, cost = about["config"], about["costs"][arm]
    rows = config["batch_size"] * config["parts"]
    before = config["steps"] // 2 if "flops_before" in cost else 0
    first, later = np.minimum(steps, before), np.maximum(np.array(steps) - before, 0)
    flops = rows * (first * float(cost.get("flops_before", 0)) + later * float(cost["flops"]))
    tokens = np.array(steps, dtype=np.float64) * rows * config["length"]
    return Curve(arm, rate, runs, tuple(steps), tokens, flops, held_out)


def rates_of(arm: str, config: Mapping[str, Any]) -> list[float]:
    """Learning rates that a study gives an arm in a second run; empty where a seed chooses among those of all arms."""
    return next((group[arm] for group in config.get("rerun", []) if arm in group), [])


def _chosen(arm: str, config: Mapping[str, Any], runs: Mapping[Job, Record]) -> Chosen | None:
    rates, seeds = rates_of(arm, config), config["seeds"]
    if not rates:
        return chosen(arm, config["rates"], seeds, runs, choosing_loss, choosing=1)
    whole = [seed for seed in seeds if all(Job(arm, rate, seed) in runs for rate in rates)]
    return chosen(arm, rates, whole, runs, choosing_loss, choosing=len(whole)) if whole else None


def at_equal_rates(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Loss of each sparse realisation less that of its dense mask, at each of the rates that both were run again with.

    What `sparse` compares are best rates, which may differ: then a difference may be one of learning rates.
    """
    about, finished = read_study(folder)
    runs = {Job(**run["job"]): run for run in finished if DIVERGED not in run}
    found: dict[str, dict[str, list[float]]] = {}
    for arm in about["costs"]:
        dense = arm.removeprefix("sparse ")
        both = sorted({*rates_of(arm, about["config"])} & {*rates_of(dense, about["config"])})
        if dense == arm or len(both) < 2:
            continue
        for rate in both:
            pairs = [
                (runs.get(Job(arm, rate, seed)), runs.get(Job(dense, rate, seed))) for seed in about["config"]["seeds"]
            ]
            each = [last(one) - last(other) for one, other in pairs if one is not None and other is not None]
            if each:
                found.setdefault(dense, {})[f"{rate:g}"] = numbers(each)
    return found


def last(run: Record) -> float:
    return run["measured"][-1]["held_out"]


def numbers(values: Sequence[float] | Array) -> list[float]:
    return student([float(value) for value in values]).numbers


def losses(about: Mapping[str, Any], curves: Mapping[str, Curve]) -> list[dict[str, Any]]:
    """Of each arm: its loss at equal tokens, and, of arms of the main models, at the compute of the causal one."""
    budget = float(curves["causal"].flops[-1]) if "causal" in curves else None
    main, found = about["config"]["layers"][-1], list[dict[str, Any]]()
    for arm, one in curves.items():
        row: dict[str, Any] = {"arm": arm, "rate": one.rate, "seeds": list(one.runs), **about["costs"][arm]}
        row["held_out"] = numbers(one.held_out[:, -1])
        same = "repeats" not in arm and not arm.endswith("layers")
        if same and budget is not None:
            causal = curves["causal"]
            row["at_equal_compute"] = numbers(one.at(budget))
            row["less_causal"] = numbers(one.pair(causal, one.held_out[:, -1], causal.held_out[:, -1]))
            row["less_causal_at_equal_compute"] = numbers(one.pair(causal, one.at(budget), causal.at(budget)))
        row["layers"] = main if same or "repeats" in arm else int(arm.split()[-2])
        row["seconds"] = float(np.mean([run["seconds"] for run in one.runs.values()]))
        found.append(row)
    return found


def sparse(curves: Mapping[str, Curve]) -> dict[str, list[float]]:
    """Loss of each sparse realisation, deep enough for its model, less that of its dense mask; paired by seed."""
    found: dict[str, list[float]] = {}
    for arm, one in curves.items():
        dense = curves.get(arm.removeprefix("sparse "))
        if arm.startswith("sparse ") and dense is not None:
            found[arm.removeprefix("sparse ")] = numbers(one.pair(dense, one.held_out[:, -1], dense.held_out[:, -1]))
    return found


def depths(about: Mapping[str, Any], curves: Mapping[str, Curve]) -> list[dict[str, Any]]:
    """Loss of sparse causal masks less that of the dense one, by layers of the model and depth of the mask."""
    config, found = about["config"], list[dict[str, Any]]()
    for layers in config["layers"]:
        main = layers == config["layers"][-1]
        dense = curves.get("causal" if main else f"causal of {layers} layers")
        for depth in sorted({*config["depths"], *([layers] if main else [])}):
            arm = "sparse causal" if main and depth == layers else f"depth {depth} of {layers} layers"
            one = curves.get(arm)
            if dense is not None and one is not None:
                excess = one.pair(dense, one.held_out[:, -1], dense.held_out[:, -1])
                found.append({
                    "layers": layers,
                    "depth": about["costs"][arm]["depth"],
                    "reached": about["costs"][arm]["depth"] <= layers,
                    "excess": numbers(excess),
                })  # fmt: skip
    return found


def repeats(about: Mapping[str, Any], curves: Mapping[str, Curve]) -> list[dict[str, Any]]:
    """Loss of the second half of rows that repeat, by depth of the mask, and whether what it repeats is in reach."""
    config, found = about["config"], list[dict[str, Any]]()
    row, layers = list(range(config["length"])), config["layers"][-1]
    for depth in (None, *config["repeats"]):
        one = curves.get("repeats" if depth is None else f"repeats depth {depth}")
        if one is not None:
            flow = Arm("causal", layers, depth=depth).task(0)(row).flow
            last = flow.size - 1  # reads the token before the last one, which is half a row after what it repeats
            held = numbers(one.held_out[:, -1])
            reached = flow.reaches(last + 1 - config["length"] // 2, last, layers)
            found.append({"layers": layers, "depth": flow.depth, "reached": reached, "held_out": held})
    return found


def gains_by_depth(about: Mapping[str, Any], curves: Mapping[str, Curve]) -> dict[str, list[float]]:
    """By how much the loss falls as a mask of twice the layers in depth becomes one of as many; and beyond that."""
    config, found = about["config"], dict[str, list[float]]()
    for layers in config["layers"]:
        main = layers == config["layers"][-1]

        def of(depth: int, layers: int = layers, main: bool = main) -> Curve | None:
            return curves.get("sparse causal" if main and depth == layers else f"depth {depth} of {layers} layers")

        dense = curves.get("causal" if main else f"causal of {layers} layers")
        pairs = {
            f"{layers} layers, depth {2 * layers} less {layers}": (of(2 * layers), of(layers)),
            f"{layers} layers, depth {layers} less dense": (of(layers), dense),
        }
        for name, (one, other) in pairs.items():
            if one is not None and other is not None:
                found[name] = numbers(one.pair(other, one.held_out[:, -1], other.held_out[:, -1]))
    return found


def written(curves: Mapping[str, Curve]) -> list[dict[str, Any]]:
    """What the arms with a decoder write, means over seeds; and whether it is what the merged task says."""
    found: list[dict[str, Any]] = []
    for arm, one in curves.items():
        runs = list(one.runs.values())
        if all("written" in run for run in runs):
            row: dict[str, Any] = {"arm": arm, "tokens_per_pass": runs[0]["written"]["tokens_per_pass"]}
            row["by_seed"] = {key: [run["written"][key] for run in runs] for key in ("real_words", "seconds")}
            row |= {key: numbers(values) for key, values in row["by_seed"].items()}
            row["sample"] = runs[0]["written"]["sample"]
            if "agreement" in runs[0]:
                each = [run["agreement"] for run in runs]
                row["compared"] = sum(one["compared"] for one in each)
                row["differ"] = sum(one["differ"] for one in each)
                row["margin"] = max(one["margin"] for one in each)
            found.append(row)
    return found


def contents(
    about: Mapping[str, Any],
    curves: Mapping[str, Curve],
    equal_rates: Mapping[str, Any],
    texts: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    return {
        "interval": "mean, and 95 % of Student's t over seeds; differences are paired by seed",
        "arms": losses(about, curves),
        "sparse_less_dense": sparse(curves),
        "sparse_less_dense_at_equal_rates": equal_rates,
        "depths": depths(about, curves),
        "repeats": repeats(about, curves),
        "gains_by_depth": gains_by_depth(about, curves),
        "written": texts,
        "tables": about["tables"],
        "real_words": about["real_words"],
        "blocks": about["config"]["blocks"],
    }


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and figure.png, and return the table."""
    about, curves = read_curves(folder)
    if not curves:
        raise FileNotFoundError(f"no arm in {folder} has run with all its learning rates")
    content = contents(about, curves, at_equal_rates(folder), written(curves))
    write(results / "results.json", content)
    rows = [
        [arm, f"{one.rate:g}", seed, step, f"{tokens:.0f}", f"{flops:.4g}", f"{loss:.6f}"]
        for arm, one in curves.items()
        for seed, held in zip(one.runs, one.held_out, strict=True)
        for step, tokens, flops, loss in zip(one.steps, one.tokens, one.flops, held, strict=True)
    ]
    write_table(results / "results.csv", ["arm", "rate", "seed", "step", "tokens", "flops", "held_out_loss"], rows)
    figure(content, curves).savefig(results / "figure.png", dpi=110)
    return table(content)


def table(content: Mapping[str, Any]) -> str:
    lines = [["arm", "rate", "seeds", "depth", "pairs", "held-out loss", "at equal compute", "less causal, there"]]
    for one in content["arms"]:
        cells = [one["arm"], f"{one['rate']:g}", str(len(one["seeds"])), str(one["depth"]), str(one["pairs"])]
        cells.append(said(one["held_out"]))
        cells += [said(one[key]) if key in one else "" for key in ("at_equal_compute", "less_causal_at_equal_compute")]
        lines.append(cells)
    more = [f"sparse less dense, {name}: {said(value)}" for name, value in content["sparse_less_dense"].items()]
    more += [f"{name}: {said(value)}" for name, value in content["gains_by_depth"].items()]
    more += [
        f"written by {one['arm']}: {one['tokens_per_pass']:.2f} tokens a pass, real words {said(one['real_words'])}"
        + (f", {one['differ']} of {one['compared']} not those of the merged task" if "compared" in one else "")
        for one in content["written"]
    ]
    return "\n".join([aligned(lines, left=range(len(lines[0]))), *more])
