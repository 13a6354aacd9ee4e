"""Figures of the experiments: one colour per arm in all of them, intervals, and labels where the lines end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from attnflow._core.errors import MissingExtra

# Paul Tol's "bright" and "muted" schemes, which readers with any kind of colour vision tell apart.
COLOURS: Final[Mapping[str, str]] = {
    # biases and their controls
    "guidance": "#1f5fa8",
    "key": "#c2571a",
    "lowrank": "#3a8a4d",
    "lora": "#7a4fa3",
    "plain": "#222222",
    "dense": "#997700",
    "cumulative": "#00796b",
    "gate": "#5c4033",
    "zero init": "#1f5fa8",
    "He init": "#c2571a",
    # a language model and what becomes of it
    "base": "#6a6a6a",
    "base again": "#6a6a6a",
    "relative": "#aa3377",
    "continued": "#222222",
    "alibi": "#aa3377",
    "alibi continued": "#ee6677",
    "alibi added": "#c2571a",
    "alibi for rope": "#ee6677",
    "guidance continued": "#66ccee",
    # objectives
    "causal": "#c2571a",
    "bidirectional": "#1f5fa8",
    "masked": "#1f5fa8",
    "difference": "#6a6a6a",
    # families of tasks, and how they are trained and read
    "block 1": "#5aa9d6",
    "block 2": "#3a78b5",
    "block 4": "#1f4f94",
    "block 8": "#10254f",
    "butterfly": "#3a8a4d",
    "from scratch": "#1f4f94",
    "warm start": "#aa3377",
    "sparse": "#997700",
    "last token read": "#8a8a8a",
    "the text itself": "#6a6a6a",
    # ways of filling a gap
    "one shot": "#1f4f94",
    "random, one shot": "#66ccee",
    "random, half": "#00796b",
    "random, one by one": "#3a8a4d",
    "neighbours": "#8a8a8a",
    "2 layers": "#8a6ab0",
    "3 layers": "#222222",
    "4 layers": "#222222",
    "8 layers": "#3a8a4d",
    "12 layers": "#c2571a",
    # one base for all layers, and its twins
    "shared": "#1f5fa8",
    "shared best": "#66ccee",
    "equal parameters": "#c2571a",
    "equal compute": "#3a8a4d",
    "width 32": "#c2571a",
    "width 64": "#1f5fa8",
    "width 96": "#3a8a4d",
    "width 128": "#aa3377",
    "width 256": "#3a8a4d",
    "width 384": "#c2571a",
    "width 768": "#1f5fa8",
    "width 1536": "#3a8a4d",
    # initialisations and penalties
    "default": "#6a6a6a",
    "scaled": "#222222",
    "symmetric": "#aa3377",
    "symmetric small": "#ee6677",
    "skew": "#228833",
    "penalty symmetric": "#66ccee",
    "penalty skew": "#997700",
    "penalty columns": "#4477aa",
    # checkpoints that packages ship, by what they read
    "SmolLM2": "#222222",
    "MiniLM": "#6a6a6a",
    "Whisper encoder": "#c2571a",
    "Whisper decoder": "#997700",
    "AntiBERTy": "#1f5fa8",
    "Sapiens heavy": "#5aa9d6",
    "Sapiens light": "#66ccee",
    "rxnfp": "#228833",
    "rxnfp tuned": "#3a8a4d",
    "rxnfp tuned 10k": "#00796b",
    "RXNMapper": "#aa3377",
    # ways of choosing entries
    "effect": "#1f5fa8",
    "norm": "#c2571a",
    "random": "#8a8a8a",
    # from scores of entries to weights, and how they are trained
    "supervised": "#6a6a6a",
    "relu": "#c79a2b",
    "relu grown": "#c2571a",
    "sparsemax grown": "#228833",
    "softmax": "#66ccee",
    "softmax grown": "#1f5fa8",
    "best grown": "#aa3377",
    "no near misses": "#00796b",
    # ways of reading facts
    "entries": "#1f5fa8",
    "best entries": "#3a8a4d",
    "context": "#c2571a",
    "context, 1 fact": "#c79a2b",
    "context or unknown": "#7a4fa3",
    "shuffled entries": "#999999",
    # scores that attention weights may follow, hulls that outputs may lie in, and ways of cutting a text
    "own scores": "#222222",
    "form of a head": "#1f5fa8",
    "form, no norm": "#66ccee",
    "form of all heads": "#c2571a",
    "hull of values": "#1f5fa8",
    "hull of tokens": "#c2571a",
    "causal, packed": "#c2571a",
    "causal, beginnings": "#aa3377",
    "causal, shuffled": "#997700",
    "masked, packed": "#1f5fa8",
    # a pretrained model with a reader, and its rivals
    "reader": "#1f5fa8",
    "ask": "#00796b",
    "context, 5 facts": "#c2571a",
    "LoRA": "#7a4fa3",
    "edit": "#3a8a4d",
    "rank one": "#aa3377",
    # ways of changing a fact in its entries
    "guarded": "#1f5fa8",
    "no guard": "#c2571a",
    "64 entries": "#3a8a4d",
    "full": "#222222",
}
SIZE: Final = 14.0  # points of all text: readable where the figure is shown at half its size


def colour(arm: str) -> str:
    if arm not in COLOURS:
        raise KeyError(f"no colour for {arm!r}: give it one in experiments/runner/figures.py")
    return COLOURS[arm]


def canvas(width: float, height: float, rows: int, columns: int) -> tuple[Any, Any]:
    """(a matplotlib figure, its axes as `subplots` returns them), without frames at the top and the right."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "report", "the figure of an experiment") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    panels: Any = np.atleast_1d(figure.subplots(rows, columns))
    for axes in panels.flatten():
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def enlarge(axes: Any) -> None:
    """The title, the name of the x axis and all numbers of one panel in the size of all text."""
    axes.tick_params(labelsize=SIZE)
    axes.title.set_fontsize(SIZE)
    axes.xaxis.label.set_fontsize(SIZE)


def plot_band(
    axes: Any,
    places: Sequence[float],
    middle: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    **line: Any,
) -> None:
    """A curve with its interval; `line` as `Axes.plot` takes it."""
    axes.fill_between(places, low, high, color=line.get("color"), alpha=0.13, linewidth=0)
    axes.plot(places, middle, **{"markersize": 4.5, "marker": "o", **line})


def label_ends(axes: Any, ends: Mapping[str, tuple[float, float]], size: float = SIZE) -> None:
    """Names beside the ends of curves, in their colours, moved apart where they would cover one another."""
    if not ends:
        return
    figure = axes.figure
    figure.draw_without_rendering()  # places are known after the layout
    low, high = axes.get_ylim()
    height = axes.get_window_extent().height * 72 / figure.dpi  # in points
    step = 1.25 * size / height * (high - low)
    order = sorted(ends, key=lambda name: ends[name][1])
    right = max(x for x, _ in ends.values())
    for name, y in zip(order, spread([ends[name][1] for name in order], step, low, high), strict=True):
        axes.annotate(
            name,
            (right, y),
            xytext=(5, 0),
            textcoords="offset points",
            color=colour(name),
            fontsize=size,
            va="center",
            annotation_clip=False,
        )
    axes.set_ylim(low, high)


def spread(values: Sequence[float], step: float, low: float, high: float) -> list[float]:
    """Ascending values moved as little as is needed to be `step` apart and within bounds, if there is room.

    >>> spread([1.0, 1.1, 5.0], 1.0, 0.0, 10.0)
    [0.55, 1.55, 5.0]
    """
    groups: list[list[float]] = []  # (sum of wished first places, members)
    for value in values:
        groups.append([value, 1])
        while len(groups) > 1:
            (one, many), (other, few) = groups[-2], groups[-1]
            if one / many + many * step <= other / few:
                break
            groups[-2:] = [[one + other - few * many * step, many + few]]
    places: list[float] = []
    for total, count in groups:
        first = min(max(total / count, low), max(low, high - (count - 1) * step))
        places += [first + number * step for number in range(int(count))]
    return [round(place, 9) for place in places]
