"""Where the weights of a model are: here, offloaded, on the meta device, or spread over processes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Final, TypeVar, cast

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.wrappers import class_of, unsharded
from attnflow.models.loading.addons import split_heads
from attnflow.models.loading.offload import device_of, without_numbers
from attnflow.models.passes.evaluation import free_gathered
from attnflow.models.passes.processes import on_every_rank, sharded_over, splits_features

T = TypeVar("T")
_CALLS: Final = (
    *("forward", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)
_NOTHING: Final[Mapping[int, object]] = MappingProxyType({})
_DATA_PARALLEL: Final = {
    **{name: name for name in ("DistributedDataParallel", "FullyShardedDataParallel")},
    "FSDPModule": "FSDP2 (fully_shard)",
}


@dataclass(frozen=True, eq=False)
class Placement:
    """A model as it is placed; a `Subject` is one."""

    model: nn.Module

    @property
    def kind(self) -> str:
        """The name of the model's class, without wrappers."""
        return class_of(self.model).__name__

    @cached_property
    def device(self) -> torch.device:
        return device_of(self.model)

    @cached_property
    def without_numbers(self) -> bool:
        """Whether a parameter lies on the meta device, and nothing brings its numbers for a call."""
        return without_numbers(self.model)

    @cached_property
    def weights_elsewhere(self) -> bool:
        """Whether weights are on the meta device and nothing brings them, or sharded over processes."""
        return self.without_numbers or bool(self.sharded_by)

    @cached_property
    def sharded_by(self) -> str:
        """What leaves each process with a part of the weights; "" if each has all of them."""
        split = splits_features(self.model)
        parts = {
            "FullyShardedDataParallel": "FullyShardedDataParallel" in self._bases,
            "FSDP2": "FSDPModule" in self._bases,  # after a pass, it leaves parameters of the outermost module whole
            "tensor parallelism": split or any(hasattr(p, "device_mesh") for p in self.model.parameters()),
        }
        if parts["FSDP2"] and not split:
            return "FSDP2"
        return " and ".join(name for name, there in parts.items() if there)

    @cached_property
    def _bases(self) -> set[str]:
        return {base.__name__ for module in self.model.modules() for base in type(module).__mro__}

    def on_every_rank(self, what: str, call: Callable[[bool], T]) -> T:
        """Call on all processes that hold parts of the weights, or here; see `processes.on_every_rank`."""
        free_gathered(self.model)
        return on_every_rank(sharded_over(self.model), what, call)

    def require_whole(self, what: str, advice: str = "load it on one process with af.load_model(folder)") -> None:
        """Raise `UnsupportedArchitecture` for weights that are sharded over processes, saying what needs them."""
        if self.sharded_by:
            raise UnsupportedArchitecture(
                f"{what} needs all weights of {self.kind} in one process, but they are sharded by {self.sharded_by}: "
                f"{advice}"
            )

    def require_unwrapped(self, added: str, *, heads: bool = True) -> None:
        """Raise for data parallelism, which trains only parameters that it found; with `heads`, for split heads."""
        if wrapper := next((name for base, name in _DATA_PARALLEL.items() if base in self._bases), None):
            raise ValueError(
                f"{self.kind} is in {wrapper} already, which would not average the gradients of the {added} over "
                f"processes: attach the {added} first, then wrap or shard the model"
            )
        if heads and self.sharded_by:
            raise split_heads(added)

    def require_weights(self, what: str) -> None:
        """Raise `UnsupportedArchitecture` for weights that are offloaded or sharded, saying what needs them."""
        self.require_whole(what)
        if any(parameter.is_meta for parameter in self.model.parameters()):
            raise UnsupportedArchitecture(
                f"{what} needs the weights of {self.kind} in place, and some are offloaded or on the meta "
                "device; load it without device_map and offload"
            )


def bare(module: nn.Module, made: Callable[[Tensor], Tensor], kept: Mapping[int, object] = _NOTHING) -> nn.Module:
    """Copy a module with other tensors, without its hooks: those of FSDP and of tensor parallelism gather and split."""
    memo = dict(kept)
    for tensor in (*module.parameters(), *module.buffers()):
        new = made(tensor.detach())
        memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    for part in reversed(list(module.modules())):  # FSDP2's classes cannot be copied, so that parents come last
        copied = memo[id(part)] = (kind := unsharded(type(part))).__new__(kind)
        state = part.__getstate__()
        own = {name: value for name, value in state.items() if name not in _CALLS}
        vars(copied).update({**vars(nn.Module()), **copy.deepcopy(own, memo)})
    return cast(nn.Module, memo[id(module)])


def present(device: torch.device | str) -> torch.device:
    """The device, if it is there: weights are not read for one that is not."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"device must be one of this machine, such as 'cpu', got {str(device)!r} ({why})") from error
