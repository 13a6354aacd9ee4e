"""What stands around a user's model: compilation, checkpointing, data parallelism; its class and paths without them."""

from __future__ import annotations

from typing import Final

from torch import nn

_WRAPPERS: Final = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def unwrapped(model: nn.Module) -> nn.Module:
    parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    names = [name for name in (*_WRAPPERS, *(["module"] if parallel else [])) if name in model._modules]
    return unwrapped(model.get_submodule(names[0])) if names else model


def class_of(model: nn.Module) -> type[nn.Module]:
    """The class of a model without wrappers."""
    return unsharded(type(unwrapped(model)))


def unsharded(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that `fully_shard` replaced by a subclass."""
    kinds = kind.__mro__
    return kinds[2] if kinds[1].__name__ == "FSDPModule" else kind


def own_name(path: str) -> str:
    """A module's path without wrappers."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)
