"""Which function draws which kind of result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from attnflow.bias.graph import BiasGraph
from attnflow.bias.map import BiasMap
from attnflow.bias.trained import Trained
from attnflow.geometry.table import GeometryScores
from attnflow.knowledge.provenance import Trace
from attnflow.masks.mask import Mask
from attnflow.order.hasse import Hasse
from attnflow.report import score_figures
from attnflow.report.bias_figures import map_figure
from attnflow.report.figures import mask_figure
from attnflow.report.graph_svg import graph_svg
from attnflow.report.hasse_svg import hasse_svg
from attnflow.report.trace_figure import trace_figure
from attnflow.report.training_figure import training_figure

FIGURES: Final[dict[type, Callable[..., Any]]] = {
    BiasGraph: graph_svg,
    BiasMap: map_figure,
    GeometryScores: score_figures.score_figure,
    Hasse: hasse_svg,
    Mask: mask_figure,
    Trace: trace_figure,
    Trained: training_figure,
}


def figure(result: object, *others: object, **options: Any) -> Any:
    """A result as a picture: a matplotlib figure of a chart, or the SVG text of a diagram.

    Args:
        result: a mask or any result that has a drawing.
        others: more results of the same kind, where one picture shows several.
        options: of the drawing, such as `picture="layers"` for scores, `layer=` for a map.

    Raises:
        TypeError: there is no drawing of it; the message lists what can be drawn.
        MissingExtra: matplotlib is not installed.
    """
    draw = next((FIGURES[kind] for kind in type(result).__mro__ if kind in FIGURES), None)
    if draw is None:
        names = ", ".join(sorted(kind.__name__ for kind in FIGURES))
        raise TypeError(f"expected something that can be drawn ({names}), got {type(result).__name__}")
    return draw(result, *others, **options)
