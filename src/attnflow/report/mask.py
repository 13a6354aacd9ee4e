"""Page sections for a mask: its picture, the order it generates, receptive fields and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attnflow._core.markup import element, escape, grouped, number, percent, plural, runs, shorten
from attnflow.masks.mask import Mask
from attnflow.order.flow import Flow, analyze
from attnflow.report import html, order
from attnflow.report.displays import describes
from attnflow.report.html import Content, Html, code, tag
from attnflow.report.mask_picture import EXACT, mask_svg
from attnflow.report.page import Context, PagePart, Section

_SHOWN: Final = 12  # distinct masks of a stack that are drawn
_COUNTED: Final = 1 << 26  # blocks that are counted for a picture
_SCATTERED: Final = 1 << 28  # keys that are looked at one by one for it
LARGEST_ORDER: Final = 32_768  # positions above which the closure would take gigabytes

Layers = list[tuple[Mask, list[int]]]  # each distinct mask with the layers (from 1) that use it


@describes(Mask, Flow)
def mask_part(subject: Mask | Flow, context: Context) -> PagePart:
    masks = subject.masks if isinstance(subject, Flow) else (subject,)
    flow, missing = (subject, "") if isinstance(subject, Flow) else flow_of(subject)
    layers = _distinct(masks)
    sections = [_picture(masks, layers, context, flow)]
    if flow is None:
        sections.append(Section("order", "Order", html.note("neutral", html.paragraph(f"No order: {missing}."))))
    elif flow.size:
        sections += [order.order(flow, context.labels), order.growth_by_layer(flow)]
    if 0 not in masks[0].shape:
        sections.append(_blocks(layers))
    names = html.join(dict.fromkeys(_name(mask) for mask, _ in layers[:4]), ", ")
    source = ("Mask" if len(layers) == 1 else "Masks", names)
    title = shorten(repr(masks[0]), 200) if len(masks) == 1 else f"{len(masks)} layers of masks"
    return PagePart(title, sections, _reading(masks, layers, flow, missing), _numbers(masks, layers, flow), [source])


def flow_of(mask: Mask) -> tuple[Flow | None, str]:
    queries, keys = mask.shape
    if queries != keys:
        before = (
            f"; if the first {keys - queries} keys were there before, see af.order.analyze" if keys > queries else ""
        )
        return None, f"queries and keys are different sequences ({queries} and {keys}): nothing returns{before}"
    if queries > LARGEST_ORDER:
        return None, f"the order is not computed above {LARGEST_ORDER} positions"
    return analyze(mask), ""


def _distinct(masks: Sequence[Mask]) -> Layers:
    layers: Layers = []
    for layer, mask in enumerate(masks, 1):
        same = next((numbers for other, numbers in layers if other is mask or other == mask), None)
        if same is None:
            layers.append((mask, [layer]))
        else:
            same.append(layer)
    return layers


def _reading(masks: Sequence[Mask], layers: Layers, flow: Flow | None, missing: str) -> list[Content]:
    mask = masks[0]
    queries, keys = plural(mask.num_queries, "query", "queries"), plural(mask.num_keys, "key")
    if 0 in mask.shape:
        return [f"The mask has {queries} and {keys}: there is nothing to allow."]
    if len(layers) > 1:
        positions = plural(mask.num_queries, "position")
        first = f"A stack of {plural(len(masks), 'layer')} with {len(layers)} different masks over {positions}."
    else:
        mean = f"{mask.nnz / mask.num_queries:.4g}"
        first = f"Each of {queries} may attend to {mean} of {keys} on average, {percent(mask.density)} of all pairs."
    return [first, f" There is no order to report: {missing}." if flow is None else order.reading(flow)]


def _numbers(masks: Sequence[Mask], layers: Layers, flow: Flow | None) -> list[tuple[str, Content]]:
    mask = masks[0]
    square = mask.num_queries == mask.num_keys
    size = grouped(mask.num_queries) if square else f"{grouped(mask.num_queries)} × {grouped(mask.num_keys)}"
    rows: list[tuple[str, Content]] = [("Positions" if square else "Queries × keys", size)]
    if len(layers) == 1:
        rows.append(("Allowed pairs", percent(mask.density)))
    else:
        rows.append(("Layers", tag("span", str(len(masks)), tag("small", f"{len(layers)} different"))))
    return rows + (order.numbers(flow) if flow is not None and flow.size else [])


def _picture(masks: Sequence[Mask], layers: Layers, context: Context, flow: Flow | None) -> Section:
    named = context.labels
    fits = named is None or len(named) <= EXACT or flow is None  # without a diagram, too many labels are refused
    labels, unnamed = (named, "") if fits else (None, f" Its {len(named or ())} labels stand in the Hasse diagram.")
    if len(layers) == 1:
        mask = layers[0][0]
        picture = html.figure(mask_svg(mask, labels=labels, size=520), _caption(mask) + unnamed, read_out=True)
        return Section("mask", "Mask", tag("div", picture, html.facts(_facts(mask)), class_="pair"))
    figures: list[Html] = []
    for mask, numbers in layers[:_SHOWN]:
        allowed = _name(mask) + Html(f", {percent(mask.density)} allowed")
        picture = html.figure(mask_svg(mask, labels=labels, size=280), allowed, read_out=True)
        figures.append(tag("div", tag("h3", _layers(numbers)), picture))
    lead = f"{plural(len(masks), 'layer')} with {len(layers)} different masks."
    if len(layers) > _SHOWN:
        lead += f" The first {_SHOWN} are shown."
    lead += " Row = query, column = key; filled is allowed."
    rows = [[_layers(numbers), _name(mask), percent(mask.density)] for mask, numbers in layers]
    body = html.paragraph(lead, kind="lead") + tag("div", *figures, class_="many")
    return Section("mask", "Masks by layer", body + html.table(["layers", "mask", "allowed"], rows, text_columns=2))


def _name(mask: Mask) -> Html:
    return code(shorten(repr(mask), 300))


def _facts(mask: Mask) -> list[tuple[str, Content]]:
    counts = mask.row_counts()
    queries, keys = mask.shape
    rows: list[tuple[str, Content]] = [("Mask", code(mask.name))]
    rows += [(name, code(_value(value))) for name, value in mask.parameters.items()]
    rows.append(("Queries × keys", f"{grouped(queries)} × {grouped(keys)}"))
    rows.append(("Allowed pairs", f"{grouped(mask.nnz)} of {grouped(queries * keys)}"))
    rows.append(("Density", percent(mask.density)))
    if len(counts):
        mean = f"{counts.mean():.1f}".rstrip("0").rstrip(".")
        rows.append(("Keys per query", f"{grouped(int(counts.min()))} to {grouped(int(counts.max()))}, mean {mean}"))
        blind = int((counts == 0).sum())
        if blind:
            rows.append(("Queries without keys", grouped(blind)))
    return rows


def _value(value: object) -> str:
    if isinstance(value, tuple) and len(value) > 8:
        return f"({', '.join(map(str, value[:6]))}, … {grouped(len(value))} values)"
    return repr(value)


def _caption(mask: Mask) -> str:
    exact = "A filled cell lets the query attend to the key: information flows key to query."
    shaded = (
        "The stronger the colour of a block, the more of its pairs are allowed; only blocks that allow every pair have "
        "the full colour."
    )
    return f"Row = query, column = key. {exact if max(mask.shape) <= EXACT else shaded}"


def _layers(layers: list[int]) -> str:
    return f"Layer {layers[0]}" if len(layers) == 1 else f"Layers {runs(layers)}"


def block_sizes(mask: Mask) -> list[int]:
    """Returns 128, FlexAttention's block, or more where those would take long, and up to two smaller sizes.

    These give 2 to 32 blocks, or are that of a mask of blocks, such as BigBird's, and the largest that divides it.
    """
    n, block = max(mask.shape), 128
    while n * n > (_SCATTERED * block if mask.numbered_keys()[1] is not None else _COUNTED * block * block):
        block *= 2
    own = mask.parameters.get("block")
    if isinstance(own, int) and own > 1:
        return [block, *[size for size in range(own, 1, -1) if own % size == 0 and size != block][:2]]
    return [block, *[size for size in (64, 32, 16, 8, 4) if 2 * size <= n <= 32 * size][:2]]


def _blocks(masks: Layers) -> Section:
    lead = (
        "A block-sparse kernel such as FlexAttention skips blocks without an allowed pair, and applies the mask "
        "inside partial blocks only. “Used” is the share of the computed pairs that the mask allows."
    )
    kinds = ("full", "partial", "empty")
    key = tag("ul", *(tag("li", tag("span", class_=f"swatch-{kind}"), kind) for kind in kinds), class_="keyline")
    body = html.paragraph(lead, kind="lead") + key
    for mask, where in masks[:_SHOWN]:
        title = tag("h3", f"{_layers(where)} · ", _name(mask)) if len(masks) > 1 else Html("")
        rows: list[list[Content]] = []
        for size in block_sizes(mask):
            s = mask.block_sparsity(size)
            bar = _share_bar([("full", s.full), ("partial", s.partial), ("empty", s.empty)])
            computed = f"{grouped(s.computed)} of {grouped(s.total)}"
            share = percent(s.computed / s.total)
            rows.append([str(size), Html(bar), share, computed, grouped(s.full), grouped(s.partial), percent(s.used)])
        head = ["size", "full, partial, empty", "computed", "blocks", "full", "partial", "used"]
        body += title + html.table(head, rows, text_columns=2)
    return Section("blocks", "Block sparsity", body)


def _share_bar(parts: Sequence[tuple[str, int]], width: float = 220.0) -> str:
    total, x, pieces = sum(amount for _, amount in parts) or 1, 0.0, list[str]()
    for name, amount in parts:
        title = element("title", escape(f"{name}: {grouped(amount)} of {grouped(total)}"))
        length = width * amount / total
        pieces.append(element("rect", title, x=x, y=0, width=length, height=12, class_=f"af-{name}"))
        x += length
    frame = {"x": 0.5, "y": 0.5, "width": width - 1, "height": 11, "stroke": "currentColor", "stroke_opacity": 0.35}
    words = ", ".join(f"{name} {grouped(amount)}" for name, amount in parts)
    look = {"width": width, "height": 12, "class_": "af-svg af-share", "role": "img", "aria_label": words}
    body = "".join(pieces) + element("rect", fill="none", **frame)
    return element("svg", body, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {number(width)} 12", **look)
