"""Losses by position and what each arm gains there: files, figure, table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from attnflow._core.markup import aligned
from experiments.length.study import BASE, MEASURED
from experiments.runner.figures import canvas, colour, enlarge, label_ends, plot_band
from experiments.runner.files import write, write_table
from experiments.runner.jobs import Job, Record, rates_of
from experiments.runner.statistics import Array, detectable, said, student
from experiments.runner.study import read_study
from experiments.runner.verdict import LOSS, decide

CONTRASTS: Final = (
    ("cumulative", "plain"),
    ("alibi added", "plain"),
    ("alibi for rope", "plain"),
    ("cumulative", "lora"),
    ("alibi added", "lora"),
)


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and figure.png, and return the table."""
    about, runs = read_study(folder)
    config = about["config"]
    losses, rates = losses_of(runs, config), rates_of(config, runs)
    ranges = positions(config)
    content = {
        "interval": "95 % of Student's t over seeds, paired; of the same rows",
        "claimed": f"the loss is lower; smallest effect {LOSS} nats per token",
        "seeds": len(config["seeds"]),
        "trained tokens": config["steps"] * config["batch_size"] * config["length"],
        "added": about["added"],
        "rates": rates,
        "losses": {
            arm: {name: student(_within(values, span, config)).numbers for name, span in ranges.items()}
            for arm, values in losses.items()
        },
        "contrasts": [
            _contrast(losses, one, other, name, span, config)
            for one, other in CONTRASTS
            if {one, other} <= set(losses)
            for name, span in ranges.items()
        ],
        "seconds": sum(run["seconds_here"] for run in runs),
    }
    write(results / "results.json", content)
    head = ["arm", "seed", "position", "loss"]
    write_table(results / "results.csv", head, _cells(losses, config))
    figure(losses, config).savefig(results / "figure.png", dpi=110)
    return table(content)


def losses_of(runs: Sequence[Record], config: Mapping[str, Any]) -> dict[str, Array]:
    """Arm -> nats per token [seeds, rows, blocks], of arms with all seeds; the base has one "seed"."""
    found = {Job(**run["job"]): np.array(run["losses"]) for run in runs if "losses" in run}
    table: dict[str, Array] = {}
    for arm in (BASE, *config["arms"]):
        own = [value for job, value in sorted(found.items(), key=_seed) if job.arm.removeprefix(MEASURED) == arm]
        if len(own) == (1 if arm == BASE else len(config["seeds"])):
            table[arm] = np.stack(own)
    return table


def _seed(one: tuple[Job, Array]) -> int:
    return one[0].seed or 0


def positions(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Ranges of positions that double: those of training, the next as many, and so on."""
    ends = [0, config["length"]]
    while ends[-1] < config["tested"]:
        ends.append(2 * ends[-1])
    return {f"{low} to {high}": (low, high) for low, high in pairwise(ends)}


def _within(values: Array, span: tuple[int, int], config: Mapping[str, Any]) -> list[float]:
    low, high = (end // config["block"] for end in span)
    found: list[float] = values[:, :, low:high].mean(axis=(1, 2)).tolist()
    return found


def _contrast(
    losses: Mapping[str, Array], one: str, other: str, name: str, span: tuple[int, int], config: Mapping[str, Any]
) -> dict[str, Any]:
    each = np.subtract(_within(losses[one], span, config), _within(losses[other], span, config)).tolist()
    value = student(each)
    decision = decide(value, "below", LOSS)
    rows = (losses[one] - losses[other]).mean(axis=0)[None, :, :]
    return {
        "arm": one,
        "less": other,
        "positions": name,
        "nats": value.numbers,
        "each": each,
        "over texts": student(_within(rows.transpose(1, 0, 2), span, config)).numbers,
        "detectable": detectable(each) if len(each) > 1 else None,
        "verdict": decision.verdict,
        "tags": decision.tags,
    }


def _cells(losses: Mapping[str, Array], config: Mapping[str, Any]) -> list[list[object]]:
    return [
        [arm, "" if arm == BASE else config["seeds"][place], block * config["block"], f"{loss:.5f}"]
        for arm, values in losses.items()
        for place, of_seed in enumerate(values.mean(axis=1))
        for block, loss in enumerate(of_seed)
    ]


def figure(losses: Mapping[str, Array], config: Mapping[str, Any]) -> Any:
    """Losses by position, and differences from plain training of the arms that stay near it."""
    drawn, panels = canvas(15.0, 6.5, 1, 2)
    block = config["block"]
    for axes, less in zip(panels, (False, True), strict=True):
        axes.set(
            title="less plain training, nats per token" if less else "loss, nats per token",
            xlabel=f"position; training had the first {config['length']}",
        )
        axes.axvline(config["length"], color="0.8", linewidth=1)
        ends: dict[str, tuple[float, float]] = {}
        for arm, values in losses.items():
            if less and (arm in (BASE, "plain", "alibi for rope") or "plain" not in losses):
                continue
            shown = values.mean(axis=1) - (losses["plain"].mean(axis=1) if less else 0)
            curve = [student(of_block) for of_block in shown.T.tolist()]
            places = [(number + 0.5) * block for number in range(len(curve))]
            bounds = [(one.low, one.high) if len(values) > 1 else (one.mean, one.mean) for one in curve]
            plot_band(
                axes, places, [one.mean for one in curve], *zip(*bounds, strict=True), color=colour(arm), linewidth=2
            )
            ends[arm] = places[-1], curve[-1].mean
        if less:
            axes.axhline(0.0, color="0.4", linewidth=1)
        label_ends(axes, ends)
        enlarge(axes)
    return drawn


def table(content: Mapping[str, Any]) -> str:
    lines = [["arm", "rate", "added", *next(iter(content["losses"].values()))]]
    for arm, values in content["losses"].items():
        rate = content["rates"].get(arm, {}).get("taken")
        shown = ["" if rate is None else f"{rate:g}", f"{content['added'].get(arm, 0):,}"]
        lines.append([arm, *shown, *(f"{value[0]:.4f}" for value in values.values())])
    more = [
        f"{one['arm']} less {one['less']}, {one['positions']}: {said(one['nats'], '+.4f')}; "
        f"{', '.join([one['verdict'], *one['tags']])}"
        for one in content["contrasts"]
    ]
    return "\n".join([aligned(lines, left=range(len(lines[0]))), *more])
