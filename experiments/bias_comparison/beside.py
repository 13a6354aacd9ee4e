"""Rivals of a bias: wider feed-forward layers and a gate on the output of attention, added to a model by hooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

# Layer types by the names of four of their modules: inputs and outputs of the feed-forward and of the attention layer.
_NAMES: Final[Mapping[bool, tuple[str, str, str, str]]] = {
    True: ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.o_proj"),
    False: ("intermediate.dense", "output.dense", "attention.self.query", "attention.output.dense"),
}
_GAIN: Final = 2.0  # times sigmoid(0) is 1


@dataclass(frozen=True, eq=False)
class Block:
    module: nn.Module  # the whole layer, which holds what is added
    gated: bool  # whether its feed-forward units multiply two projections
    widen: tuple[nn.Linear, nn.Linear]  # (what reads, what writes) of the feed-forward layer
    attention: tuple[nn.Linear, nn.Linear]  # (what reads, what writes) of the attention layer

    @property
    def unit(self) -> int:
        reads, writes = self.widen
        return (1 + self.gated) * reads.in_features + writes.out_features


def blocks_of(model: nn.Module) -> list[Block]:
    """The layers of a Llama or BERT model, or of a relative that names its parts likewise."""
    blocks: list[Block] = []
    for module in model.modules():
        for gated, names in _NAMES.items():
            parts = [_part(module, name) for name in names]
            if all(isinstance(part, nn.Linear) for part in parts):
                found = cast("list[nn.Linear]", parts)
                blocks.append(Block(module, gated, (found[0], found[1]), (found[2], found[3])))
    if not blocks:
        raise ValueError(f"{type(model).__name__} names the parts of its layers neither as Llama nor as BERT does")
    return blocks


class _Beside(nn.Module):
    """Reads the input of one module and changes the output, or the input, of a later one."""

    name: str

    def __init__(self) -> None:
        super().__init__()
        self._read = torch.empty(0)
        self._hooks: list[Any] = []
        self._block: list[Block] = []  # in a list, so that the layer is no child of its child

    def install(self, block: Block, reads: nn.Module) -> None:
        block.module.add_module(self.name, self)
        self.to(reads.weight.device, reads.weight.dtype)  # pyright: ignore[reportArgumentType, reportCallIssue]
        self._hooks.append(reads.register_forward_pre_hook(self._look))
        self._block.append(block)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        delattr(self._block.pop().module, self.name)

    def _look(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        del module
        self._read = inputs[0]


class Units(_Beside):
    """More units of a feed-forward layer, whose outputs start at zero: Dense+ (daa, sec. 5.5.3)."""

    name = "more_units"

    def __init__(self, inputs: int, units: int, outputs: int, gated: bool) -> None:
        super().__init__()
        self.up = nn.Linear(inputs, units, bias=False)
        self.gate = nn.Linear(inputs, units, bias=False) if gated else None
        self.down = nn.Linear(units, outputs, bias=False)
        nn.init.zeros_(self.down.weight)

    @classmethod
    def beside(cls, block: Block, units: int) -> Units:
        reads, writes = block.widen
        made = cls(reads.in_features, units, writes.out_features, block.gated)
        made.install(block, reads)
        made._hooks.append(writes.register_forward_hook(made._add))
        return made

    def _add(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        del module, inputs
        read = self._read.to(self.up.weight.dtype)
        inner = self.up(read)
        inner = functional.gelu(inner) if self.gate is None else functional.silu(self.gate(read)) * inner
        return output + self.down(inner).to(output.dtype)


class Gate(_Beside):
    """What heads put out, times 2 sigmoid(U V x) of the layer's input x, by element: Qwen's gate, at a low rank."""

    name = "output_gate"

    def __init__(self, inputs: int, rank: int, outputs: int) -> None:
        super().__init__()
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    @classmethod
    def beside(cls, block: Block, rank: int) -> Gate:
        reads, writes = block.attention
        made = cls(reads.in_features, rank, writes.in_features)
        made.install(block, reads)
        made._hooks.append(writes.register_forward_pre_hook(made._scale))
        return made

    def _scale(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        del module
        gate = _GAIN * self.up(self.down(self._read.to(self.up.weight.dtype))).sigmoid()
        return (inputs[0] * gate.to(inputs[0].dtype), *inputs[1:])


def _part(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None
