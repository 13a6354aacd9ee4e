"""The figures of the comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from experiments.bias_comparison.maps import OPERANDS, WORDS
from experiments.runner.figures import SIZE, canvas, colour, label_ends, plot_band
from experiments.runner.statistics import Interval, student

if TYPE_CHECKING:
    from experiments.bias_comparison.results import Result

_TEXTS: Final = {"text": "text, all trained", "tuned": "new text, base frozen", "encoder": "encoder, masked"}
_DRAWN: Final = ("plain", "alibi", "key", "guidance")  # of retrieval by depth
Results = Mapping[tuple[str, str], "Result"]


def draw(results: Results, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Name of a file -> its figure, of what has run."""
    names = {part["name"]: part for part in parts}
    ran = {part for part, _ in results}
    drawn: dict[str, Any] = {}
    if ran & _TEXTS.keys():
        drawn["texts"] = texts(results)
    probes = [name for name, part in names.items() if part["kind"] == "probe" and name in ran]
    if probes:
        drawn["probes"] = accuracies(results, probes)
    if ("knobs", "width 64") in results:
        drawn["knobs"] = knobs(results)
    if "recall" in ran:
        drawn["depth"] = depth(results)
    if ("sums", "guidance") in results:
        drawn["sums"] = reasoning(results)
        drawn["map"] = graph(results["sums", "guidance"])
    return drawn


def texts(results: Results) -> Any:
    """Held-out loss less that of plain training, or of the frozen base, paired by seed."""
    shown = [part for part in _TEXTS if any(where == part for where, _ in results)]
    figure, panels = canvas(4.4 * len(shown), 5.0, 1, len(shown))
    for axes, part in zip(panels, shown, strict=True):
        arms = [one for (where, _), one in results.items() if where == part and one.arm != "plain"]
        base = results.get((part, "plain"))

        def gain(one: Result, base: Result | None = base) -> list[float]:
            if base is None:
                return [curve[-1] - curve[0] for curve in one.curve().values()]
            theirs = base.end()
            return [loss - theirs[seed] for seed, loss in one.end().items() if seed in theirs]

        dots(axes, {one.arm: gain(one) for one in arms})
        axes.set_title(_TEXTS[part], fontsize=SIZE)
        axes.set_xlabel("loss less plain, nats" if base is not None else "loss less frozen base, nats", fontsize=SIZE)
    return figure


def accuracies(results: Results, probes: Sequence[str]) -> Any:
    """Share of right answers of each probe at the end."""
    columns = min(3, len(probes))
    lines = -(-len(probes) // columns)
    figure, panels = canvas(4.3 * columns, 4.2 * lines, lines, columns)
    for axes, part in zip(panels.flatten(), probes, strict=False):
        dots(
            axes, {one.arm: list(one.end("accuracy").values()) for (where, _), one in results.items() if where == part}
        )
        axes.set_title(part, fontsize=SIZE)
        axes.set_xlim(-0.02, 1.04)
        axes.set_xlabel("accuracy", fontsize=SIZE)
    for axes in panels.flatten()[len(probes) :]:
        axes.set_visible(False)
    return figure


def knobs(results: Results) -> Any:
    """Loss of each variant less that of width 64, and both initialisations over the steps."""
    figure, (left, right) = canvas(12.0, 5.0, 1, 2)
    own = results["knobs", "width 64"]
    variants = [one for (part, _), one in results.items() if part == "knobs" and one is not own]
    theirs = own.end()
    values = {one.arm: [loss - theirs[seed] for seed, loss in one.end().items() if seed in theirs] for one in variants}
    dots(left, values, lambda name: colour("guidance"))
    left.set_xlabel("loss less width 64, nats", fontsize=SIZE)
    ends: dict[str, tuple[float, float]] = {}
    for name, one in (("zero init", own), ("He init", results.get(("knobs", "He init")))):
        if one is not None:
            ends[name] = _curve(right, name, one.steps, list(one.curve().values()))
    label_ends(right, ends)
    right.set_xlabel("training step", fontsize=SIZE)
    right.set_ylabel("held-out loss, nats", fontsize=SIZE)
    right.tick_params(labelsize=SIZE)
    return figure


def depth(results: Results) -> Any:
    """Retrieval by depth at 1 to 8 times the length of training, and by distractor sentences."""
    arms = [results["recall", arm] for arm in _DRAWN if ("recall", arm) in results]
    cells = {key for one in arms for run in one.runs.values() for key in run["extras"]["depth"]}
    lengths = sorted({int(cell.split("x")[0]) for cell in cells})
    lines = -(-(len(lengths) + 1) // 3)
    figure, panels = canvas(13.0, 4.4 * lines, lines, 3)
    flat = panels.flatten()
    for axes, length in zip(flat, lengths, strict=False):
        places = sorted({float(cell.split()[1]) for cell in cells})
        ends: dict[str, tuple[float, float]] = {}
        for one in arms:
            rows = [[run["extras"]["depth"][f"{length}x {p:g}"] for p in places] for run in one.runs.values()]
            ends[one.arm] = _curve(axes, one.arm, [100 * place for place in places], rows)
        _percent(axes, ends, f"{length} x length of training", "depth, %")
    ends = {}
    last = flat[len(lengths)]
    for one in arms:
        counts = [int(count) for count in next(iter(one.runs.values()))["extras"]["distractors"]]
        rows = [list(run["extras"]["distractors"].values()) for run in one.runs.values()]
        ends[one.arm] = _curve(last, one.arm, counts, rows)
    _percent(last, ends, "distractors", "distractor sentences")
    for axes in flat[len(lengths) + 1 :]:
        axes.set_visible(False)
    return figure


def reasoning(results: Results) -> Any:
    """Fig. 1: the bias at "="; Fig. 6: where "=" looks in the base, with ALiBi, and with the trained bias."""
    arms = [results["sums", arm] for arm in ("plain", "alibi", "guidance") if ("sums", arm) in results]
    figure, panels = canvas(13.0, 3.4 * (1 + len(arms)), 1 + len(arms), 1)
    places = range(len(WORDS))

    def bars(axes: Any, one: Result, quantity: str) -> None:
        rows = np.array([np.mean(run["extras"]["sums"][quantity], axis=0) for run in one.runs.values()])
        bands = [student(column.tolist()) for column in rows.T]
        heights = [band.mean for band in bands]
        reach = [_reach(band) for band in bands]
        shades = [colour(one.arm) if place in OPERANDS else "#b8b8b8" for place in places]
        axes.bar(places, heights, color=shades, yerr=reach, ecolor="0.3", capsize=3)
        axes.axhline(0, color="0.4", linewidth=0.8)
        axes.set_xticks(places, WORDS, fontsize=SIZE)
        axes.tick_params(labelsize=SIZE)

    bars(panels[0], results["sums", "guidance"], "bias")
    panels[0].set_title('row-centred bias at the last "=", mean over layers (numbers in colour)', fontsize=SIZE)
    for axes, one in zip(panels[1:], arms, strict=True):
        bars(axes, one, "weights")
        axes.set_title(f'{one.arm}: attention of the last "=", mean over heads and layers', fontsize=SIZE)
    return figure


def graph(one: Result) -> Any:
    """Fig. 1: the bias of all queries, mean over layers and seeds; and of each query its strongest key, up and down."""
    figure, (left, right) = canvas(14.0, 6.4, 1, 2)
    values = np.mean([np.mean(run["extras"]["sums"]["map"], axis=0) for run in one.runs.values()], axis=0)
    reach = float(np.abs(values).max()) or 1.0
    forbidden = np.triu(np.ones(values.shape, dtype=bool), 1)
    shown = left.imshow(np.where(forbidden, np.nan, values), cmap="coolwarm_r", vmin=-reach, vmax=reach)
    figure.colorbar(shown, ax=left, shrink=0.7).ax.tick_params(labelsize=SIZE)
    places = range(len(WORDS))
    left.set_xticks(places, WORDS, rotation=90, fontsize=SIZE)
    left.set_yticks(places, WORDS, fontsize=SIZE)
    left.set_title("row-centred bias: rows are queries", fontsize=SIZE)
    blue, red = shown.cmap(0.95), shown.cmap(0.05)
    for query in places[1:]:
        row = values[query, : query + 1]
        for key, shade, side in ((int(row.argmax()), blue, 1), (int(row.argmin()), red, -1)):
            if key != query and row[key] * side > 0:
                arrow = {
                    "arrowstyle": "->",
                    "connectionstyle": f"arc3,rad={side * 0.45}",
                    "color": shade,
                    "linewidth": 0.6 + 2.4 * abs(row[key]) / reach,
                }
                right.annotate("", (0.14 * side, key), (0.14 * side, query), arrowprops=arrow)
    for place, word in enumerate(WORDS):
        right.text(0, place, word, ha="center", va="center", fontsize=SIZE)
    right.set_xlim(-1, 1)
    right.set_ylim(len(WORDS) - 0.5, -0.5)
    right.set_axis_off()
    right.set_title("from each query to its strongest key (blue up, red down)", fontsize=SIZE)
    return figure


def dots(
    axes: Any, values: Mapping[str, Sequence[float]], shade: Callable[[str], str] = colour, reference: float = 0.0
) -> None:
    """A row per arm: each seed a faint dot, the mean with its interval, the name at the left in the arm's colour."""
    names = list(values)[::-1]
    for row, name in enumerate(names):
        band = student(values[name])
        axes.plot(values[name], [row] * len(values[name]), "o", color=shade(name), alpha=0.3, markersize=6)
        axes.errorbar(band.mean, row, xerr=_reach(band), fmt="D", color=shade(name), capsize=4, markersize=6)
    axes.axvline(reference, color="0.4", linewidth=0.8)
    axes.set_yticks(range(len(names)), names, fontsize=SIZE)
    for tick, name in zip(axes.get_yticklabels(), names, strict=True):
        tick.set_color(shade(name))
    axes.tick_params(axis="x", labelsize=SIZE)
    axes.locator_params(axis="x", nbins=4)
    axes.set_ylim(-0.6, len(names) - 0.4)


def _reach(band: Interval) -> float:
    half = band.high - band.mean
    return half if np.isfinite(half) else 0.0


def _curve(axes: Any, name: str, places: Sequence[float], rows: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Draw a mean over seeds with its interval; the place of its end."""
    bands = [student([row[number] for row in rows]) for number in range(len(places))]
    middle = [band.mean for band in bands]
    low, high = ([band.mean + sign * _reach(band) for band in bands] for sign in (-1, 1))
    plot_band(axes, places, middle, low, high, color=colour(name), linewidth=2.0)
    return float(places[-1]), middle[-1]


def _percent(axes: Any, ends: Mapping[str, tuple[float, float]], title: str, label: str) -> None:
    axes.set_ylim(-0.02, 1.04)
    axes.set_title(title, fontsize=SIZE)
    axes.set_xlabel(label, fontsize=SIZE)
    axes.set_ylabel("accuracy", fontsize=SIZE)
    axes.tick_params(labelsize=SIZE)
    label_ends(axes, ends)
