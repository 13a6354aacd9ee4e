"""The masks that a model's layers use, as a picture and on a page: each distinct one with its layers."""

from __future__ import annotations

import re
import textwrap

from attnflow._core.markup import element, percent, plural, shorten
from attnflow.masks.in_model import LayerMask, ModelMasks
from attnflow.report import html
from attnflow.report.displays import describes, draws
from attnflow.report.html import Content, code, tag
from attnflow.report.mask_picture import EXACT, mask_svg
from attnflow.report.page import Context, PagePart, Section
from attnflow.report.svg import root, text
from attnflow.report.tables import gallery


@draws(ModelMasks)
def masks_svg(result: ModelMasks, *, size: int = 360, title: str | None = None) -> str:
    drawings = [_named(_drawn(result, part, size), part.name) for part in result.masks]
    return gallery(drawings, f"the masks of {result.model}", title)


@describes(ModelMasks)
def masks_part(result: ModelMasks, _: Context) -> PagePart:
    lead = "Read off attention in one pass. Row = query, column = key; filled is attended to."
    figures = [
        tag("div", tag("h3", part.name), html.figure(_drawn(result, part, 360), code(shorten(repr(part.mask), 200))))
        for part in result.masks
    ]
    head = ["layers", "mask", "queries", "keys", "allowed"]
    rows: list[list[Content]] = [
        [part.name, code(shorten(repr(part.mask), 200)), *map(str, part.mask.shape), percent(part.mask.density)]
        for part in result.masks
    ]
    body = html.paragraph(lead, kind="lead") + tag("div", *figures, class_="many")
    body += html.table(head, rows, text_columns=2)
    if result.beside:
        body += html.note("neutral", html.paragraph(f"No mask controls {', '.join(result.beside)}."))
    reading = [f"{result.model} attends under {plural(len(result.masks), 'mask')}."]
    title = f"Masks of {result.model}"
    return PagePart(title, [Section("masks", title, body)], reading, (), [("Model", result.model)])


def _named(drawing: str, name: str) -> str:
    """A drawing below the layers that it is of."""
    width, height = (float(size) for size in re.findall(r' (?:width|height)="([\d.]+)"', drawing)[:2])
    lines = textwrap.wrap(name, max(16, int(width / 7.2)))
    words = "".join(text(line, 10, 14 + 17 * at, size=13) for at, line in enumerate(lines))
    below = 17.0 * len(lines) + 6
    return root(words + element("g", drawing, transform=f"translate(0,{below:g})"), width, height + below, name)


def _drawn(result: ModelMasks, part: LayerMask, size: int) -> str:
    texts = result.labels(part)
    fits = texts is not None and [*texts[0]] == [*texts[1]] and len(texts[0]) <= EXACT
    return mask_svg(part.mask, labels=texts[0] if fits and texts else None, size=size)
