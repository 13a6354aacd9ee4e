"""The Hasse diagram as plain data for a drawing that can be pointed at: boxes and lines where the report puts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Final

import numpy as np

from attnflow._core.markup import grouped, plural
from attnflow.order.hasse import Hasse
from attnflow.report import hasse_summary as summary
from attnflow.report.hasse_summary import Grouping
from attnflow.report.hasse_svg import arrange, bent

MAX_POINTED: Final = 4096  # positions up to which each one's box is named


def diagram(hasse: Hasse, labels: Sequence[str] | None, max_boxes: int = 60) -> dict[str, object]:
    """Boxes, lines and what was summarised; or, of what is too irregular for boxes, the profile by levels.

    Args:
        hasse: any diagram.
        labels: a text for each position.
        max_boxes: beyond so many classes they are summarised, as `hasse_svg` says.

    Returns:
        `boxes` with centres, sizes and texts, `lines` with paths, `box_of`: the box of each position (up to 4,096), or
        `bands`; and a `caption`.
    """
    for grouping in summary.groupings(hasse, max_boxes):
        drawn = _boxes(hasse, grouping, labels)
        if drawn is not None:
            return drawn
    total = f"{plural(len(hasse.nodes), 'class', 'classes')} and {plural(len(hasse.edges), 'cover')}"
    bands = [asdict(band) for band in summary.bands(hasse)]
    return {"bands": bands, "caption": f"{total}, too irregular to draw as boxes: classes by level."}


def _boxes(hasse: Hasse, grouping: Grouping, labels: Sequence[str] | None) -> dict[str, object] | None:
    edges = list(grouping.links)
    arranged = arrange(hasse, grouping, labels, edges)
    if arranged is None:
        return None
    texts, sizes, placement = arranged
    boxes = [
        {"x": x, "y": y, "width": width, "height": height, "texts": words, "several": len(box.classes) > 1}
        for (x, y), (width, height), words, box in zip(placement.centres, sizes, texts, grouping.boxes, strict=True)
    ]
    lines = [
        {"lower": edge[0], "upper": edge[1], "path": bent(route), "end": route[-1], "count": grouping.links[edge]}
        for edge, route in zip(edges, placement.routes, strict=True)
    ]
    content: dict[str, object] = {"boxes": boxes, "lines": lines, "width": placement.width, "height": placement.height}
    content["caption"] = _caption(hasse, grouping)
    positions = sum(len(node) for node in hasse.nodes)
    if positions <= MAX_POINTED:
        box_of = np.zeros(positions, dtype=np.int64)
        for index, box in enumerate(grouping.boxes):
            for number in box.classes:
                box_of[list(hasse.nodes[number])] = index
        content["box_of"] = box_of.tolist()
    return content


def _caption(hasse: Hasse, grouping: Grouping) -> str:
    if not grouping.how:
        return ""
    drawn = f"{grouped(len(hasse.nodes))} classes drawn as {plural(len(grouping.boxes), 'box', 'boxes')}"
    return f"Summarised: {drawn}; {grouping.how}."


def runs_of(values: Sequence[int]) -> list[list[int]]:
    """Equal neighbours as [first, last (excluded), value], without those that are negative.

    >>> runs_of([-1, 0, 0, 2])
    [[1, 3, 0], [3, 4, 2]]
    """
    array = np.asarray(values)
    cuts = [0, *(np.flatnonzero(np.diff(array)) + 1).tolist(), len(array)] if len(array) else []
    return [[first, last, int(array[first])] for first, last in pairwise(cuts) if array[first] >= 0]
