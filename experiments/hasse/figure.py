"""The curve of an arm, and the figure of all curves of the study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.runner.figures import SIZE, canvas, colour, enlarge, label_ends, plot_band
from experiments.runner.jobs import Record
from experiments.runner.statistics import Array, student


@dataclass(frozen=True)
class Curve:
    arm: str  # its name
    rate: float  # chosen on the first seed
    runs: Mapping[int, Record]  # finished ones, by seed
    steps: tuple[int, ...]  # of the measurements
    tokens: Array  # of the text, that a run has read by then
    flops: Array  # that it has taken by then
    held_out: Array  # nats per token, [seeds, steps]

    def at(self, flops: float) -> Array:
        """[seeds], where that much compute is spent, between measurements by a straight line; at most the last."""
        return np.array([np.interp(flops, self.flops, row) for row in self.held_out])

    def pair(self, other: Curve, mine: Array, theirs: Array) -> list[float]:
        """Differences on the seeds that both have, of arrays [seeds]."""
        seeds, others = list(self.runs), list(other.runs)
        return [float(mine[seeds.index(s)] - theirs[others.index(s)]) for s in seeds if s in others]


def figure(content: Mapping[str, Any], curves: Mapping[str, Curve]) -> Any:
    """Loss over tokens and over compute, by tokens per pass, of sparse masks, and by their depth."""
    drawn, panels = canvas(15.0, 17.0, 3, 2)
    names = ["causal", *(f"block {block}" for block in content["blocks"]), "butterfly"]
    shown = [curves[name] for name in names if name in curves]
    _over(panels[0, 0], shown, "tokens", 1e3, "thousand tokens read", "held-out loss over tokens, nats")
    _over(panels[0, 1], shown, "flops", 1e12, "compute, TFLOP", "held-out loss over compute, nats")
    arms = {one["arm"]: one for one in content["arms"]}
    _per_pass(panels[1, 0], content, arms)
    _words(panels[1, 1], content)
    _depth(panels[2, 0], content)
    _repeats(panels[2, 1], content)
    for axes in panels.flatten():
        enlarge(axes)
    return drawn


def _over(axes: Any, shown: Sequence[Curve], what: str, unit: float, label: str, title: str) -> None:
    axes.set(title=title, xlabel=label)
    lowest, ends = [float("inf")], dict[str, tuple[float, float]]()
    for one in shown:
        places = [float(value) / unit for value in getattr(one, what)[1:]]  # without the start, which hides the rest
        bands = [student(row.tolist()) for row in one.held_out.T[1:]]
        curve = ([getattr(band, name) for band in bands] for name in ("mean", "low", "high"))
        plot_band(axes, places, *curve, color=colour(one.arm), marker="", linewidth=2.2)
        ends[one.arm] = places[-1], bands[-1].mean
        lowest.append(min(band.mean for band in bands))
    if what == "tokens":
        label_ends(axes, ends)
    else:
        for name, (x, y) in ends.items():
            style = {"color": colour(name), "fontsize": SIZE, "va": "center", "textcoords": "offset points"}
            axes.annotate(name.removeprefix("block "), (x, y), xytext=(5, 0), **style)


def _per_pass(axes: Any, content: Mapping[str, Any], arms: Mapping[str, Any]) -> None:
    axes.set(title="held-out loss by tokens per pass, nats", xlabel="tokens per pass")
    blocks = [block for block in content["blocks"] if f"block {block}" in arms]
    _, ends = axes.set_xscale("log", base=2), dict[str, tuple[float, float]]()
    for name, prefix in {"from scratch": "block", "warm start": "warm", "sparse": "sparse block"}.items():
        values = [(block, arms[f"{prefix} {block}"]["held_out"]) for block in blocks if f"{prefix} {block}" in arms]
        if values:
            places = [block for block, _ in values]
            plot_band(axes, places, *zip(*(value for _, value in values), strict=True), color=colour(name), linewidth=2)
            ends[name] = places[-1], values[-1][1][0]
    tables = content["tables"]["by_block"]
    if blocks:
        heights = [tables[str(block)] for block in blocks]
        axes.plot(blocks, heights, color=colour("last token read"), linestyle="--", linewidth=2)
        ends["last token read"] = blocks[-1], tables[str(blocks[-1])]
        axes.set_xticks(blocks, [str(block) for block in blocks])
    if "causal" in arms:
        ends["causal"] = _level(axes, content["blocks"], arms["causal"]["held_out"][0], "causal")
    label_ends(axes, ends)


def _words(axes: Any, content: Mapping[str, Any]) -> None:
    axes.set(title="letters in real words, of what is written, %", xlabel="tokens per pass")
    axes.set_xscale("log", base=2)
    ends: dict[str, tuple[float, float]] = {}
    for name, prefix in {"from scratch": "block ", "warm start": "warm "}.items():
        values = [
            (one["tokens_per_pass"], [100 * value for value in one["real_words"]])
            for one in content["written"]
            if one["arm"].startswith(prefix)
        ]
        if values:
            places = [place for place, _ in values]
            plot_band(axes, places, *zip(*(value for _, value in values), strict=True), color=colour(name), linewidth=2)
            ends[name] = places[-1], values[-1][1][0]
    levels = {one["arm"]: one["real_words"][0] for one in content["written"] if one["arm"] == "causal"}
    for name, share in {**levels, "the text itself": content["real_words"]}.items():
        ends[name] = _level(axes, content["blocks"], 100 * share, name)
    axes.set_xticks(content["blocks"], [str(block) for block in content["blocks"]])
    axes.set_ylim(bottom=0)
    label_ends(axes, ends)


def _level(axes: Any, blocks: Sequence[int], height: float, name: str) -> tuple[float, float]:
    """The end of a line that knows no blocks."""
    axes.plot([blocks[0], blocks[-1]], [height, height], color=colour(name), linewidth=1.5)
    return blocks[-1], height


def _depth(axes: Any, content: Mapping[str, Any]) -> None:
    axes.set(title="loss of sparse causal masks less dense, nats", xlabel="depth of the mask (filled: reached)")
    axes.set_xscale("log", base=2)
    axes.axhline(0, color="0.4", linewidth=0.8)
    ends: dict[str, tuple[float, float]] = {}
    for layers in dict.fromkeys(one["layers"] for one in content["depths"]):
        rows, name = [one for one in content["depths"] if one["layers"] == layers], f"{layers} layers"
        ends[name] = _by_depth(axes, rows, "excess", name)
        axes.axvline(layers, color=colour(name), linestyle=":", linewidth=1.5)
    label_ends(axes, ends)


def _by_depth(axes: Any, rows: Sequence[Mapping[str, Any]], what: str, name: str) -> tuple[float, float]:
    """A curve whose points are filled where all that is needed is in reach; returns its end."""
    places = [one["depth"] for one in rows]
    bands = zip(*(one[what] for one in rows), strict=True)
    plot_band(axes, places, *bands, color=colour(name), marker="", linewidth=2)
    for one in rows:
        face = colour(name) if one["reached"] else "white"
        axes.plot(one["depth"], one[what][0], "o", markersize=8, color=colour(name), markerfacecolor=face)
    axes.set_xticks(places, [str(place) for place in places])
    return places[-1], rows[-1][what][0]


def _repeats(axes: Any, content: Mapping[str, Any]) -> None:
    axes.set(title="loss of a repeated half row, nats", xlabel="depth of the mask (filled: reached)")
    axes.set_xscale("log", base=2)
    rows = sorted(content["repeats"], key=lambda one: one["depth"])
    if rows:
        name = f"{rows[0]['layers']} layers"
        label_ends(axes, {name: _by_depth(axes, rows, "held_out", name)})
    axes.set_ylim(bottom=0)
