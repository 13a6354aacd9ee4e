"""What modules of a model read at the tokens of many texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from attnflow.knowledge.editing.edit_targets import run
from attnflow.knowledge.layered import model_layers
from attnflow.models.passes.watching import calls_of
from attnflow.models.subject import Subject

_TOKENS: Final = 512  # of texts that share a pass, with padding


def inputs_everywhere(
    subject: Subject, modules: Mapping[Any, nn.Module], texts: Sequence[Sequence[int]]
) -> dict[Any, Tensor]:
    """Compute what modules read at all tokens of some texts, [tokens, width], in float64; {} without texts.

    The input of a layer's values are the weights of its entries. Raises ValueError if a module runs twice in a pass.
    """
    parts: dict[Any, list[Tensor]] = {}
    for some in _batches(texts):
        there = torch.arange(max(map(len, some))) < torch.tensor([[len(ids)] for ids in some])
        for call in calls_of(modules, lambda some=some: run(subject, some, **subject.sparing)):
            if call.number:
                reader = call.name[0] if isinstance(call.name, tuple) else call.name
                layer = model_layers(subject.model)[reader]
                raise ValueError(f"layer {layer} runs twice in a pass: name layers that run once in layers=...")
            parts.setdefault(call.name, []).append(call.first.flatten(0, -2).cpu()[there.flatten()].double())
    return {name: torch.cat(inputs) for name, inputs in parts.items()}


def _batches(texts: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
    start = 0
    for end in range(1, len(texts) + 1):
        if end == len(texts) or max(map(len, texts[start : end + 1])) * (end + 1 - start) > _TOKENS:
            yield texts[start:end]
            start = end
