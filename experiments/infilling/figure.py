"""The figure of the study."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.runner.figures import SIZE, canvas, colour, label_ends, plot_band


def figure(content: Mapping[str, Any]) -> Any:
    """Loss over tokens read, and of each way what its gaps are worth, and how fast they are filled.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    drawn, panels = canvas(15.0, 12.0, 2, 2)
    _curves(panels[0, 0], content)
    bar, names = content["table"], {"right": "tokens that are right", "whole": "gaps wholly right"}
    for axes, (what, title) in zip((panels[0, 1], panels[1, 0]), names.items(), strict=True):
        values = {one["way"]: one[what] for one in content["ways"]} | {"neighbours": bar[what]}
        _points(axes, values, f"{title}, %")
    _speed(panels[1, 1], content)
    for axes in panels.flatten():
        axes.tick_params(labelsize=SIZE)
        axes.title.set_fontsize(SIZE)
        axes.xaxis.label.set_fontsize(SIZE)
    return drawn


def _curves(axes: Any, content: Mapping[str, Any]) -> None:
    axes.set(title="held-out loss of a gap's tokens, nats", xlabel="thousand tokens read")
    ends: dict[str, tuple[float, float]] = {}
    for way, rows in content["curves"].items():
        tokens, *band = (list(column) for column in zip(*rows[1:], strict=True))  # the start would hide the rest
        places = [count / 1e3 for count in tokens]
        plot_band(axes, places, *band, color=colour(way), linewidth=2.2)
        ends[way] = places[-1], band[0][-1]
    last = max(place for place, _ in ends.values())
    level = content["table"]["held_out"][0]
    axes.axhline(level, color=colour("neighbours"), linestyle="--", linewidth=2)
    ends["neighbours"] = last, level
    label_ends(axes, ends)


def _points(axes: Any, values: Mapping[str, Any], title: str) -> None:
    """A mean with its interval in a row for each way."""
    axes.set(title=title)
    for row, (way, each) in enumerate(values.items()):
        mean, low, high = (100 * value for value in each)
        axes.plot([low, high], [row, row], color=colour(way), linewidth=3, solid_capstyle="round")
        axes.plot(mean, row, "o", markersize=9, color=colour(way))
    axes.set_yticks(range(len(values)), list(values))
    for label, way in zip(axes.get_yticklabels(), values, strict=True):
        label.set_color(colour(way))
    axes.set_xlim(left=0)
    axes.margins(y=0.1)
    axes.invert_yaxis()


def _speed(axes: Any, content: Mapping[str, Any]) -> None:
    """Letters in real words over speed."""
    axes.set(title="letters in real words, %, by speed", xlabel="tokens of gaps a second of processor time")
    speeds = [one["letters_per_second"][0] for one in content["ways"]]
    for one in content["ways"]:
        (x, left, right), (y, low, high) = one["letters_per_second"], (100 * value for value in one["real_words"])
        axes.plot([left, right], [y, y], color=colour(one["way"]), linewidth=2)
        axes.plot([x, x], [low, high], color=colour(one["way"]), linewidth=2)
        axes.plot(x, y, "o", markersize=9, color=colour(one["way"]))
    ends = {one["way"]: (max(speeds), 100 * one["real_words"][0]) for one in content["ways"]}
    levels = {"neighbours": content["table"]["real_words"], "the text itself": content["real_words"]}
    for name, share in levels.items():
        axes.axhline(100 * share, color=colour(name), linestyle="--", linewidth=1.5)
        ends[name] = max(speeds), 100 * share
    label_ends(axes, ends)
