"""What gold solutions cost the arms, and what these prefer: means, paired differences, files, figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Final

import numpy as np

from attnflow._core.markup import aligned
from experiments.daa_evaluation.likelihood import ALIBI, BASE, GSM8K, HUMANEVAL, SHOTS, split_name
from experiments.daa_evaluation.perturbed import ANSWER, RESULT
from experiments.runner.figures import SIZE, canvas, colour
from experiments.runner.files import write, write_table
from experiments.runner.jobs import Record, rates_of
from experiments.runner.statistics import Array, said, student
from experiments.runner.study import read_study

GUIDANCE: Final = "guidance"
CONTROLS: Final = ("key", "dense", "lora")
NATS, MARGIN, STEPS = "nats per token", "margin", "nats per token before the answer"

Values = Mapping[str, Array]  # measure -> [seeds, items]; an item without the measure is NaN


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and figure.png, and return the table."""
    about, runs = read_study(folder)
    config = about["config"]
    found = values_of(runs, config)
    rows = [row for (arm, name) in found for row in _rows(found, arm, name)]
    content = {
        "interval": "95 %, Student's t: 'items', and of a value, over items in the mean of seeds; 'seeds' over seeds",
        "measures": "nats of each solution per token of it; margin: log p(gold) - log p(wrong), mean of an item's",
        "seeds": len(config["seeds"]),
        "trained tokens": 2 * config["steps"] * config["length"],
        "rows": rows,
        "guidance less": {
            name: {
                arm: {
                    measure: difference(found[GUIDANCE, name], found[arm, name], measure) for measure in (NATS, MARGIN)
                }
                for arm in CONTROLS
                if (arm, name) in found
            }
            for name in (GSM8K, HUMANEVAL)
            if (GUIDANCE, name) in found
        },
        "prompting": _prompting(found),
        "rates": rates_of(config, runs),
        "base, choosing": next((run["choosing"] for run in runs if "choosing" in run), None),
        "items": about["items"],
        "parameters": about["parameters"],
        "passages in common": about["passages in common with the items"],
        "seconds": sum(run["seconds_here"] for run in runs),
    }
    write(results / "results.json", content)
    head = ["benchmark", "arm", "measure", "seeds", "items", "value", "low", "high", "less_base"]
    head += ["items_low", "items_high", "seeds_low", "seeds_high"]
    write_table(results / "results.csv", head, (_cells(row) for row in rows))
    if any(row["less base"] for row in rows):
        figure(rows).savefig(results / "figure.png", dpi=150)
    return table(rows)


def values_of(runs: Sequence[Record], config: Mapping[str, Any]) -> dict[tuple[str, str], Values]:
    """(arm, benchmark) -> values by seed and item, of the parts and seeds that `complete` says."""
    scored = {(*split_name(run["job"]["arm"]), run["job"]["seed"]): run["scores"] for run in runs if "scores" in run}
    parts, seeds = complete(set(scored), config)
    found: dict[tuple[str, str], Values] = {}
    for arm in dict.fromkeys([BASE, ALIBI, *config["arms"]]):
        own = [None] if arm in (BASE, ALIBI) else seeds
        held = [[scored.get((part, arm, seed)) for part in parts] for seed in own]
        if not held or None in [one for each in held for one in each]:
            continue
        for name in held[0][0] or ():
            values = [measured([row for part in each for row in (part or {})[name]]) for each in held]
            found[arm, name] = {measure: np.stack([one[measure] for one in values]) for measure in values[0]}
    return found


def complete(scored: Set[tuple[int, str, Any]], config: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """(parts, seeds) that all arms have: the parts with all seeds, or the first part with those that it has."""

    def seeds(part: int) -> list[int]:
        return [seed for seed in config["seeds"] if all((part, arm, seed) in scored for arm in config["arms"])]

    parts = [
        part
        for part in range(config["parts"])
        if seeds(part) == list(config["seeds"]) and {(part, BASE, None), (part, ALIBI, None)} <= scored
    ]
    return (parts, list(config["seeds"])) if parts else ([0], seeds(0))


def measured(rows: Sequence[Mapping[str, Any]]) -> Values:
    """Each measure of each item, as `likelihood.scores` wrote it; "preferred" is the share of positive margins."""

    def mean(row: Mapping[str, Any], kind: str | None) -> float:
        margins = [value for one, value in row["margins"] if kind in (None, one)]
        return float(np.mean(margins)) if margins else float("nan")

    return {
        NATS: np.array([row["nats"] / row["tokens"] for row in rows]),
        MARGIN: np.array([mean(row, None) for row in rows]),
        STEPS: np.array([row["split"][1] / row["split"][0] for row in rows]),
        **{f"margin, {kind}": np.array([mean(row, kind) for row in rows]) for kind in (RESULT, ANSWER)},
        "preferred": np.array(
            [np.mean([value > 0 for _, value in row["margins"]]) if row["margins"] else np.nan for row in rows]
        ),
    }


def difference(one: Values, other: Values, measure: str) -> dict[str, list[float]]:
    """Mean of `one` less `other` on the same items, with its interval over items and the one over seeds.

    Seeds are paired, if both arms have several; the base has one, which stands beside each seed of the other.
    """
    mine, theirs = one[measure], other[measure]
    seeds = min(len(mine), len(theirs)) if min(len(mine), len(theirs)) > 1 else max(len(mine), len(theirs))
    every = mine[:seeds] - theirs[:seeds]
    every = every[:, ~np.isnan(every).any(axis=0)]
    return {
        "items": student(every.mean(axis=0).tolist()).numbers,
        "seeds": student(every.mean(axis=1).tolist()).numbers,
    }


def _rows(found: Mapping[tuple[str, str], Values], arm: str, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for measure, values in found[arm, name].items():
        kept = values[:, ~np.isnan(values).any(axis=0)]
        if not kept.size or (measure == STEPS and name == HUMANEVAL):
            continue
        base = found.get((BASE, name))
        compared = None if arm in (BASE, ALIBI) or base is None else difference(found[arm, name], base, measure)
        rows.append(
            {
                "benchmark": name,
                "arm": arm,
                "measure": measure,
                "seeds": len(kept),
                "items": kept.shape[1],
                "value": student(kept.mean(axis=0).tolist()).numbers,
                "less base": compared,
            }
        )
    return rows


def _prompting(found: Mapping[tuple[str, str], Values]) -> dict[str, Any]:
    """Guidance without examples less the base with examples, and less ALiBi untrained, on GSM8k."""
    own = found.get((GUIDANCE, GSM8K))
    others = {shots: found.get((BASE, f"{GSM8K} {shots}")) for shots in SHOTS} | {ALIBI: found.get((ALIBI, GSM8K))}
    return {
        name: {measure: difference(own, other, measure) for measure in (NATS, STEPS)}
        for name, other in others.items()
        if own is not None and other is not None
    }


def _cells(row: Mapping[str, Any]) -> list[object]:
    less = row["less base"]
    compared = [*less["items"], *less["seeds"][1:]] if less else [""] * 5
    plain = [f"{value:.6f}" if isinstance(value, float) else value for value in (*row["value"], *compared)]
    return [*(row[key] for key in ("benchmark", "arm", "measure", "seeds", "items")), *plain]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [["benchmark", "measure", "arm", "value", "less base, over items", "over seeds"]]
    for row in sorted(rows, key=lambda row: (row["benchmark"], row["measure"])):
        less = row["less base"]
        shown = [said(less[over], "+.4f") for over in ("items", "seeds")] if less else ["", ""]
        cells.append([row["benchmark"], row["measure"], row["arm"], f"{row['value'][0]:.4f}", *shown])
    return aligned(cells, left=range(6))


def figure(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Each arm less the base, on both benchmarks: nats per token and margin, over items and over seeds."""
    drawn, panels = canvas(13.0, 8.0, 2, 2)
    places = [(name, measure) for name in (GSM8K, HUMANEVAL) for measure in (NATS, MARGIN)]
    for axes, (name, measure) in zip(panels.flatten(), places, strict=True):
        some = [row for row in rows if (row["benchmark"], row["measure"]) == (name, measure) and row["less base"]]
        for place, row in enumerate(reversed(some)):
            for shift, over, width in ((0.0, "items", 3.0), (-0.22, "seeds", 1.2)):
                mean, low, high = row["less base"][over]
                if np.isfinite(low):
                    axes.plot([low, high], [place + shift] * 2, color=colour(row["arm"]), linewidth=width)
                axes.plot([mean], [place + shift], "o", color=colour(row["arm"]), markersize=4 + width)
            axes.annotate(
                row["arm"], (row["less base"]["items"][0], place), xytext=(0, 7), textcoords="offset points",
                ha="center", fontsize=0.85 * SIZE, color=colour(row["arm"]),
            )  # fmt: skip
        axes.axvline(0.0, color="0.6", linewidth=1)
        axes.set_ylim(-0.6, len(some) - 0.3)
        axes.set_yticks([])
        axes.set_title({GSM8K: "GSM8k", HUMANEVAL: "HumanEval"}[name], fontsize=SIZE)
        better = "lower is better" if measure == NATS else "higher is better"
        axes.set_xlabel(f"{measure} less base ({better})", fontsize=0.85 * SIZE)
        axes.spines["left"].set_visible(False)
    return drawn
