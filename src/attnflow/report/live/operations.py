"""The operations of a page: actions, which give the next design, and questions about one; all of it plain data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Final, cast

import numpy as np

from attnflow._core.markup import plural, runs
from attnflow._core.parameters import find
from attnflow._core.plain import as_integer, as_list, as_object, as_text, parse_json
from attnflow.masks.registry import named_masks
from attnflow.report.hasse_svg import MAX_POINTED, diagram, runs_of
from attnflow.report.live.design import MAX_LAYERS, Design, MaskLayer, Spec, Stroke, labels_of, stroke_of, tokens_of
from attnflow.report.live.tiles import tile, window_of
from attnflow.tasks.leaks import witnesses
from attnflow.tasks.task import Task

Message = Mapping[str, object]
Outcome = tuple[Design, list[str]]
Reply = dict[str, object]
_LISTED: Final = 100  # leaks
_WALKED: Final = 1 << 14  # positions that are walked through to show the ways of leaks before they are asked for
_MAX_ARRIVALS: Final = 256  # layers that a receptive field is followed at once
_MAX_FOLLOWED: Final = 1 << 27  # positions times layers that it is followed when a page asks for more: about a second
_MAX_LITERAL: Final = 4000  # characters of a mask that is written into the code
_FLEX = """\
import torch
from torch.nn.attention.flex_attention import flex_attention

block_mask = {mask}.block_mask(block_size=128, device="cuda")
attend = torch.compile(flex_attention, dynamic=False)
out = attend(query, key, value, block_mask=block_mask)  # [batch, heads, {size}, head_dim] each
"""


def chosen(message: Message, size: int) -> Spec:
    name = _text(message, "name")
    entry = find(name, named_masks(), "mask")
    settings = as_object(message.get("settings", {}), "settings")
    texts = {key: _text(settings, key) for key in settings}
    values = entry.read({key: text for key, text in texts.items() if text.strip()})
    if "n" not in values and any(parameter.name == "n" for parameter in entry.parameters):
        values["n"] = size
    entry.require(values)
    return {"name": name, "parameters": values}


def preview(design: Design, message: Message) -> Reply:
    """Compares a layer's mask with one of the catalogue, over the "tile" window if both have as many positions."""
    here, size = design.layers[layer_of(design, message)].mask, design.size
    layer = MaskLayer.of(chosen(message, size)) if "settings" in message else _begun(_text(message, "name"), size)
    settings = typed(cast("Mapping[str, object]", layer.spec["parameters"]))
    mask, n = layer.mask, layer.mask.num_queries
    reply: Reply = {"name": layer.spec["name"], "settings": settings, "title": layer.title, "size": n}
    if n != size:
        cells = n if n <= 1024 else 512  # every pair where a screen has pixels for them
        return {**reply, "tile": tile(mask, None, 0, 0, n, cells), "pairs": layer.pairs}
    both = (here & mask).nnz
    sizes = window_of(as_object(message.get("tile"), "tile"))
    return {**reply, "tile": tile(mask, here, *sizes), "both": both, "here": here.nnz - both, "chosen": mask.nnz - both}


def typed(values: Mapping[str, object]) -> dict[str, str]:
    return {
        name: ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value).lower()
        for name, value in values.items()
    }


def _begun(name: str, size: int) -> MaskLayer:
    typed = find(name, named_masks(), "mask").example
    block, large = (max(d for d in range(1, most + 1) if size % d == 0) for most in (4, max(2, size // 16)))
    fitting: Mapping[str, Mapping[str, str]] = {
        "big_bird": {"block": str(large)},
        "block_causal": {"block": str(block)},
        "document": {"lengths": f"{size - size // 2},{size // 2}" if size > 1 else "1"},
        "global_tokens": {"indices": "0,8" if size > 8 else "0"},
        "prefix_lm": {"prefix": str(min(6, size))},
        "tree": {"parents": ",".join(str((i - 1) // 2) for i in range(min(size, 64)))},
    }
    example = {key: text for key, text in typed.items() if key != "n"}
    try:
        return MaskLayer.of(chosen({"name": name, "settings": {**example, **fitting.get(name, {})}}, size))
    except ValueError:  # a butterfly of so many tokens, for one, has more positions than a design
        return MaskLayer.of(chosen({"name": name, "settings": typed}, size))


def pick(design: Design, message: Message) -> Outcome:
    return design.with_layer(layer_of(design, message), MaskLayer.of(chosen(message, design.size)))


def combine(design: Design, message: Message) -> Outcome:
    number, sign = layer_of(design, message), _text(message, "sign")
    if sign not in ("and", "or"):
        raise ValueError(f"sign must be and or or, got {sign!r}")
    here, other = design.layers[number], MaskLayer.of(chosen(message, design.size))
    if (size := other.mask.num_queries) != design.size:
        raise ValueError(f"masks that are combined have as many positions: expected {design.size}, got {size}")
    base = here.baked()
    parts = cast("list[object]", base[sign]) if sign in base else [base]
    return design.with_layer(number, MaskLayer.of({sign: [*parts, other.spec]}))


def invert(design: Design, message: Message) -> Outcome:
    number = layer_of(design, message)
    base = design.layers[number].baked()
    return design.with_layer(number, MaskLayer.of(base.get("not", {"not": base})))


def paint(design: Design, message: Message) -> Outcome:
    number = layer_of(design, message)
    strokes = as_list(message.get("strokes"), "strokes")
    drawn = [stroke_of(each, design.size, f"strokes[{i}]") for i, each in enumerate(strokes)]
    if not drawn:
        raise ValueError("expected at least one stroke")
    return design.with_layer(number, design.layers[number].painted(drawn))


def stack(design: Design, message: Message) -> Outcome:
    number = layer_of(design, message)
    if len(design.layers) >= MAX_LAYERS:
        raise ValueError(f"a stack has at most {MAX_LAYERS} layers")
    layers = (*design.layers[: number + 1], design.layers[number], *design.layers[number + 1 :])
    return replace(design, layers=layers, stacked=True), []


def unstack(design: Design, message: Message) -> Outcome:
    number = layer_of(design, message)
    if len(design.layers) == 1:
        raise ValueError("the only mask of a design cannot be removed")
    layers = tuple(each for i, each in enumerate(design.layers) if i != number)
    return replace(design, layers=layers, stacked=len(layers) > 1), []


def label(design: Design, message: Message) -> Outcome:
    pair = (_position(design, message, "position"), _position(design, message, "token"))
    rest = tuple(each for each in design.labels if each != pair)
    return replace(design, labels=rest if len(rest) < len(design.labels) else (*rest, pair)), []


def labels(design: Design, message: Message) -> Outcome:
    return replace(design, labels=labels_of(_text(message, "kind"), design.size)), []


def source(design: Design, message: Message) -> Outcome:
    position = _position(design, message, "position")
    tokens = [as_integer(each, "tokens") for each in as_list(message.get("tokens"), "tokens")]
    sources = {i: made for i, made in design.sources.items() if i != position}
    if tokens != [position]:
        sources[position] = tuple(sorted({_bounded(each, design.size, "tokens") for each in tokens}))
    return replace(design, sources=sources), []


def tokens(design: Design, message: Message) -> Outcome:
    words = _text(message, "text").split()
    extra = len(words) - design.size
    notices = [f"{plural(extra, 'word')} {'does' if extra == 1 else 'do'} not fit"] if extra > 0 else []
    return replace(design, tokens=tokens_of(words, design.size, "tokens")), notices


def load(_: Design, message: Message) -> Outcome:
    text = _text(message, "text")
    return design_of(parse_json(text, "the file")), []


def restore(_: Design, message: Message) -> Outcome:
    return Design.from_dict(message.get("design")), []


def design_of(values: Mapping[str, object], where: str = "the file") -> Design:
    if "layers" in values:
        return Design.from_dict(values, where)
    if "inputs" in values:
        return Design.of_task(Task.from_dict(values, where))
    return Design((MaskLayer.of(values.get("mask", values), where=where),))


ACTIONS: Final[Mapping[str, Callable[[Design, Message], Outcome]]] = {
    function.__name__: function
    for function in (*(pick, combine, invert, paint, stack, unstack), *(label, labels, source, tokens, load, restore))
}


def layer_of(design: Design, message: Message) -> int:
    return _bounded(as_integer(message.get("layer", 0), "layer"), len(design.layers), "layer")


def _position(design: Design, message: Message, name: str) -> int:
    return _bounded(as_integer(message.get(name), name), design.size, name)


def _bounded(value: int, size: int, name: str) -> int:
    if not 0 <= value < size:
        raise ValueError(f"{name} must lie in [0, {size}), got {value}")
    return value


def _text(values: Mapping[str, object], name: str) -> str:
    return as_text(values.get(name), name)


def catalogue() -> Reply:
    masks = [
        {"name": entry.name, "relation": entry.summary, "parameters": [asdict(each) for each in entry.parameters]}
        for entry in named_masks().values()
    ]
    return {"masks": masks}


def flow(design: Design) -> Reply:
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
        "followed": _followed(design),
    }


def _followed(design: Design) -> int:
    return max(_MAX_ARRIVALS, _MAX_FOLLOWED // design.size)


def field(design: Design, message: Message) -> Reply:
    """Returns after how many layers each position's information first reaches the given one."""
    position = as_integer(message.get("position"), "position")
    followed = max(_MAX_ARRIVALS, min(as_integer(message.get("layers", 0), "layers"), _followed(design)))
    first = design.flow.arrivals(position, followed)
    return {"position": position, "runs": runs_of(first.tolist()), "followed": followed}


def leaks(design: Design) -> Reply:
    if not design.labels:
        return {"labels": 0, "leaks": [], "total": 0, "dead": [], "num_dead": 0, "dead_text": ""}
    report, pairs = design.survey
    targets = design.task.targets
    columns = [targets.table[name][pairs[:_LISTED, 0]] for name in ("position", "data_index")]
    leaks: list[Reply] = [
        {"position": position, "token": token, "carrier": carrier}
        for position, token, carrier in np.stack([*columns, pairs[:_LISTED, 1]], axis=1).tolist()
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
    report, pairs = design.survey
    number = as_integer(message.get("number"), "number")
    if not 0 <= number < len(pairs):
        raise ValueError(f"number must be below {plural(len(pairs), 'leak')}, got {number}")
    (leak,) = witnesses(design.task, pairs[number : number + 1], report.layers)
    return {"number": number, "witness": leak.witness, "route": leak.route}


def blocks(design: Design, message: Message) -> Reply:
    sparsity = design.layers[layer_of(design, message)].mask.block_sparsity()
    return {**asdict(sparsity), "total": sparsity.total, "skipped": sparsity.skipped}


def code(design: Design) -> dict[str, object]:
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
        return f"masks.from_json({text!r})"
    return 'masks.from_json(open("mask.json").read())  # the file that the studio saves'


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
    "preview": preview,
    "flow": lambda design, _: flow(design),
    "diagram": lambda design, _: diagram(design.flow.hasse, design.texts),
    "field": field,
    "leaks": lambda design, _: leaks(design),
    "witness": witness,
    "blocks": blocks,
    "code": lambda design, _: code(design),
}
