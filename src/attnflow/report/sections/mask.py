"""What a mask is and generates: its picture, order, growth, blocks and cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attnflow._core.markup import element, escape, grouped, number, percent, plural, shorten
from attnflow.masks.mask import Mask
from attnflow.order.flow import Flow, analyze
from attnflow.report import html
from attnflow.report.hasse_svg import runs
from attnflow.report.html import Content, Html, code, tag
from attnflow.report.mask_facts import CostModel, block_sizes, block_sparsity, mask_memory, prices
from attnflow.report.mask_svg import mask_svg
from attnflow.report.part import Context, Part, Section
from attnflow.report.sections import order

_SHOWN: Final = 12  # distinct masks of a stack that are drawn
LARGEST_ORDER: Final = 32_768  # positions above which the closure would take gigabytes

Layers = list[tuple[Mask, list[int]]]  # each distinct mask with the layers (from 1) that use it


def mask_part(subject: Mask | Flow, context: Context) -> Part:
    """A mask, or the masks of a stack of layers, with the order that they generate."""
    masks = subject.masks if isinstance(subject, Flow) else (subject,)
    flow, missing = (subject, "") if isinstance(subject, Flow) else flow_of(subject)
    layers = _distinct(masks)
    sections = [_picture(masks, layers, context.labels)]
    if flow is None:
        sections.append(Section("order", "Order", html.note("neutral", html.paragraph(f"No order: {missing}."))))
    elif flow.size:
        sections += [order.order(flow, context.labels), order.growth_by_layer(flow)]
    if 0 not in masks[0].shape:
        sections += [_blocks(layers), _cost(layers, context.cost)]
    source = ("Mask" if len(layers) == 1 else "Masks", html.join([_name(mask) for mask, _ in layers[:4]], ", "))
    title = shorten(repr(masks[0]), 200) if len(masks) == 1 else f"{len(masks)} layers of masks"
    return Part(title, sections, _reading(masks, layers, flow, missing), _numbers(masks, layers, flow), [source])


def flow_of(mask: Mask) -> tuple[Flow | None, str]:
    """The order of a mask, or None and the reason."""
    queries, keys = mask.shape
    if queries != keys:
        return None, f"queries and keys are different sequences ({queries} and {keys}): information does not return"
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
    queries, keys = mask.shape
    if 0 in mask.shape:
        return [
            f"The mask has {plural(queries, 'query', 'queries')} and {plural(keys, 'key')}: there is nothing to allow."
        ]
    if len(layers) > 1:
        stack = plural(len(masks), "layer")
        first = f"A stack of {stack} with {len(layers)} different masks over {plural(queries, 'position')}."
    else:
        first = (
            f"Each of {plural(queries, 'query', 'queries')} may attend to {mask.nnz / queries:.4g} of "
            f"{plural(keys, 'key')} on average, {percent(mask.density)} of all pairs."
        )
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


def _picture(masks: Sequence[Mask], layers: Layers, labels: Sequence[str] | None) -> Section:
    """The mask, or each distinct mask of a stack, as a picture with its numbers."""
    if len(layers) == 1:
        mask = layers[0][0]
        small = labels if labels is not None and len(labels) <= 32 else None
        svg = mask_svg(mask, labels=small, size=520, standalone=False)
        left = html.figure(svg, _caption(mask), read_out=True)
        return Section("mask", "Mask", tag("div", left, html.facts(_facts(mask)), class_="pair"))
    figures = [
        tag(
            "div",
            tag("h3", _layers(numbers)),
            html.figure(mask_svg(mask, size=280, standalone=False), _line(mask), read_out=True),
        )
        for mask, numbers in layers[:_SHOWN]
    ]
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
    if max(mask.shape) <= 64:
        return (
            "Row = query, column = key. A filled cell lets the query attend to the key: information flows key to query."
        )
    return (
        "Row = query, column = key. The stronger the colour of a block, the more of its pairs are allowed; "
        "only blocks that allow every pair have the full colour."
    )


def _line(mask: Mask) -> Html:
    return _name(mask) + Html(f", {percent(mask.density)} allowed")


def _layers(layers: list[int]) -> str:
    return f"Layer {layers[0]}" if len(layers) == 1 else f"Layers {runs(layers)}"


def _blocks(masks: Layers) -> Section:
    """Full, partial and empty blocks, as a block-sparse kernel meets them."""
    parts = [
        html.paragraph(
            "A block-sparse kernel such as FlexAttention skips blocks without an allowed pair, and applies the mask "
            "inside partial blocks only. “Used” is the share of the computed pairs that the mask allows.",
            kind="lead",
        ),
        tag(
            "ul",
            *(tag("li", tag("span", class_=f"swatch-{k}"), k) for k in ("full", "partial", "empty")),
            class_="keyline",
        ),
    ]
    for mask, where in masks[:_SHOWN]:
        if len(masks) > 1:
            parts.append(tag("h3", f"{_layers(where)} · ", _name(mask)))
        rows: list[list[Content]] = []
        for size in block_sizes(mask):
            s = block_sparsity(mask, size)
            bar = _share_bar([("full", s.full), ("partial", s.partial), ("empty", s.empty)])
            computed = f"{grouped(s.computed)} of {grouped(s.total)}"
            share = percent(s.computed / s.total)
            rows.append([str(size), Html(bar), share, computed, grouped(s.full), grouped(s.partial), percent(s.used)])
        head = ["size", "full, partial, empty", "computed", "blocks", "full", "partial", "used"]
        parts.append(html.table(head, rows, text_columns=2))
    return Section("blocks", "Block sparsity", html.join(parts))


def _cost(masks: Layers, model: CostModel) -> Section:
    """What attention under the mask costs, next to dense and causal attention."""
    heads, layers = plural(model.num_heads, "head"), plural(model.num_layers, "layer")
    lead = f"For {layers} of {heads} with {model.head_dim} channels, one sequence, forward pass, attention alone."
    parts = [html.paragraph(lead, kind="lead")]
    for mask, where in masks[:_SHOWN]:
        if len(masks) > 1:
            parts.append(tag("h3", f"{_layers(where)} · ", _name(mask)))
        rows = [
            [p.name, grouped(p.pairs), percent(p.relative), _si(p.flops, "FLOP"), _bytes(p.score_bytes)]
            for p in prices(mask, model)
        ]
        head = ["attention over", "pairs", "of dense", "attention", "scores per layer"]
        parts.append(html.table(head, rows, marked=()))
        memory = mask_memory(mask)
        sizes = (
            f"The mask itself takes {_bytes(memory.table)} as a table of bools, {_bytes(memory.additive)} as an "
            f"additive bfloat16 table, {_bytes(memory.blocks)} as block tables, and {_bytes(memory.intervals)} as the "
            "row intervals of this package."
        )
        parts.append(html.paragraph(sizes))
    parts.append(
        html.paragraph(
            "attention = 4 · head_dim · heads · layers · pairs (2 · head_dim each for a score and for its value; a "
            f"multiply-add is 2 FLOP). scores per layer = {model.bytes_per_score} bytes · heads · pairs, if a kernel "
            "stores them; fused kernels do not. Projections and feed-forward layers are not affected by a mask.",
            kind="lead",
        )
    )
    return Section("cost", "Cost", html.join(parts))


def _share_bar(parts: Sequence[tuple[str, int]], width: float = 220.0) -> str:
    """A bar cut in proportion to (name, amount); the columns beside it have the numbers."""
    total, x = sum(amount for _, amount in parts) or 1, 0.0
    pieces: list[str] = []
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


def _si(value: int, unit: str) -> str:
    for size, prefix in ((10**18, "E"), (10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= size:
            return f"{_three(value / size)} {prefix}{unit}"
    return f"{value} {unit}"


def _bytes(value: int) -> str:
    for size, prefix in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= size:
            return f"{_three(value / size)} {prefix}"
    return f"{value} B"


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
