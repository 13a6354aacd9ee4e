"""The flow of an answer on a miniature: its value, its sum, and what taking out an edge does, by our own attention."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import attnflow as af
from attnflow.explain.explanation import Edge
from tests.conformance import inputs as made
from tests.conformance import oracles
from tests.conformance.miniature import NotBuilt, Wrong

ANSWER, AGAINST = 17, 19


def answer_explained(model: PreTrainedModel) -> str:
    """Sources sum to the value that the model itself gives, and a removed edge does what our own attention does."""
    if not made.is_text(model):
        raise NotBuilt("reads no text")
    inputs = made.text(model)
    model, dtype = oracles.precise(model, inputs)
    inputs = oracles.fitting(model, inputs)

    def value() -> float:
        with torch.no_grad():
            logits = model(**inputs).logits[0, -1]
        return float(logits[ANSWER] - logits[AGAINST])

    try:
        whole = value()
    except (AttributeError, IndexError, TypeError) as error:
        raise NotBuilt("has no logits of tokens") from error
    with af.explain.reading(model, inputs) as reading:
        found = reading.answer(ANSWER, AGAINST)
        close = {torch.float64: 1e-5, torch.float32: 1e-3}[dtype] * max(1.0, abs(whole))  # norms have float32 in them
        total = sum(source.carried for source in found.sources)
        if not abs(total - whole) <= close:
            raise Wrong(f"sources sum to {total:.6g}, and the logits differ by {whole:.6g}")
        if found.leaks and not getattr(model.config, "is_encoder_decoder", False):
            return f"{len(found.entries)} entries; a leak is named: {found.leaks[0].name}"
        tried = [next((e for e in found.edges if e.half == half), None) for half in ("", "cross")]
        calls = oracles.attention_calls(model, inputs)
        if len(set(calls)) < len(calls):  # layers that run again, which `_cut` cannot tell apart
            tried = []
        for edge in filter(None, tried):
            (lost,) = reading.remove([edge]).alone
            with _cut(model, edge):
                if not abs(whole - value() - lost) <= close:
                    raise Wrong(f"without {edge.name} the value falls by {whole - value():.6g}, not by {lost:.6g}")
    return f"{len(found.entries)} entries, {len(found.edges)} edges"


@contextmanager
def _cut(model: nn.Module, edge: Edge) -> Iterator[None]:
    """Attention functions of transformers in which one head of one layer gets nothing from one key."""
    numbers = {module: re.findall(r"\.(\d+)\.", f"{name}.") for name, module in model.named_modules()}
    names = {module: name for name, module in model.named_modules()}
    layers = {module: names[module] for module, found in numbers.items() if found and int(found[0]) == edge.layer}
    halves = getattr(model.config, "is_encoder_decoder", False)
    kept = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ("sdpa", "eager") if name in ALL_ATTENTION_FUNCTIONS}

    heads: dict[nn.Module, int] = {}
    firsts: dict[nn.Module, int] = {}

    def less(function: Any) -> Any:
        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            output, weights = function(module, query, key, value, *args, **kwargs)
            name = layers.get(module, "")
            cross = "cross" in name.lower() or "encdec" in name.lower() or "encoder_attn" in name
            encodes = "tower" in name or (halves and "encoder." in name and not name.startswith("decoder."))
            if not name or encodes or cross != (edge.half == "cross"):
                return output, weights
            first = sum(heads.values()) - heads.get(module, 0)  # heads of several attentions are numbered on
            heads[module] = query.shape[1]
            head = edge.head - (firsts.setdefault(module, first))
            if 0 <= head < query.shape[1] and edge.key < value.shape[2]:
                without = value.clone()
                without[:, :, edge.key] = 0
                other = function(module, query, key, without, *args, **kwargs)[0]
                output = output.clone()
                output[0, edge.query, head] = other[0, edge.query, head]
            return output, weights

        return attend

    files = {sys.modules[type(module).__module__] for module in layers}
    eager = "eager_attention_forward"  # is looked up in the file of the model
    with pytest.MonkeyPatch.context() as patch:
        for file in files:
            if hasattr(file, eager):
                patch.setattr(file, eager, less(getattr(file, eager)))
        try:
            for name, function in kept.items():
                ALL_ATTENTION_FUNCTIONS.register(name, less(function))
            yield
        finally:
            for name, function in kept.items():
                ALL_ATTENTION_FUNCTIONS.register(name, function)
