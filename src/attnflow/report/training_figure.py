"""The curve of a training run as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from attnflow._core.errors import MissingExtra
from attnflow.bias.trained import Trained


def training_figure(trained: Trained) -> Any:
    """Loss on the left, |B| of each layer on the right, against steps.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "report", "the figure") from error
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    left, right = cast(Sequence[Any], figure.subplots(1, 2))
    for name, label, style in (("loss", "training", "-"), ("eval_loss", "held out", "o-")):
        left.plot(*_points(trained, name), style, markersize=4, linewidth=1.3, label=label)
    left.set_ylabel("loss (nats per token)")
    left.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    numbers = [int(name.rpartition("_")[2]) for name in trained.layers]
    colours, scale = colormaps["viridis"], Normalize(min(numbers, default=0), max(max(numbers, default=1), 1))
    for name, number in zip(trained.layers, numbers, strict=True):
        right.plot(*_points(trained, name), color=colours(scale(number)), linewidth=1.2)
    if numbers:
        figure.colorbar(ScalarMappable(scale, colours), ax=right, label="layer")
    right.set_ylabel("|B|, row-centred, by layer")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _points(trained: Trained, name: str) -> tuple[list[float], list[float]]:
    entries = [entry for entry in trained.curve if name in entry]
    return [entry["step"] for entry in entries], [entry[name] for entry in entries]
