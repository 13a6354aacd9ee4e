"""A sample of every kind of result: made by a verb if its fields belong together, else by their types."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import attnflow as af
from attnflow._core.results import Result
from attnflow.audit.measurement import MeasuredOrder
from attnflow.bias.graph import BiasEdge, BiasGraph
from attnflow.explain.explanation import Link, Source, SourceGraph
from attnflow.geometry.pairs import PairScores
from attnflow.masks import Mask
from attnflow.masks.in_model import LayerMask, ModelMasks

LENGTH = 4  # of every axis


def sample(kind: type[Result]) -> Any:
    """A result of this kind.

    Raises:
        TypeError: a field of a type that no sample can be made of; give the kind a maker in `MAKERS`.
    """
    return MAKERS[kind.__name__]() if kind.__name__ in MAKERS else _dataclass(kind)


def _dataclass(kind: type) -> Any:
    hints = typing.get_type_hints(kind, include_extras=True)
    return kind(**{field.name: _value(hints[field.name]) for field in dataclasses.fields(kind) if field.init})


def _value(hint: Any) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in PLAIN:
        return PLAIN[hint]
    if origin is typing.Literal:
        return inner[0]
    if origin in (typing.Union, types.UnionType):
        return _value(next(option for option in inner if option is not type(None)))
    if origin is tuple:
        return (_value(inner[0]),) * 2 if inner[-1] is ... else tuple(map(_value, inner))
    if origin is list:
        return [_value(inner[0])] * 2
    if isinstance(origin, type) and issubclass(origin, typing.Mapping):  # type: ignore[arg-type]
        return {_value(inner[0]): _value(inner[1])}
    if hasattr(hint, "array_type"):  # of jaxtyping
        return torch.ones([LENGTH] * len(hint.dims), dtype=getattr(torch, DTYPES[hint.__name__.split("[")[0]]))
    if dataclasses.is_dataclass(hint):
        return sample(hint) if issubclass(hint, Result) else _dataclass(hint)  # type: ignore[arg-type, type-var]
    raise TypeError(f"no sample of {hint}: give the result a maker in tests/results_samples.py")


def _tiny_trace() -> Any:
    from tests.models import tiny

    model = af.knowledge.from_ffn(tiny("Llama", torch.float32))
    return af.knowledge.trace(model, [5, 6, 7], answer=9)


def _tiny_entry() -> Any:
    from tests.models import tiny

    return af.knowledge.entry(af.knowledge.from_ffn(tiny("Llama", torch.float32)), 3)


def _tiny_map(read: Callable[[Any], Any]) -> Any:
    from tests.models import tiny

    model = tiny("Llama", torch.float32)
    af.bias.attach(model, af.bias.GuidanceConfig(layers="every", hidden_dim=8, init="kaiming"))
    return read(af.bias.capture(model, torch.tensor([[5, 6, 7, 8]])))


def _tiny_attribution() -> Any:
    from tests.models import tiny

    return af.geometry.attribute(tiny("Llama", torch.float32), [5, 6, 7], layer=1, head=1)


def _tiny_explanation() -> Any:
    from tests.models import tiny

    return af.explain.answer(tiny("Llama", torch.float32), [5, 6, 7, 8], answer=3, against=4)


PLAIN: dict[Any, Any] = {
    int: 3,
    float: 0.25,
    str: "name",
    bool: True,
    object: 1,
    Any: 1.5,
    Path: Path("folder"),
    Mask: af.masks.causal(LENGTH),
}
DTYPES = {"Float": "float32", "Float32": "float32", "Float64": "float64", "Bool": "bool", "Int": "int64"}
MAKERS: dict[str, Callable[[], Any]] = {
    "Decoder": lambda: af.tasks.decoder(af.tasks.causal_lm([5] * LENGTH)),
    "Flow": lambda: af.order.analyze([af.masks.causal(LENGTH)] * 2),
    "MeasuredOrder": lambda: MeasuredOrder(
        "Model", 5, {"input_ids": [[1, 2]]}, (MAKERS["Flow"](),), "sdpa", {"torch": "2"}
    ),
    "Hasse": lambda: af.order.analyze(af.masks.butterfly(LENGTH)).hasse,
    "LeakReport": lambda: af.tasks.check(af.tasks.merge(af.tasks.causal_lm([5] * LENGTH))),
    "BiasGraph": lambda: BiasGraph(("a", "b"), (BiasEdge(0, 1, 0.5),), "2 layers"),
    "QueryBias": lambda: _tiny_map(lambda bias_map: bias_map.at(3)),
    "Trace": _tiny_trace,
    "EntryReport": _tiny_entry,
    "ScoreAttribution": _tiny_attribution,
    "PairScores": lambda: PairScores("Model", 0, 0, ("a", "b", "c"), *torch.randn(2, 3, 3), torch.ones(3, 3) > 0),
    "FlashMask": lambda: af.masks.export.flashmask(af.masks.longformer(9, 2)),
    "MagiRanges": lambda: af.masks.export.magi(af.masks.prefix_lm(LENGTH, 2)),
    "Varlen": lambda: af.masks.export.varlen(af.masks.document([2, 1])),
    "Explanation": _tiny_explanation,
    "SourceGraph": lambda: SourceGraph(
        (Source("token", None, 0, "", None, 0.5, 0.4, text="a"), Source("entry", 1, 1, "", 7, -0.2, 0.1)),
        (Link(0, 1, 0.3),),
    ),
    "BiasMap": lambda: _tiny_map(lambda bias_map: bias_map),
    "ModelMasks": lambda: ModelMasks("Model", ("a", "b"), (), (LayerMask(af.masks.causal(2), (0, 1)),), ("mixer",)),
    "LayerMap": lambda: _tiny_map(lambda bias_map: bias_map.layers[0]),
}
