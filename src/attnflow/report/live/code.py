"""The code that makes a design: for attnflow, for FlexAttention, and its masks in the forms of other kernels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final, cast

from attnflow._core.parameters import find
from attnflow.masks import export
from attnflow.masks.export import NotExpressible
from attnflow.report.live.design import Design, Layer, Stroke

_MAX_EXPORTED: Final = 4096  # positions of a mask whose export is shown as text
_MAX_LITERAL: Final = 4000  # characters of a mask that is written into the code

_FLEX = """\
import torch
from torch.nn.attention.flex_attention import flex_attention

block_mask = {mask}.block_mask(block_size=128, device="cuda")
attend = torch.compile(flex_attention, dynamic=False)
out = attend(query, key, value, block_mask=block_mask)  # [batch, heads, {size}, head_dim] each
"""


def code(design: Design) -> dict[str, object]:
    """{"attnflow": its code, "flex": what follows it for FlexAttention, "formats": what `exported` takes}."""
    lines = ["import attnflow as af", "from attnflow import masks", ""]
    names = [f"layer_{i}" for i in range(len(design.layers))] if design.stacked else ["mask"]
    for name, layer in zip(names, design.layers, strict=True):
        lines += _layer(name, layer)
    subject = f"[{', '.join(names)}]" if design.stacked else "mask"
    lines += [f"print(af.order.analyze({subject}))"]
    if design.labels:
        lines += _task(design, subject)
    flex = _FLEX.format(mask=names[0], size=design.size)
    return {"attnflow": "\n".join(lines) + "\n", "flex": flex, "formats": sorted(export.FORMATS)}


def exported(layer: Layer, name: str) -> dict[str, object]:
    """A layer's mask in the form `name` as JSON text; or why that form cannot say it, with a pair.

    Raises:
        ValueError: an unknown form, or a mask that is too long to be shown.
    """
    make = find(name, export.FORMATS, "format")
    if layer.mask.num_queries > _MAX_EXPORTED:
        raise ValueError(
            f"text is shown of masks of up to {_MAX_EXPORTED:,} positions; for this one run "
            f"`attnflow mask export FILE --to {name} -o out.json`"
        )
    try:
        return {"format": name, "text": make(layer.mask).to_json()}
    except NotExpressible as error:
        return {"format": name, "refused": str(error), "pair": error.pair}
    except ValueError as error:  # a property of the format that no pair shows, such as a size
        return {"format": name, "refused": str(error), "pair": None}


def _layer(name: str, layer: Layer) -> list[str]:
    lines = [f"{name} = {_expression(layer.spec)}"]
    for allow, group in groupby(layer.strokes, key=lambda stroke: stroke.allow):
        sign = "| " if allow else "& ~"
        lines.append(f"{name} = {name} {sign}masks.from_edges({_pairs(list(group))}, {layer.mask.num_queries})")
    return lines


def _pairs(strokes: Sequence[Stroke]) -> str:
    """An expression for the pairs (query, key) of rectangles."""
    single = [stroke for stroke in strokes if (stroke[1] - stroke[0], stroke[3] - stroke[2]) == (1, 1)]
    if len(single) == len(strokes):
        return f"[{', '.join(f'({s.first_query}, {s.first_key})' for s in strokes)}]"
    boxes = ", ".join(str(tuple(stroke[:4])) for stroke in strokes)
    return f"[(q, k) for a, b, c, d in [{boxes}] for q in range(a, b) for k in range(c, d)]"


def _expression(spec: object) -> str:
    values = cast("Mapping[str, object]", spec)
    if "name" in values:
        parameters = cast("Mapping[str, object]", values.get("parameters", {}))
        return f"masks.{values['name']}({', '.join(f'{key}={value!r}' for key, value in parameters.items())})"
    for word, sign in (("and", " & "), ("or", " | ")):
        if word in values:
            return f"({sign.join(_expression(part) for part in cast('list[object]', values[word]))})"
    if "not" in values:
        return f"~{_expression(values['not'])}"
    text = json.dumps(values)
    if len(text) <= _MAX_LITERAL:
        return f"masks.Mask.from_json({text!r})"
    return 'masks.Mask.from_json(open("mask.json").read())  # the file that the studio saves'


def _task(design: Design, subject: str) -> list[str]:
    n = design.size
    sources = {i: list(made) for i, made in design.sources.items()}
    made = f"sources = {sources!r}" if len(sources) <= 64 else "sources = {}  # too many to list: save the design"
    labels = _labels(design)
    return [
        "",
        made,
        f"tokens = [af.tasks.Token(i, i, sources.get(i)) for i in range({n})]",
        f"labels = [af.tasks.Label(position, af.tasks.Token(token, token)) for position, token in {labels}]",
        f"print(af.tasks.check(af.tasks.Task(tokens, labels, {subject})))",
    ]


def _labels(design: Design) -> str:
    pairs, n = list(design.labels), design.size
    for text, shape in (
        (f"[(i, i + 1) for i in range({n - 1})]", [(i, i + 1) for i in range(n - 1)]),
        (f"[(i, i) for i in range({n})]", [(i, i) for i in range(n)]),
    ):
        if pairs == shape:
            return text
    return repr(pairs)
