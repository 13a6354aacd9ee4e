"""What the runs say: right answers by way, size, kind, group and wording; drift, time and memory; with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from attnflow._core.markup import aligned
from experiments.reader.world import ABSENT, KINDS, WORDINGS
from experiments.runner.figures import SIZE, canvas, colour, label_ends, plot_band
from experiments.runner.files import write, write_table
from experiments.runner.statistics import interval, student
from experiments.runner.study import read_study

CONTEXT: Final = ("context, 1 fact", "context, 5 facts")
QUANTITIES: Final = ("entry", "word", "whole", "refused", "right", "old")
Run = Mapping[str, Any]


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and figure.png, and return the table."""
    about, runs = read_study(folder)
    ways = gathered(runs)
    if not ways:
        raise FileNotFoundError(f"no job in {folder} has asked anything yet")
    content: dict[str, Any] = {
        "interval": "mean, and 95 % of Student's t over seeds and questions; of drift and costs over seeds",
        "config": about["config"],
        "fits": [
            {"seed": run["job"]["seed"], **{name: value for name, value in run["fitted"].items() if name != "folder"}}
            for run in runs
            if "fitted" in run
        ],
        "thresholds": [
            {"arm": run["job"]["arm"], "seed": run["job"]["seed"], "threshold": run["threshold"]}
            for run in runs
            if "threshold" in run
        ],
        "ways": ways,
        "ask_less_context": ask_less_context(runs),
    }
    write(results / "results.json", content)
    lines = [
        [way["way"], way["size"], row["kind"], row["group"], row["wording"], name, *(f"{x:.4f}" for x in row[name])]
        for way in ways
        for row in way["answers"]
        for name in QUANTITIES
        if name in row
    ]
    lines += [
        [way["way"], way["size"], "", "", "", name, *(f"{x:.6g}" for x in way["costs"][name])]
        for way in ways
        for name in way["costs"]
    ]
    head = ["way", "facts", "kind", "group", "wording", "quantity", "mean", "low", "high"]
    write_table(results / "results.csv", head, lines)
    figure(ways).savefig(results / "figure.png", dpi=110)
    return table(ways)


def gathered(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Every way at every size, over seeds: answers by kind, group and wording, and what else it costs."""
    each: dict[tuple[str, int], dict[int, Run]] = {}
    for run in runs:
        for way in run.get("ways", ()):
            each.setdefault((way["way"], way["size"]), {})[run["job"]["seed"]] = way
    plain = {seed: way["drift"]["text"] for seed, way in each.get(("alone", 0), {}).items()}
    made: list[dict[str, Any]] = []
    for (name, size), ways in each.items():
        rows: list[dict[str, Any]] = []
        for first in next(iter(ways.values()))["answers"]:
            cell = [first[part] for part in ("kind", "group", "wording")]
            same = [_row(way["answers"], cell) for way in ways.values()]
            numbers = {
                quantity: interval(np.array([row[quantity] for row in same], dtype=np.float64)).numbers
                for quantity in QUANTITIES
                if quantity in first
            }
            rows.append({**dict(zip(("kind", "group", "wording"), cell, strict=True)), **numbers})
        made.append({"way": name, "size": size, "seeds": list(ways), "answers": rows, "costs": _costs(ways, plain)})
    return made


def whole_answers(way: Run, kind: str) -> list[Any]:
    """Whether whole answers were right, about facts of a kind that are there, in the trained wording."""
    return [
        row["whole"]
        for row in way["answers"]
        if "whole" in row and (row["kind"], row["wording"]) == (kind, WORDINGS[0]) and row["group"] not in ABSENT
    ]


def ask_less_context(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Whole answers that `ask` gives beyond each context, in trained wordings, of facts that are there; by seed."""
    shares: dict[tuple[str, int, str], dict[int, float]] = {}
    for run in runs:
        for way in run.get("ways", ()):
            for kind in KINDS:
                if rows := whole_answers(way, kind):
                    shares.setdefault((way["way"], way["size"], kind), {})[run["job"]["seed"]] = float(np.mean(rows))
    found: list[dict[str, Any]] = []
    for (way, size, kind), own in shares.items():
        for name in CONTEXT if way == "ask" else ():
            other = shares.get((name, size, kind), {})
            each = [value - other[seed] for seed, value in own.items() if seed in other]
            if each:
                told = {"ask": float(np.mean([*own.values()])), "told": float(np.mean([*other.values()]))}
                found.append({"size": size, "kind": kind, "context": name, **told, "whole": student(each).numbers})
    return found


def _row(rows: Sequence[Run], cell: Sequence[str]) -> Run:
    return next(row for row in rows if [row[part] for part in ("kind", "group", "wording")] == cell)


def _costs(ways: Mapping[int, Run], plain: Mapping[int, float]) -> dict[str, list[float]]:
    """Seconds, bytes, other facts that are kept, and how much more a token of other text costs, in nats and in %."""
    found: dict[str, list[float]] = {}
    for way in ways.values():
        for name, value in {**way["times"], "bytes": way["bytes"]}.items():
            found.setdefault(name, []).append(value)
        if way["drift"]["kept"]:
            found.setdefault("others_kept", []).append(float(np.mean(way["drift"]["kept"])))
    nats = [way["drift"]["text"] - plain[seed] for seed, way in ways.items() if seed in plain]
    if nats:
        found["text_nats"] = nats
        found["perplexity_ratio"] = [float(np.exp(one)) for one in nats]
    return {name: student(values).numbers for name, values in found.items()}


def share(way: Run, quantity: str, wording: str, absent: bool, kind: str | None = None) -> list[float]:
    """Mean, low, high over the cells (kinds and groups) whose facts are there, or are not: the means of their ends."""
    rows = [
        row[quantity]
        for row in way["answers"]
        if quantity in row
        and row["wording"] == wording
        and (row["group"] in ABSENT) == absent
        and kind in (None, row["kind"])
    ]
    return np.mean(rows, axis=0).tolist() if rows else []


def figure(ways: Sequence[Run]) -> Any:
    """By the facts of a store: right in trained and in paraphrased wordings, refused without an answer, time."""
    drawn, panels = canvas(24.0, 7.0, 1, 4)
    titles = ("right, trained wordings", "right, paraphrased", "refused, no answer in the store", "seconds a token")
    for axes, title in zip(panels, titles, strict=True):
        axes.set(title=title, xlabel="facts in the store", xscale="log")
        ends: dict[str, tuple[float, float]] = {}
        for name in dict.fromkeys(way["way"] for way in ways):
            mine = sorted((way for way in ways if way["way"] == name and way["size"]), key=lambda way: way["size"])
            drawable = [(way["size"], _bands(way, title)) for way in mine]
            points = [(size, band) for size, band in drawable if band]
            if points:
                places = [size for size, _ in points]
                bands = list(zip(*(band for _, band in points), strict=True))
                plot_band(axes, places, *bands, color=colour(name), linewidth=2.2)
                ends[name] = places[-1], bands[0][-1]
        if "seconds" not in title:
            axes.set_ylim(-0.03, 1.03)
        axes.tick_params(labelsize=SIZE)
        label_ends(axes, ends)
    return drawn


def _bands(way: Run, title: str) -> list[float]:
    if title.startswith("seconds"):
        return way["costs"]["token_seconds"]
    wording = WORDINGS[1] if "paraphrased" in title else WORDINGS[0]
    return share(way, "right", wording, absent=title.startswith("refused"))


def table(ways: Sequence[Run]) -> str:
    """The ways in text: the right entry, first word, whole and right answers by wording, refusals, and costs."""
    rows = [
        ["way", "facts", "wording", "kind", "entry", "word", "whole", "right", "refused rightly", "others kept", "text"]
    ]
    for way in ways:
        for wording in WORDINGS:
            for kind in KINDS:
                said = [share(way, name, wording, False, kind) for name in ("entry", "word", "whole", "right")]
                said.append(share(way, "right", wording, True, kind))
                costs = [way["costs"].get("others_kept", []), way["costs"].get("text_nats", [])]
                rows.append([
                    *(way["way"], str(way["size"]), wording, kind), *(f"{one[0]:.0%}" if one else "" for one in said),
                    *(f"{one[0]:.2f}" if one else "" for one in costs),
                ])  # fmt: skip
    return aligned(rows, left=[0, 2, 3])
