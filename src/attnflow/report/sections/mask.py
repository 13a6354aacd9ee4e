"""What a mask is: its picture, its blocks, its cost."""

from __future__ import annotations

from typing import Final

from attnflow._core.markup import grouped, percent, plural
from attnflow.masks.mask import Mask
from attnflow.report import charts, html
from attnflow.report.facts import block_sizes, block_sparsity, mask_memory, prices
from attnflow.report.hasse_svg import runs
from attnflow.report.html import Content, Html, code, tag
from attnflow.report.picture import mask_svg
from attnflow.report.subject import Section, Subject

_SHOWN: Final = 12  # distinct masks of a stack that are drawn


def picture(subject: Subject) -> Section | None:
    """The mask, or each distinct mask of a stack, as a picture with its numbers."""
    if not subject.masks:
        return None
    distinct = subject.layers_of
    if len(distinct) == 1:
        mask = distinct[0][0]
        small = subject.labels if subject.labels is not None and len(subject.labels) <= 32 else None
        svg = mask_svg(mask, labels=small, size=520, standalone=False)
        left = html.figure(svg, _caption(mask), read_out=True)
        return Section("mask", "Mask", tag("div", left, html.facts(_facts(mask)), class_="pair"))
    figures = [
        tag(
            "div",
            tag("h3", _layers(layers)),
            html.figure(mask_svg(mask, size=280, standalone=False), _line(mask), read_out=True),
        )
        for mask, layers in distinct[:_SHOWN]
    ]
    lead = f"{plural(len(subject.masks), 'layer')} with {len(distinct)} different masks."
    if len(distinct) > _SHOWN:
        lead += f" The first {_SHOWN} are shown."
    lead += " Row = query, column = key; filled is allowed."
    rows = [[_layers(layers), code(repr(mask)), percent(mask.density)] for mask, layers in distinct]
    body = html.paragraph(lead, kind="lead") + tag("div", *figures, class_="many")
    return Section("mask", "Masks by layer", body + html.table(["layers", "mask", "allowed"], rows, text_columns=2))


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
    return code(repr(mask)) + Html(f", {percent(mask.density)} allowed")


def _layers(layers: list[int]) -> str:
    return f"Layer {layers[0]}" if len(layers) == 1 else f"Layers {runs(layers)}"


def blocks(subject: Subject) -> Section | None:
    """Full, partial and empty blocks, as a block-sparse kernel meets them."""
    if not subject.masks or 0 in subject.masks[0].shape:
        return None
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
    for mask, layers in subject.layers_of[:_SHOWN]:
        if len(subject.layers_of) > 1:
            parts.append(tag("h3", f"{_layers(layers)} · ", code(repr(mask))))
        rows: list[list[Content]] = []
        for size in block_sizes(mask):
            s = block_sparsity(mask, size)
            bar = charts.share_bar(
                [("full", s.full, "af-full"), ("partial", s.partial, "af-partial"), ("empty", s.empty, "af-empty")]
            )
            kept = f"{grouped(s.kept)} of {grouped(s.total)}"
            share = percent(s.kept / s.total)
            rows.append([str(size), Html(bar), share, kept, grouped(s.full), grouped(s.partial), percent(s.used)])
        head = ["size", "full, partial, empty", "kept", "blocks", "full", "partial", "used"]
        parts.append(html.table(head, rows, text_columns=2))
    return Section("blocks", "Block sparsity", html.join(parts))


def cost(subject: Subject) -> Section | None:
    """What attention under the mask costs, next to dense and causal attention."""
    if not subject.masks or 0 in subject.masks[0].shape:
        return None
    model = subject.cost
    heads, layers = plural(model.num_heads, "head"), plural(model.num_layers, "layer")
    lead = f"For {layers} of {heads} with {model.head_dim} channels, one sequence, forward pass, attention alone."
    parts = [html.paragraph(lead, kind="lead")]
    for mask, where in subject.layers_of[:_SHOWN]:
        if len(subject.layers_of) > 1:
            parts.append(tag("h3", f"{_layers(where)} · ", code(repr(mask))))
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
