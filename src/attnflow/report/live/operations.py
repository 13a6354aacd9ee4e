"""The operations of a page: actions, which give the next design, and questions about one; all of it plain data."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from attnflow._core.checks import integer
from attnflow._core.markup import plural
from attnflow._core.parameters import EXAMPLES, find
from attnflow._core.plain import as_integer, as_list, as_object, as_text, parse_json
from attnflow.masks.mask import Mask
from attnflow.masks.spec import named_masks
from attnflow.report.hasse_svg import MAX_POINTED, diagram, runs, runs_of
from attnflow.report.live.design import (
    MAX_LAYERS,
    MAX_POSITIONS,
    Design,
    Layer,
    Spec,
    Stroke,
    labels_of,
    stroke_of,
    tokens_of,
)
from attnflow.tasks.leaks import witnesses
from attnflow.tasks.task import Task

Message = Mapping[str, object]
Outcome = tuple[Design, list[str]]
Reply = dict[str, object]
_LISTED: Final = 100  # leaks
_WALKED: Final = 1 << 14  # positions that are walked through to show the ways of leaks before they are asked for
_MAX_ARRIVALS: Final = 256  # layers that a receptive field is followed

MAX_CELLS: Final = 1024  # along one side
_MAX_LITERAL: Final = 4000  # characters of a mask that is written into the code
_FLEX = """\
import torch
from torch.nn.attention.flex_attention import flex_attention

block_mask = {mask}.block_mask(block_size=128, device="cuda")
attend = torch.compile(flex_attention, dynamic=False)
out = attend(query, key, value, block_mask=block_mask)  # [batch, heads, {size}, head_dim] each
"""


def chosen(message: Message, size: int) -> Spec:
    """Reads the catalogue mask that a message names; an empty `n` becomes `size`, others keep their default."""
    name = _text(message, "name")
    entry = find(name, named_masks(), "mask")
    settings = as_object(message.get("settings", {}), "settings")
    texts = {key: _text(settings, key) for key in settings}
    values = entry.read({key: text for key, text in texts.items() if text.strip()})
    if "n" not in values and any(parameter.name == "n" for parameter in entry.parameters):
        values["n"] = size
    entry.require(values)
    return {"name": name, "parameters": values}


def pick(design: Design, message: Message) -> Outcome:
    """Replaces a layer's mask by one of the catalogue."""
    return design.with_layer(layer_of(design, message), Layer.of(chosen(message, design.size)))


def combine(design: Design, message: Message) -> Outcome:
    """Combines a layer's mask with one of the catalogue by `and` or `or`."""
    number, sign = layer_of(design, message), _text(message, "sign")
    if sign not in ("and", "or"):
        raise ValueError(f"sign must be and or or, got {sign!r}")
    here, other = design.layers[number], Layer.of(chosen(message, design.size))
    if other.mask.num_queries != design.size:
        raise ValueError(
            f"masks that are combined have as many positions: expected {design.size}, got {other.mask.num_queries}"
        )
    base = here.baked()
    parts = cast("list[object]", base[sign]) if sign in base else [base]
    return design.with_layer(number, Layer.of({sign: [*parts, other.spec]}))


def invert(design: Design, message: Message) -> Outcome:
    """Inverts a layer's mask."""
    number = layer_of(design, message)
    base = design.layers[number].baked()
    return design.with_layer(number, Layer.of(base.get("not", {"not": base})))


def paint(design: Design, message: Message) -> Outcome:
    """Allows or forbids rectangles of pairs."""
    number = layer_of(design, message)
    strokes = as_list(message.get("strokes"), "strokes")
    drawn = [stroke_of(each, design.size, f"strokes[{i}]") for i, each in enumerate(strokes)]
    if not drawn:
        raise ValueError("expected at least one stroke")
    return design.with_layer(number, design.layers[number].painted(drawn))


def stack(design: Design, message: Message) -> Outcome:
    """Copies a layer's mask as a further layer after it; a single mask becomes a stack of two."""
    number = layer_of(design, message)
    if len(design.layers) >= MAX_LAYERS:
        raise ValueError(f"a stack has at most {MAX_LAYERS} layers")
    layers = (*design.layers[: number + 1], design.layers[number], *design.layers[number + 1 :])
    return replace(design, layers=layers, stacked=True), []


def unstack(design: Design, message: Message) -> Outcome:
    """Removes a layer; the last one left is the mask of all layers."""
    number = layer_of(design, message)
    if len(design.layers) == 1:
        raise ValueError("the only mask of a design cannot be removed")
    layers = tuple(each for i, each in enumerate(design.layers) if i != number)
    return replace(design, layers=layers, stacked=len(layers) > 1), []


def label(design: Design, message: Message) -> Outcome:
    """Adds or removes a label: a data token that a position must predict."""
    pair = (_position(design, message, "position"), _position(design, message, "token"))
    rest = tuple(each for each in design.labels if each != pair)
    return replace(design, labels=rest if len(rest) < len(design.labels) else (*rest, pair)), []


def labels(design: Design, message: Message) -> Outcome:
    """Labels all positions at once: with the "next" token, their "own", or "none"."""
    return replace(design, labels=labels_of(_text(message, "kind"), design.size)), []


def source(design: Design, message: Message) -> Outcome:
    """Sets the data tokens that the input at a position is made of; [MASK] has none."""
    position = _position(design, message, "position")
    tokens = [as_integer(each, "tokens") for each in as_list(message.get("tokens"), "tokens")]
    sources = {i: made for i, made in design.sources.items() if i != position}
    if tokens != [position]:
        sources[position] = tuple(sorted({_bounded(each, design.size, "tokens") for each in tokens}))
    return replace(design, sources=sources), []


def tokens(design: Design, message: Message) -> Outcome:
    """Takes the words of a text as the texts of the positions."""
    words = _text(message, "text").split()
    notices = [f"{len(words) - design.size} words do not fit"] if len(words) > design.size else []
    return replace(design, tokens=tokens_of(words, design.size, "tokens")), notices


def load(_: Design, message: Message) -> Outcome:
    """Replaces everything by the mask or task of a file."""
    text = _text(message, "text")
    return design_of(parse_json(text, "the file")), []


def restore(_: Design, message: Message) -> Outcome:
    """Restores a design from plain data."""
    return Design.from_dict(message.get("design")), []


def design_of(values: Mapping[str, object], where: str = "the file") -> Design:
    """Reads a design from the plain data of a mask, a task or a design."""
    if "layers" in values:
        return Design.from_dict(values, where)
    if "inputs" in values:
        return Design.of_task(Task.from_dict(values, where))
    return Design((Layer.of(values.get("mask", values), where=where),))


ACTIONS: Final[Mapping[str, Callable[[Design, Message], Outcome]]] = {
    function.__name__: function
    for function in (
        *(pick, combine, invert, paint, stack, unstack),
        *(label, labels, source, tokens, load, restore),
    )
}


def layer_of(design: Design, message: Message) -> int:
    """Returns the number of the layer that a message names."""
    return _bounded(as_integer(message.get("layer", 0), "layer"), len(design.layers), "layer")


def _position(design: Design, message: Message, name: str) -> int:
    return _bounded(as_integer(message.get(name), name), design.size, name)


def _bounded(value: int, size: int, name: str) -> int:
    if not 0 <= value < size:
        raise ValueError(f"{name} must lie in [0, {size}), got {value}")
    return value


def _text(values: Mapping[str, object], name: str) -> str:
    return as_text(values.get(name), name)


def tile(mask: Mask, other: Mask | None, first_query: int, first_key: int, span: int, cells: int) -> dict[str, object]:
    """Encodes the pairs of queries [first_query, first_query + span) and keys [first_key, first_key + span).

    `planes` are base64: "allowed", and with another mask "extra" (allowed only here) and "missing". At `step` 1 a plane
    holds bits, most significant first, rows padded to bytes; otherwise a byte per cell, from 0 (no pair is allowed) to
    255 (all). Cost: O(intervals + cells).
    """
    n = mask.num_queries
    first_query, first_key = (integer("first of a window", x, 0, n - 1) for x in (first_query, first_key))
    span, cells = integer("span", span, 1), integer("cells", cells, 1, MAX_CELLS)
    last_query, last_key = (min(n, first + span) for first in (first_query, first_key))
    step = -(-min(span, n) // cells)
    window = (slice(first_query, last_query), slice(first_key, last_key))
    whole = (last_query - first_query, last_key - first_key) == mask.shape
    here, beside = (each if each is None or whole else each[window] for each in (mask, other))
    assert here is not None
    masks = {"allowed": here}
    if beside is not None:
        masks |= {"extra": here & ~beside, "missing": beside & ~here}
    planes = {name: base64.b64encode(_cells(each, step).tobytes()).decode() for name, each in masks.items()}
    return {
        "first_query": first_query,
        "first_key": first_key,
        "step": step,
        "rows": -(-(last_query - first_query) // step),
        "columns": -(-(last_key - first_key) // step),
        "num_queries": last_query - first_query,
        "num_keys": last_key - first_key,
        "planes": planes,
    }


def _cells(mask: Mask, step: int) -> npt.NDArray[np.uint8]:
    if not mask.num_queries or not mask.num_keys:
        return np.zeros((0, 0), dtype=np.uint8)
    if step == 1:
        return np.packbits(mask.dense().numpy(), axis=1)
    counts = mask.block_counts(step)
    heights, widths = (np.minimum(step, size - step * np.arange(-(-size // step))) for size in mask.shape)
    share = counts / np.outer(heights, widths)
    partly = np.clip(np.ceil(254 * share), 1, 254)
    return np.where(share == 1, 255, np.where(counts > 0, partly, 0)).astype(np.uint8)


def catalogue() -> Reply:
    """Lists the available masks with their parameters and initial settings, and the limits."""
    masks = [
        {
            "name": entry.name,
            "relation": entry.summary,
            "parameters": [asdict(parameter) for parameter in entry.parameters],
            "example": dict(EXAMPLES[entry.name]),
        }
        for entry in named_masks().values()
    ]
    limits = {"max_positions": MAX_POSITIONS, "max_layers": MAX_LAYERS}
    return {"masks": masks, **limits}


def flow(design: Design) -> Reply:
    """Describes the order in numbers."""
    flow = design.flow
    return {
        "depth": flow.depth,
        "dense": flow.is_dense,
        "num_layers": flow.num_layers,
        "classes": len(flow.classes),
        "largest_class": max(map(len, flow.classes)),
        "covers": len(flow.hasse.edges),
        "levels": max(flow.hasse.levels) + 1,
        "closure_density": flow.closure_density,
    }


def field(design: Design, message: Message) -> Reply:
    """Returns after how many layers each position's information first reaches the given position."""
    position = as_integer(message.get("position"), "position")
    first = design.flow.arrivals(position, _MAX_ARRIVALS)
    return {"position": position, "runs": runs_of(first.tolist()), "followed": _MAX_ARRIVALS}


def leaks(design: Design) -> Reply:
    """Lists the labels that their positions can read, and the positions that serve no label."""
    if not design.labels:
        return {"labels": 0, "leaks": [], "total": 0, "dead": [], "num_dead": 0, "dead_text": ""}
    report, pairs = design.survey
    targets = design.task.targets
    leaks: list[Reply] = [
        {"position": position, "token": token, "carrier": carrier}
        for position, token, carrier in zip(
            *(targets.table[name][pairs[:_LISTED, 0]].tolist() for name in ("position", "data_index")),
            pairs[:_LISTED, 1].tolist(),
            strict=True,
        )
    ]
    for number in range(min(len(leaks), max(1, _WALKED // design.size))):
        leaks[number] |= witness(design, {"number": number})
    return {
        "labels": report.num_labels,
        "leaks": leaks,
        "total": len(pairs),
        "dead": list(report.dead[:MAX_POINTED]),
        "num_dead": len(report.dead),
        "dead_text": runs(report.dead[:MAX_POINTED]),
    }


def witness(design: Design, message: Message) -> Reply:
    """Returns the path of one leak, which takes a walk through the masks."""
    report, pairs = design.survey
    number = as_integer(message.get("number"), "number")
    if not 0 <= number < len(pairs):
        raise ValueError(f"number must be below {plural(len(pairs), 'leak')}, got {number}")
    (leak,) = witnesses(design.task, pairs[number : number + 1], report.layers)
    return {"number": number, "witness": leak.witness, "route": leak.route}


def cost(design: Design, message: Message) -> Reply:
    """Computes the cost of attention under a layer's mask."""
    heads, head_dim, block = (
        as_integer(message.get(name, otherwise), name)
        for name, otherwise in (("num_heads", 1), ("head_dim", 64), ("block_size", 128))
    )
    result = design.layers[layer_of(design, message)].mask.cost(num_heads=heads, head_dim=head_dim, block_size=block)
    blocks = {**asdict(result.blocks), "total": result.blocks.total}
    return {"blocks": blocks, "skipped": result.skipped, "backends": result.rows()}


def code(design: Design) -> dict[str, object]:
    """Returns the code for attnflow and for FlexAttention."""
    lines = ["import attnflow as af", "from attnflow import masks", ""]
    names = [f"layer_{i}" for i in range(len(design.layers))] if design.stacked else ["mask"]
    for name, layer in zip(names, design.layers, strict=True):
        lines.append(f"{name} = {_expression(layer.spec)}")
        for allow, group in groupby(layer.strokes, key=lambda stroke: stroke.allow):
            sign = "| " if allow else "& ~"
            lines.append(f"{name} = {name} {sign}masks.from_edges({_pairs(list(group))}, {layer.mask.num_queries})")
    subject = f"[{', '.join(names)}]" if design.stacked else "mask"
    lines += [f"print(af.order.analyze({subject}))"]
    if design.labels:
        lines += _task(design, subject)
    flex = _FLEX.format(mask=names[0], size=design.size)
    return {"attnflow": "\n".join(lines) + "\n", "flex": flex}


def _pairs(strokes: Sequence[Stroke]) -> str:
    """Returns a code expression for the pairs (query, key) of rectangles."""
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
    kinds = {"next": f"[(i, i + 1) for i in range({n - 1})]", "own": f"[(i, i) for i in range({n})]"}
    labels = kinds.get(design.kind_of_labels or "", list(design.labels))
    return [
        "",
        made,
        f"tokens = [af.tasks.Token(i, i, sources.get(i)) for i in range({n})]",
        f"labels = [af.tasks.Label(position, af.tasks.Token(token, token)) for position, token in {labels}]",
        f"print(af.tasks.check(af.tasks.Task(tokens, labels, {subject})))",
    ]


QUESTIONS: Final[Mapping[str, Callable[[Design, Message], Reply]]] = {
    "catalogue": lambda _, __: catalogue(),
    "flow": lambda design, _: flow(design),
    "diagram": lambda design, _: diagram(design.flow.hasse, design.texts),
    "field": field,
    "leaks": lambda design, _: leaks(design),
    "witness": witness,
    "cost": cost,
    "code": lambda design, _: code(design),
}
