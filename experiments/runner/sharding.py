"""A model spread over the processes of a launch by PyTorch's `fully_shard`: layer by layer, or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from experiments.runner.processes import Launch


def shard(model: nn.Module, optimiser: torch.optim.Optimizer, launch: Launch) -> None:
    """Spread a model, and what an optimiser moves, over the processes; each ends with its share of every parameter.

    Every layer is gathered when its forward pass begins and let go after it, with all that was attached to it. The
    parameters of a bias lie in the attention module, and are sharded with its layer in their own dtype. The rest of the
    model is gathered for the whole pass. A forward or backward pass needs all processes. The parameters that the model
    had before are emptied, so that whoever still holds them holds no memory.

    Args:
        model: the same on each process, on any device; it is moved layer by layer.
        optimiser: of its parameters, without a state yet.
        launch: whose processes they are.

    Source: `torch.distributed.fsdp.fully_shard` of PyTorch 2.13. Accelerate's own preparation is not used: on the CPU
    it falls back to whole models.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    if any(isinstance(parameter, DTensor) for parameter in names):
        raise ValueError("expected a whole model, got one that is sharded already: make a new one for each run")
    held = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    if optimiser.state or any(parameter not in names for parameter in held):
        raise ValueError("expected a new optimiser of this model's parameters, got one with a state, or of others")
    layers = layers_of(model, launch.plugin.transformer_cls_names_to_wrap)
    launch.same("the model at its start", _digest(model))
    mesh = init_device_mesh(launch.device.type, (launch.count,))
    if launch.plugin.activation_checkpointing:
        cast(Any, model).activation_checkpointing_enable()
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=launch.plugin.reshard_after_forward)
    fully_shard(model, mesh=mesh)
    now = dict(model.named_parameters())
    for group in optimiser.param_groups:
        group["params"] = [now[names[parameter]] for parameter in group["params"]]
    for parameter in names:
        parameter.data = parameter.data.new_empty(0)
    check_sharded(model, launch)


def layers_of(model: nn.Module, names: Sequence[str] | None = None) -> list[nn.Module]:
    """The layers that are gathered one at a time: of the classes named, or of those that transformers keeps whole."""
    names = list(names or cast(Any, getattr(model, "_no_split_modules", None)) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        classes = ", ".join(names) or "(it names none in _no_split_modules)"
        raise ValueError(
            f"expected layers to shard, and {type(model).__name__} has none of class {classes}: "
            "pass --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap CLASS"
        )
    return layers


def check_sharded(model: nn.Module, launch: Launch) -> None:
    """Raise ValueError unless every parameter is cut over all processes, whose parts together are the whole."""
    own = every = 0
    for name, one in model.named_parameters():
        parameter = cast(Tensor, one)
        spread = isinstance(parameter, DTensor) and parameter.device_mesh.size() == launch.count
        if not (spread and any(isinstance(each, Shard) for each in cast(DTensor, parameter).placements)):
            kind = f"{type(parameter).__name__} of {tuple(parameter.shape)}"
            raise ValueError(
                f"expected each parameter cut over {launch.count} processes, and {name} is a {kind}: this model cannot "
                "be trained by FSDP here; launch without --use_fsdp"
            )
        own, every = own + cast(DTensor, parameter).to_local().numel(), every + parameter.numel()
    total = torch.tensor(float(own), dtype=torch.float64, device=launch.device)
    torch.distributed.all_reduce(total)
    if int(total) != every:
        raise ValueError(f"expected shards of {every:,} numbers in all, and the processes hold {int(total):,}")


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be sharded, as a whole; all processes must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def let_go(model: nn.Module) -> None:
    """What a pass without a backward pass has gathered: it would stay, and not follow the next update."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, sharded as another is: this process's part of it is kept, and nothing is sent."""
    if not isinstance(other, DTensor):
        return tensor
    tensor = tensor.to(other.device)
    return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)


def _digest(model: nn.Module) -> str:
    total = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()
