"""The arms of a comparison of biases, all with the same number of trained parameters within one per cent."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final, cast

import torch
from torch import nn

from attnflow._core.errors import MissingExtra
from attnflow.bias import GuidanceConfig, KeyConfig, LowRankConfig, attach, handle
from attnflow.bias.config import BiasConfig, Placement
from attnflow.bias.hf.layers import layers_of
from attnflow.bias.shape import LayerShape

TOLERANCE: Final = 0.01  # by how much the parameters of two arms may differ
_ADAPTED: Final = ("q_proj", "v_proj")  # of each attention layer, in the names of Llama and its many relatives


@dataclass(frozen=True)
class Arm:
    """Something to train beside a frozen base.

    Attributes:
        name: of the arm.
        parameters: how many it trains.
        bias: the bias, or None for LoRA.
        ranks: of LoRA on queries and on values, or None for a bias.
    """

    name: str
    parameters: int
    bias: BiasConfig | None = None
    ranks: tuple[int, int] | None = None

    def to_dict(self) -> dict[str, object]:
        """As JSON holds it."""
        bias = None if self.bias is None else self.bias.to_dict()
        return {"name": self.name, "parameters": self.parameters, "bias": bias, "lora_ranks": self.ranks}


def arms_of(model: nn.Module, hidden_dim: int = 64, layers: Placement = "every_other") -> dict[str, Arm]:
    """`guidance` with the given width, and `key`, `lowrank` and `lora` of its parameter count.

    `key` and `lowrank` sit on the same layers and share one map among the heads as `guidance` does; LoRA sits on the
    projections of queries and values of *every* layer, as it is mostly used.

    Raises:
        ValueError: a model so small that no width or rank gives the count within one per cent.
    """
    found = [layer.shape for layer in layers_of(model)]
    shapes = [found[index] for index in GuidanceConfig(layers=layers).layer_indices(len(found))]
    query, key = shapes[0].widths("unrotated")
    target = len(shapes) * ((query + key) * hidden_dim + 4 * hidden_dim + 1)
    width = round(target / (len(shapes) * (key + 4)))
    rank = round(target / (len(shapes) * (query + key)))
    made = {
        "guidance": Arm("guidance", target, GuidanceConfig(layers=layers, hidden_dim=hidden_dim)),
        "key": Arm("key", len(shapes) * (key + 4) * width, KeyConfig(layers=layers, hidden_dim=width)),
        "lowrank": Arm("lowrank", len(shapes) * (query + key) * rank, LowRankConfig(layers=layers, rank=rank)),
        "lora": _lora(found, target),
    }
    uneven = {arm.name: arm.parameters for arm in made.values() if abs(arm.parameters / target - 1) > TOLERANCE}
    if uneven:
        raise ValueError(f"no size gives {target:,} parameters within {TOLERANCE:.0%} for {uneven}: widen hidden_dim")
    return made


def _lora(shapes: list[LayerShape], target: int) -> Arm:
    """The ranks closest to each other whose count is right."""
    costs = (
        sum(shape.hidden_size + shape.num_heads * shape.head_dim for shape in shapes),
        sum(shape.hidden_size + shape.num_kv_heads * shape.head_dim for shape in shapes),
    )
    options: list[tuple[int, int, int, int]] = []
    for query in range(1, target // costs[0] + 1):
        value = max(1, round((target - query * costs[0]) / costs[1]))
        count = query * costs[0] + value * costs[1]
        if abs(count / target - 1) <= TOLERANCE:
            options.append((abs(query - value), count, query, value))
    if not options:
        return Arm("lora", costs[0] + costs[1], ranks=(1, 1))
    _, count, query, value = min(options)
    return Arm("lora", count, ranks=(query, value))


@contextmanager
def fitted(model: Any, arm: Arm, seed: int) -> Generator[Any]:
    """The model with an arm, freshly initialised from a seed, everything else frozen; restored afterwards.

    Yields:
        The model to train: the one given or, for LoRA, its wrapper.

    Raises:
        MissingExtra: peft is not installed and the arm is LoRA.
    """
    trained = [parameter.requires_grad for parameter in model.parameters()]
    torch.manual_seed(seed)
    wrapped: Any = None
    if arm.bias is not None:
        attach(model, arm.bias, train="guidance")
    else:
        wrapped = _adapted(model, cast(tuple[int, int], arm.ranks))
    try:
        yield model if wrapped is None else wrapped
    finally:
        if wrapped is None:
            handle(model).remove()
        else:
            wrapped.unload()
        for parameter, flag in zip(model.parameters(), trained, strict=True):
            parameter.requires_grad_(flag)


def _adapted(model: Any, ranks: tuple[int, int]) -> Any:
    if find_spec("peft") is None:
        raise MissingExtra("peft", "study", "the arm LoRA")
    import peft

    pattern: Mapping[str, int] = dict(zip(_ADAPTED, ranks, strict=True))
    config: Any = peft.LoraConfig(
        target_modules=list(_ADAPTED),
        rank_pattern=pattern,
        alpha_pattern=pattern,  # alpha = rank: the product enters with factor 1
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config)


def count_trained(model: nn.Module) -> int:
    """Parameters that are trained."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
