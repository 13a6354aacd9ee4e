"""The figure of the probe: where B points, what is right in longer sentences, how symmetric attention is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from experiments.runner.figures import SIZE, canvas, colour

_LINKS: Final = {"verb": "verb to subject", "pronoun": "pronoun to antecedent", "effect": "effect to cause"}
_TABLES: Final = {  # what is drawn of each link: (label, arm whose colour it has, name of the quantity)
    "B of guidance": ("guidance", "guidance: masked bias"),
    "B of key": ("key", "key: masked bias"),
    "random B": ("random", "random: masked bias"),
    "scores of plain": ("plain", "plain: masked scores"),
}
_ARMS: Final = ("plain", "dense", "key", "guidance")
_READINGS: Final = {
    "scores": "scores",
    "row-centred": "rows centred",
    "double-centred": "both centred",
    "weights": "weights",
}


def draw_figure(content: Mapping[str, Any]) -> Any:
    figure, (left, middle, right) = canvas(17.0, 5.6, 1, 3)
    _links(left, content["quantities"])
    _right(middle, content["quantities"])
    if content["symmetry"] is not None:
        _symmetry(right, content["symmetry"])
    else:
        right.set_visible(False)
    return figure


def _links(axes: Any, found: Mapping[str, Any]) -> None:
    """Share of sentences, one dot a seed, with the interval."""
    wanted = [(kind, "points", label) for kind, label in _LINKS.items()] + [
        ("effect", "one way", "effect to cause,\nnot back")
    ]
    for row, (kind, what, _) in enumerate(wanted):
        for number, (arm, name) in enumerate(_TABLES.values()):
            one = found.get(f"{name}, last layer, {kind} {what}")
            if one is not None:
                _dots(axes, one, row + 0.18 * (number - 1.5), colour(arm))
    for label, (arm, _) in _TABLES.items():
        axes.plot([], [], "o", color=colour(arm), label=label)
    _finish(axes, [label for _, _, label in wanted], "share of sentences", 0.5)
    axes.legend(fontsize=0.75 * SIZE, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)


def _right(axes: Any, found: Mapping[str, Any]) -> None:
    for row, length in enumerate(("near", "far")):
        for number, arm in enumerate(_ARMS):
            one = found.get(f"{arm}: right, {length}")
            if one is not None:
                _dots(axes, one, row + 0.18 * (number - 1.5), colour(arm))
    for arm in _ARMS:
        axes.plot([], [], "o", color=colour(arm), label=arm)
    _finish(axes, ["as in training", "longer"], "linked words right", 4 / 9)
    axes.legend(fontsize=0.75 * SIZE, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4)


def _symmetry(axes: Any, content: Mapping[str, Any]) -> None:
    models = {"real": colour("MiniLM"), "random": colour("random"), "random, keys = queries": colour("symmetric")}
    for row, name in enumerate(_READINGS):
        for number, (model, shade) in enumerate(models.items()):
            median, low, high, _ = content["heads"][model]["words"][name]
            place = row + 0.2 * (number - 1)
            axes.plot([low, high], [place, place], color=shade, linewidth=2)
            axes.plot(
                median,
                place,
                "o",
                color=shade,
                markersize=7,
                label=None if row else {"real": "MiniLM"}.get(model, model),
            )
    _finish(axes, list(_READINGS.values()), "antisymmetric share of heads", 0.5)
    axes.legend(fontsize=0.75 * SIZE, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)


def _dots(axes: Any, one: Mapping[str, Any], place: float, shade: str) -> None:
    values = list(one["by_seed"].values())
    mean, low, high = one["t"]
    axes.plot(values, [place] * len(values), "o", color=shade, alpha=0.45, markersize=4, markeredgewidth=0)
    if len(values) > 1:
        axes.plot([low, high], [place, place], color=shade, linewidth=2)
    axes.plot(mean, place, "o", color=shade, markersize=7)


def _finish(axes: Any, labels: list[str], title: str, chance: float) -> None:
    axes.axvline(chance, color="#aaaaaa", linewidth=1, zorder=0)
    axes.set_xlim(-0.03, 1.03)
    axes.set_yticks(range(len(labels)), labels, fontsize=SIZE)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=SIZE)
    axes.set_xlabel(title, fontsize=SIZE)
