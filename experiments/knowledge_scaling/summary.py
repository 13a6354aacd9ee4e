"""What the grid says: loss by entries and width, what each of the two buys, and whether they add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from attnflow._core.markup import aligned
from experiments.knowledge_twins.summary import Curve, arms, read_curves, write_curves
from experiments.runner.figures import SIZE, canvas, colour, enlarge, label_ends, plot_band
from experiments.runner.files import write
from experiments.runner.statistics import detectable, said, student


def name(width: int, entries: int) -> str:
    """Of an arm.

    >>> name(64, 512)
    'width 64 with 512'
    """
    return f"width {width} with {entries}"


def gains(curves: Mapping[str, Curve], widths: Sequence[int], entries: Sequence[int]) -> list[dict[str, Any]]:
    """What the largest store gains over the smallest at each width, and the widest model over the narrowest with each
    store. Also how much more the first is at the narrowest than at the widest width; in nats, paired by seed.
    """

    def less(one: tuple[int, int], other: tuple[int, int]) -> dict[int, float]:
        ends = [
            dict(zip(c.runs, c.held_out[:, -1].tolist(), strict=True))
            for c in (curves[name(*one)], curves[name(*other)])
        ]
        return {seed: ends[0][seed] - ends[1][seed] for seed in ends[0] if seed in ends[1]}

    few, many = entries[0], entries[-1]
    found: dict[str, list[float]] = {}
    for width in widths:
        found[f"{many} entries for {few}, width {width}"] = list(less((width, few), (width, many)).values())
    for count in entries:
        found[f"width {widths[-1]} for {widths[0]}, {count} entries"] = list(
            less((widths[0], count), (widths[-1], count)).values()
        )
    narrow, wide = (less((width, few), (width, many)) for width in (widths[0], widths[-1]))
    found["interaction"] = [narrow[seed] - wide[seed] for seed in narrow if seed in wide]
    for width, wider in pairwise(widths):
        each = less((width, many), (wider, few))
        found[f"width {width} with {many} less width {wider} with {few}"] = list(each.values())
    return [
        {"name": key, "each": each, "nats": student(each).numbers, "detectable": detectable(each)}
        for key, each in found.items()
        if len(each) > 1
    ]


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and figure.png, and return the table."""
    about, curves = read_curves(folder)
    widths, entries = about["config"]["widths"], about["config"]["entries"]
    lacking = [name(width, count) for width in widths for count in entries if name(width, count) not in curves]
    if lacking:
        raise FileNotFoundError(f"{folder} has no {lacking[0]} with all its learning rates yet: go on with --resume")
    content: dict[str, Any] = {
        "interval": "held_out: mean, and 95 % of Student's t over seeds; nats: Student's t over seeds",
        "widths": widths,
        "entries": entries,
        "arms": arms(about, curves),
        "gains": gains(curves, widths, entries),
    }
    write(results / "results.json", content)
    write_curves(results / "results.csv", curves)
    figure(content).savefig(results / "figure.png", dpi=110)
    return table(content)


def figure(content: Mapping[str, Any]) -> Any:
    """Loss by entries, and by parameters of the whole model, a curve for each width."""
    drawn, panels = canvas(15.0, 6.5, 1, 2)
    rows = {one["arm"]: one for one in content["arms"]}
    titles = {"entries": "entries of the store", "parameters": "parameters, the store's among them"}
    for axes, (what, title) in zip(panels, titles.items(), strict=True):
        axes.set(title=f"held-out loss by {what}, nats per token", xlabel=title)
        axes.set_xscale("log", base=4 if what == "entries" else 2)
        ends: dict[str, tuple[float, float]] = {}
        for width in content["widths"]:
            some = [rows[name(width, count)] for count in content["entries"]]
            places = content["entries"] if what == "entries" else [one["parameters"] for one in some]
            curve = zip(*(one["held_out"] for one in some), strict=True)
            label = f"width {width}"
            plot_band(axes, places, *curve, color=colour(label), linewidth=2.2)
            ends[label] = places[-1], some[-1]["held_out"][0]
        if what == "entries":
            axes.set_xticks(content["entries"], [str(count) for count in content["entries"]])
            axes.minorticks_off()
            label_ends(axes, ends)
        else:  # the curves end in different places
            axes.margins(x=0.15)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:,.0f} k")
            for label, end in ends.items():
                style = {"color": colour(label), "fontsize": SIZE, "va": "center", "textcoords": "offset points"}
                axes.annotate(label, end, xytext=(7, 0), **style)
        enlarge(axes)
    return drawn


def table(content: Mapping[str, Any]) -> str:
    lines = [["arm", "rate", "seeds", "parameters", "multiply-adds", "held-out loss", "active"]]
    for one in content["arms"]:
        active = sum(one["active"]) / len(one["active"])
        numbers = [f"{one[key]:,}" for key in ("parameters", "operations")]
        seeds = str(len(one["seeds"]))
        lines.append([one["arm"], f"{one['rate']:g}", seeds, *numbers, said(one["held_out"]), f"{active:.0%}"])
    more = [
        f"{one['name']}: {said(one['nats'])}; {one['detectable']:.3f} would be seen in 4 of 5 studies"
        for one in content["gains"]
    ]
    return "\n".join([aligned(lines, left=range(len(lines[0]))), *more])
