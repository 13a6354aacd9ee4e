"""The arms of a comparison: all add the same number of parameters to a model, within two per cent."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any, Final, Literal, cast

import torch
from torch import nn

from attnflow._core.errors import MissingExtra
from attnflow.bias import (
    AlibiConfig,
    BilinearConfig,
    CumulativeConfig,
    DotConfig,
    GuidanceConfig,
    KeyConfig,
    LowRankConfig,
    attach,
)
from attnflow.bias.config import BiasConfig, LayerShape, Placement
from attnflow.bias.hf.layers import layers_of
from attnflow.models.subject import Subject
from experiments.bias_comparison.beside import Gate, Units, blocks_of

Trained = Literal["all", "additions"]

TOLERANCE: Final = 0.02  # by how much the parameters of two arms may differ
_ADAPTED: Final = ("q_proj", "v_proj")  # by LoRA, in each attention layer, in the names of Llama and its relatives

# Of Table 3 and Fig. 5, and sec. 3.2: what each changes of `guidance`. They are of unequal size, on purpose.
KNOBS: Final[Mapping[str, Mapping[str, Any]]] = {
    "width 16": {"hidden_dim": 16},
    "width 32": {"hidden_dim": 32},
    "width 64": {},
    "width 128": {"hidden_dim": 128},
    "every layer": {"layers": "every"},
    "every fourth": {"layers": "every_fourth"},
    "by head": {"reference": "per_head", "share_heads": False},
    "He init": {"init": "kaiming"},
}


@dataclass(frozen=True)
class Arm:
    name: str  # of the arm
    parameters: int  # how many it adds
    bias: BiasConfig | None = None  # the bias, if it is one
    ranks: tuple[int, int] | None = None  # of LoRA on queries and on values
    gate: int = 0  # rank of a gate on the output of attention, in each layer
    # of wider feed-forward layers, in each layer: all of Dense+, and what others lack to their count
    units: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "bias": None if self.bias is None else self.bias.to_dict()}


def arm_of(model: nn.Module, name: str, hidden_dim: int = 64, layers: Placement = "every_other") -> Arm:
    """An arm with as many parameters as `guidance` of a width has; "plain" adds none, and knobs add what they do.

    `key` and `lowrank` sit on the same layers and share one map among the heads as `guidance` does. ALiBi, the gate and
    forget gates get what they lack in wider feed-forward layers. LoRA sits on the projections of queries and values.
    """
    shapes = [layer.shape for layer in layers_of(Subject.of(model))]
    guidance = GuidanceConfig(layers=layers, hidden_dim=hidden_dim)
    target = _size(guidance, shapes)
    count = len(guidance.layer_indices(len(shapes)))
    query, key = shapes[0].widths("unrotated")
    made = Arm(name, 0)
    if name in KNOBS:
        made = replace(made, bias=replace(guidance, **KNOBS[name]))
        return replace(made, parameters=_size(cast(BiasConfig, made.bias), shapes))
    if name in ("bilinear", "dot"):
        config = BilinearConfig(layers=layers) if name == "bilinear" else DotConfig(layers=layers)
        return Arm(name, _size(config, shapes), config)
    if name == "plain":
        return made
    biases: Mapping[str, BiasConfig] = {
        "guidance": guidance,
        "key": KeyConfig(layers=layers, hidden_dim=max(1, round(target / (count * (key + 4))))),
        "lowrank": LowRankConfig(layers=layers, rank=max(1, round(target / (count * (query + key))))),
        "cumulative": CumulativeConfig(layers="every"),
        "alibi": AlibiConfig(),
    }
    if name in biases:
        made = Arm(name, _size(biases[name], shapes), biases[name])
    elif name == "lora":
        made = _lora(shapes, target)
    elif name not in ("gate", "dense"):
        raise ValueError(f"no arm {name!r}")
    if name in ("dense", "alibi", "cumulative", "gate"):
        made = _filled(model, made, shapes, target)
    if abs(made.parameters / target - 1) > TOLERANCE:
        raise ValueError(
            f"no size gives {target:,} parameters within {TOLERANCE:.0%} for {name}, {made.parameters:,} are "
            "closest: widen hidden_dim"
        )
    return made


@contextmanager
def fitted(model: Any, arm: Arm, seed: int, trained: Trained = "additions", backend: str = "auto") -> Generator[Any]:
    """The model with an arm, freshly initialised from a seed; afterwards the model is unchanged.

    Every arm but ALiBi and He's initialisation begins as the model itself, exactly.

    Args:
        model: of transformers.
        arm: made by `arm_of` for this model.
        seed: of what is added.
        trained: "additions" freezes the model itself. What is trained is float32 at least, from then on.
        backend: that computes attention with a bias; see `attach`.

    Yields:
        The model to train: the one given or, for LoRA, its wrapper.
    """
    flags = {parameter: parameter.requires_grad for parameter in model.parameters()}
    torch.manual_seed(seed)
    with ExitStack() as stack:
        wrapped = model
        if trained == "additions":
            model.requires_grad_(False)
        if arm.bias is not None:
            stack.callback(attach(model, arm.bias, backend=backend).remove)
        if arm.ranks is not None:
            wrapped = _adapted(model, arm.ranks)
            stack.callback(lambda: wrapped.unload())
        for index, block in enumerate(blocks_of(model) if arm.gate or any(arm.units) else []):
            if arm.gate:
                stack.callback(Gate.beside(block, arm.gate).remove)
            if arm.units[index]:
                stack.callback(Units.beside(block, arm.units[index]).remove)
        for parameter in wrapped.parameters():  # bfloat16 would lose every update below 0.4 % of a weight
            if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()
        try:
            yield wrapped
        finally:
            stack.close()
            for parameter, flag in flags.items():
                parameter.requires_grad_(flag)


def count_trained(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _size(config: BiasConfig, shapes: Sequence[LayerShape]) -> int:
    with torch.device("meta"):
        modules = [config.module(shapes[index]) for index in config.layer_indices(len(shapes))]
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _filled(model: nn.Module, arm: Arm, shapes: Sequence[LayerShape], target: int) -> Arm:
    """An arm with feed-forward units for what it lacks; a gate has the largest rank that leaves a fitting rest."""
    unit = blocks_of(model)[0].unit
    cost = sum(shape.hidden_size + shape.num_heads * shape.head_dim for shape in shapes)
    options: list[tuple[bool, float, int, int]] = []
    for rank in range(1, target // cost + 1) if arm.name == "gate" else [0]:
        units = max(0, round((target - arm.parameters - rank * cost) / unit))
        off = abs((arm.parameters + rank * cost + units * unit) / target - 1)
        near = off <= TOLERANCE / 2
        options.append((not near, -rank if near else off, rank, units))
    *_, rank, units = min(options) if options else (False, 0.0, 1, 0)
    shared = tuple(units // len(shapes) + (index < units % len(shapes)) for index in range(len(shapes)))
    return replace(arm, gate=rank, units=shared, parameters=arm.parameters + rank * cost + units * unit)


def _lora(shapes: Sequence[LayerShape], target: int) -> Arm:
    """The ranks closest to each other whose count is right, or the closest count."""
    costs = (
        sum(shape.hidden_size + shape.num_heads * shape.head_dim for shape in shapes),
        sum(shape.hidden_size + shape.num_kv_heads * shape.head_dim for shape in shapes),
    )
    options: list[tuple[bool, float, int, int, int]] = []
    for query in range(1, target // costs[0] + 1):
        value = max(1, round((target - query * costs[0]) / costs[1]))
        count = query * costs[0] + value * costs[1]
        off = abs(count / target - 1)
        near = off <= TOLERANCE / 2
        options.append((not near, abs(query - value) if near else off, count, query, value))
    if not options:
        return Arm("lora", sum(costs), ranks=(1, 1))
    *_, count, query, value = min(options)
    return Arm("lora", count, ranks=(query, value))


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
