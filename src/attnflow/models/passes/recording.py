"""Records one forward pass: what each sublayer added to the stream, and what an attention module read of it.

A sublayer is found by what it does, not by its name. The input of the first layer is marked for automatic
differentiation, and the mark ends at every module that owns a matrix and at every attention. The outermost modules
whose outputs bear no mark carry no residual path: they are the sublayers.

Inside the attention module that the pass is for, marks begin anew at the outputs of its matrices, and norms are held.
Its queries and keys are then linear in those outputs, as far as automatic differentiation is concerned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from attnflow._core.markup import part_name
from attnflow.models.passes.reads import ModuleCall, Reads, hold, may_be_norm
from attnflow.models.passes.watching import Arguments, Call, handed_again, hidden_of, mapped, tensors_in, with_hidden

Keep = Callable[[Tensor], object]
LARGE: Final = 4096.0  # tokens, beyond which the outputs of sublayers are not kept


@dataclass(eq=False)
class Component:
    """One summand of the residual stream: the input of the first layer, or the output of one call of a sublayer."""

    path: str  # of the module
    number: int  # of its call
    value: Tensor | None  # None for an output that is not of the stream's shape, and where a `keep` has it
    output: Any  # everything that the module returned
    kept: Any = None  # what `keep` made of the value


@dataclass(frozen=True)
class ComponentName:
    """One summand of the residual stream: its layer, kind and module; `str` gives a title that is unique in a result.

    Attributes:
        layer: number of the layer that wrote it; None for the input of the first layer.
        kind: "embedding", "attention", "cross-attention", "feed-forward", or "mixer" (a recurrence or convolution).
        path: of the module in the model.
        half: "encoder" for what an encoder wrote, where a decoder attends to it; else "".
        which: tells apart several of one kind in one layer.
    """

    layer: int | None
    kind: str
    path: str
    half: str = ""
    which: str = ""

    @property
    def place(self) -> str:
        """The layer alone, such as "L7", for maps that sum each layer; "embedding" has no layer."""
        return " ".join(filter(None, (self.half, self.kind if self.layer is None else f"L{self.layer}")))

    @property
    def brief(self) -> str:
        """The title where a figure has no room, such as "L7 attention"."""
        return self._titled(brief=True)

    def __str__(self) -> str:
        return self._titled(brief=False)

    def _titled(self, brief: bool) -> str:
        kind, which = self.kind, f" ({self.which})" if self.which else ""
        if self.layer is None:
            return f"{self.half} {kind}{which}".strip()
        return part_name(self.layer, kind, half=self.half, brief=brief) + which


class Recorder:
    """Ends the marks at matrices and attention, and keeps the outputs of the outermost modules without a mark.

    `layers` and `modules` are those of the `lists`, by path; `target` is the attention that the pass is for. With a
    `keep`, outputs are handed to it and dropped. Without one they are dropped in a pass of more than `limit` tokens.
    """

    def __init__(
        self,
        lists: Mapping[str, str],
        layers: Mapping[str, nn.Module],
        modules: Mapping[str, nn.Module],
        attention: set[nn.Module],
        target: nn.Module,
        keep: Keep | None = None,
        limit: float = LARGE,
    ) -> None:
        self._lists, self._target, self._keep, self._limit = lists, target, keep, limit
        self._layers = {layer: path for path, layer in layers.items()}
        self._ends = {
            module
            for module in modules.values()
            if module in attention
            or (owns_matrix(module) and module not in self._layers and not attention & set(module.modules()))
        }
        self._matrices = {module for module in target.modules() if module in self._ends and module not in attention}
        self._holds = {m for m in modules.values() if any(owns_matrix(part) for part in m.modules())}
        around = next((layer for layer in self._layers if target in set(layer.modules())), target)
        self._near = {module for module in around.modules() if may_be_norm(module) and module not in self._ends}
        self._begun: dict[int, int] = {}  # how many components there were when a call began
        self._marked: dict[str, tuple[Tensor, Tensor]] = {}  # the input of each list's first layer, without and with
        self.components: list[Component] = []  # those outside of the target
        self.reads = Reads()

    @property
    def dropped(self) -> bool:
        """Whether values were dropped because the pass is large."""
        lengths = [hidden.shape[-2:-1].numel() for hidden, _ in self._marked.values()]
        return self._keep is None and any(length > self._limit for length in lengths)

    def enter(self, call: Call) -> Arguments | None:
        if call.module is self._target:
            return None
        self._begun[id(call)] = len(self.components)
        prefix = str(call.name).rpartition(".")[0]
        if call.module not in self._layers or prefix not in self._lists:
            return None
        if prefix in self._marked:
            return handed_again(call, *self._marked[prefix])
        hidden = hidden_of(call).detach()
        self._marked[prefix] = hidden, hidden.detach().requires_grad_().clone()
        self._add(str(call.name), -1, hidden, None)
        return with_hidden(call, self._marked[prefix][1])

    def leave(self, call: Call, output: object) -> object:
        path, begun = str(call.name), self._begun.pop(id(call), None)
        if begun is not None and _lies_in(call, self._target):
            return self._inside(call, output)
        ends = call.module in self._ends
        ended = mapped(output, lambda t: t.detach()) if ends else output
        changed = ended if ends else None
        if begun is None or call.module not in self._holds:
            if call.module in self._near:
                self._note(self.reads.small, call, output)
            return changed
        tensors = tensors_in(ended)
        if not tensors or any(tensor.requires_grad for tensor in tensors):
            return changed
        del self.components[begun:]
        prefix = max((listed for listed in self._lists if path.startswith(listed)), key=len)
        stream = self._marked[prefix][0].shape if prefix in self._marked else torch.Size()
        main = next((t for t in tensors if alike(t.shape, stream)), None)
        self._add(path, call.number, None if main is None else main.detach(), ended)
        return changed

    def _inside(self, call: Call, output: object) -> object:
        """Begin marks anew at matrices, and hold norms: their values stay, their derivatives are those when held."""
        if call.module in self._matrices:
            begun = mapped(output, lambda t: t.detach().requires_grad_())
            self._note(self.reads.matrices, call, begun)
            return begun
        alone = len(call.args) + len(call.kwargs) == 1 and isinstance(call.first, Tensor)
        if alone and call.module in self._near and isinstance(output, Tensor) and output.requires_grad:
            norm = hold(call.module, call.first.detach(), output.detach())
            if norm is not None:
                linear = norm(call.first)
                output = output.detach() + (linear - linear.detach())
        if call.module in self._near:
            self._note(self.reads.small, call, output)
        return output

    def _note(self, calls: list[ModuleCall], call: Call, output: object) -> None:
        given = [*call.args, *call.kwargs.values()]
        if isinstance(output, Tensor) and len(given) == 1 and isinstance(given[0], Tensor):
            calls.append(ModuleCall(call.module, given[0], output))

    def _add(self, path: str, number: int, value: Tensor | None, output: object) -> None:
        kept = None if self._keep is None or value is None else self._keep(value)
        if self._keep is not None or self.dropped:
            value = output = None
        self.components.append(Component(path, number, value, output, kept))


def owns_matrix(module: nn.Module) -> bool:
    """Whether a module itself has a table of weights; a parametrization makes one for its owner."""
    if isinstance(module, ParametrizationList):
        return False
    weight = getattr(module, "weight", None)  # which a parametrization computes, or another module owns
    return any(isinstance(p, Tensor) and p.ndim >= 2 for p in (*module._parameters.values(), weight))


def _lies_in(call: Call, module: nn.Module) -> bool:
    caller = call.caller
    return caller is not None and (caller.module is module or _lies_in(caller, module))


def alike(shape: torch.Size, stream: torch.Size) -> bool:
    """Whether an output has the stream's vectors, with or without the axis of the batch."""
    return (
        shape[-1:] == stream[-1:]
        and len(shape) >= 2
        and shape[:-1].numel() in (stream[-3:-1].numel(), stream[:-1].numel())
    )
