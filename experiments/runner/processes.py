"""The processes of a run: one alone, or those that `accelerate launch` started."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor

Value = TypeVar("Value")

_LONGEST: Final = timedelta(days=7)  # that processes wait while the first one evaluates, or reads a data set
_SHARDED: Final = "ACCELERATE_USE_FSDP"
_VERSION: Final = "FSDP_VERSION"


@dataclass(frozen=True, eq=False)
class Launch:
    rank: int = 0  # of this process, from 0
    count: int = 1  # of processes
    # how accelerate was asked to shard models (FSDP, version 2); None where each process has them whole
    plugin: Any = None
    accelerator: Any = None  # of accelerate, if there are several processes
    waiting: Any = None  # group of all of them, on the CPU, in which one may wait for days

    @property
    def sharded(self) -> bool:
        """Whether a model that is trained is spread over the processes."""
        return self.plugin is not None

    @property
    def device(self) -> torch.device:
        if self.accelerator is not None:
            return self.accelerator.device
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def home(self) -> torch.device:
        """Where to make a model that is to be trained: one that is sharded is never whole on a GPU."""
        return torch.device("cpu") if self.sharded else self.device

    def share(self, value: Value) -> Value:
        if self.count == 1:
            return value
        held: list[Any] = [value]
        torch.distributed.broadcast_object_list(held, src=0, group=self.waiting, device=torch.device("cpu"))
        return held[0]

    def once(self, action: Callable[[], Value]) -> Value:
        """What an action returns that the first process alone does, on all of them; so with its errors."""
        if self.count == 1:
            return action()
        result, said = None, ""
        if self.rank == 0:
            try:
                result = action()
            except Exception as error:
                self.share(("", f"{type(error).__name__}: {error}"))
                raise
        result, said = self.share((result, said))
        if said:
            raise ValueError(f"the first of {self.count} processes failed: {said}")
        return cast(Value, result)

    def same(self, what: str, value: object) -> None:
        """Raise ValueError, on all processes, unless all have the same value."""
        if self.count == 1:
            return
        values: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(values, value, group=self.waiting)
        others = [rank for rank, one in enumerate(values) if one != values[0]]
        if others:
            raise ValueError(
                f"expected {what} to be the same on all {self.count} processes, and process {others[0]} differs from "
                "the first: make the model from a seed, or load it whole, on each"
            )

    def mean(self, value: Tensor) -> Tensor:
        if self.count == 1:
            return value
        total = value.clone()
        torch.distributed.all_reduce(total)
        return total / self.count

    def precision(self) -> AbstractContextManager[object]:
        """In which a sharded model runs: `--mixed_precision`. Whole ones were told by accelerate."""
        return self.accelerator.autocast() if self.sharded else nullcontext()

    def expect(self, sharded: int) -> None:
        """Raise ValueError unless so many processes share each model; 0 expects nothing."""
        if sharded and not (self.sharded and self.count == sharded):
            came = f"{self.count} with {'a share of each' if self.sharded else 'whole models'}"
            raise ValueError(
                f"expected {sharded} processes that share each model (FSDP), and {came} came: start them by "
                f"`accelerate launch --use_fsdp --fsdp_version 2 --num_processes {sharded}`, and see that accelerate "
                "finds so many devices (with --cpu it starts one process without FSDP, and says nothing)"
            )


def launched() -> Launch:
    """The launch that this process belongs to; the first call begins it, and must come before models are loaded."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    sharded = os.environ.get(_SHARDED, "false").lower() == "true"
    if sharded and os.environ.get(_VERSION, "1") != "2":
        raise ValueError(
            f"expected FSDP of version 2, got version {os.environ.get(_VERSION, '1')}: pass --fsdp_version 2 to "
            "accelerate launch"
        )
    if count > 1:
        return _several(count, sharded)
    if sharded:
        raise ValueError(
            "expected several processes that share each model (FSDP), and this one is alone: pass --num_processes N to "
            "accelerate launch, or leave --use_fsdp out"
        )
    return Launch()


@cache
def _several(count: int, sharded: bool) -> Launch:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    # Else transformers loads weights on the first process alone; the others would have what memory held.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    accelerator = Accelerator()
    plugin = FullyShardedDataParallelPlugin() if sharded else None
    check(count, plugin, accelerator.num_processes, accelerator.distributed_type.value, accelerator.device.type)
    check_options(accelerator.mixed_precision, plugin)
    waiting = torch.distributed.new_group(backend="gloo", timeout=_LONGEST)
    return Launch(accelerator.process_index, count, plugin, accelerator, waiting)


def check(count: int, plugin: Any, seen: int, kind: str, device: str) -> None:
    """Raise ValueError unless accelerate sees what was launched.

    On the CPU accelerate knows no FSDP: it calls the launch MULTI_CPU, and would run whole models side by side. That is
    let through for `sharding.shard`, which shards by PyTorch itself and looks at every parameter afterwards.
    """
    if seen != count:  # independent runs
        raise ValueError(
            f"expected {count} processes, as were launched, and accelerate sees {seen}: each would train alone. Start "
            "them by `accelerate launch` or `torchrun`, without an Accelerator made before"
        )
    expected = "MULTI_CPU" if device == "cpu" else "MULTI_GPU" if plugin is None else "FSDP"
    if kind != expected:
        raise ValueError(
            f"expected a launch of type {expected} ({'sharded' if plugin else 'whole'} models, {count} processes on "
            f"{device}), and accelerate made it {kind}: look at its configuration, or pass --config_file"
        )


def check_options(precision: str, plugin: Any) -> None:
    """Raise ValueError for what this loop would otherwise leave out."""
    if precision not in ("no", "bf16"):
        raise ValueError(f"expected --mixed_precision no or bf16, got {precision}: the loop scales no losses")
    if plugin is not None and type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy":
        raise ValueError("expected --fsdp_offload_params false, got true: shards stay on their devices here")
