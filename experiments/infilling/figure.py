"""The figure of the study."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.runner.figures import canvas, colour, enlarge, label_ends, plot_band


def figure(content: Mapping[str, Any]) -> Any:
    """Loss over tokens read, and of each way its loss at the end, what it writes, and how fast."""
    drawn, panels = canvas(15.0, 14.0, 3, 2)
    _curves(panels[0, 0], content)
    bar, lasts = (
        content["table"],
        {"neighbours": content["table"]["real_words"], "the text itself": content["real_words"]},
    )
    titles = {
        "held_out": "the same at the end, nats",
        "right": "tokens that are right, %",
        "whole": "gaps wholly right, %",
        "real_words": "letters in real words, %",
        "letters_per_second": "tokens filled a second of processor time",
    }
    for axes, (what, title) in zip(panels.flatten()[1:], titles.items(), strict=True):
        values = {one["way"]: one[what] for one in content["ways"]}
        if what in ("held_out", "right", "whole"):
            values["neighbours"] = bar[what]
        elif what == "real_words":
            values |= {name: [share] * 3 for name, share in lasts.items()}
        _points(axes, values, title, 100 if title.endswith("%") else 1)
    for axes in panels.flatten():
        enlarge(axes)
    return drawn


def _curves(axes: Any, content: Mapping[str, Any]) -> None:
    axes.set(title="held-out loss of a gap's tokens, nats", xlabel="thousand tokens read")
    ends: dict[str, tuple[float, float]] = {}
    starts: list[float] = []
    for way, rows in content["curves"].items():
        tokens, *band = (list(column) for column in zip(*rows, strict=True))
        places = [count / 1e3 for count in tokens]
        plot_band(axes, places, *band, color=colour(way), linewidth=2.2)
        ends[way] = places[-1], band[0][-1]
        starts.append(places[0])
    last, level = max(place for place, _ in ends.values()), content["table"]["held_out"][0]
    axes.plot([min(starts), last], [level, level], color=colour("neighbours"), linestyle="--", linewidth=2)
    ends["neighbours"] = last, level
    label_ends(axes, ends)


def _points(axes: Any, values: Mapping[str, Any], title: str, unit: int) -> None:
    """A mean with its interval in a row for each way."""
    axes.set(title=title)
    for row, (way, each) in enumerate(values.items()):
        mean, low, high = (unit * value for value in each)
        axes.plot([low, high], [row, row], color=colour(way), linewidth=3, solid_capstyle="round")
        axes.plot(mean, row, "o", markersize=9, color=colour(way))
    axes.set_yticks(range(len(values)), list(values))
    for label, way in zip(axes.get_yticklabels(), values, strict=True):
        label.set_color(colour(way))
    if "nats" not in title:
        axes.set_xlim(0, 1.05 * unit * max(each[2] for each in values.values()) or 1.0)
    axes.margins(y=0.1)
    axes.invert_yaxis()
