"""The operations that change a design: structured data in, the next design out; nothing is evaluated as code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, cast

from attnflow._core.parameters import find
from attnflow._core.plain import as_integer, as_list, as_object, as_text, parse_json
from attnflow.masks.spec import named_masks
from attnflow.report.live.design import MAX_LAYERS, Design, Layer, Spec, labels_of, stroke_of, tokens_of
from attnflow.tasks.task import Task

Message = Mapping[str, object]
Outcome = tuple[Design, list[str]]


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
