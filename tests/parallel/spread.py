"""Ways to spread a small Llama over processes, and to wrap it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import accelerate
import peft
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

SIZES = {"vocab_size": 52, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64}
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
Build = Callable[[nn.Module], Any]


def plain() -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # gains that count
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.05))
    return model


def with_adapter() -> Any:
    config = peft.LoraConfig(r=2, target_modules=["v_proj", "o_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    return peft.get_peft_model(plain(), config).eval()


def layers(model: Any) -> Any:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == 2)


def sharded(model: Any, mesh: Any = None) -> Any:
    for layer in layers(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def checkpointed(model: Any) -> Any:
    for number, layer in enumerate(layers(model)):
        layers(model)[number] = checkpoint_wrapper(layer)
    return model


def split(model: Any, mesh: Any, sequence: bool = False) -> Any:
    """Tensor parallelism; with `sequence`, each rank norms its part of the positions."""
    plan: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    if sequence:
        plan |= {name: RowwiseParallel(output_layouts=Shard(1), use_local_output=False) for name in ROWS}
        plan |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
        gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        plan["mlp"] = PrepareModuleInput(**gathered)
        plan["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
        parallelize_module(
            model,
            mesh,
            {
                "model.embed_tokens": RowwiseParallel(
                    input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
                ),
                "model.norm": SequenceParallel(use_local_output=True),
                "lm_head": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
                ),
            },
        )
    for layer in layers(model):
        parallelize_module(layer, mesh, plan)
    return model


def planned(model: Any) -> Any:
    """Tensor parallelism by the plan of transformers; what was attached to the model before is lost."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if not dist.get_rank():
        model.save_pretrained(folder[0])
    dist.barrier()
    config = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    made = LlamaForCausalLM.from_pretrained(folder[0], distributed_config=config).eval()
    made.config._name_or_path = ""
    return made


def ways(count: int) -> dict[str, tuple[Callable[[], Any], Build]]:
    """{name: (the model of one process, what spreads it)}."""
    mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("all",))
    square = init_device_mesh("cpu", (count // 2, 2), mesh_dim_names=("data", "tensor"))
    if count > 2:
        return {
            "FSDP2": (plain, partial(sharded, mesh=mesh)),
            "tensor parallel": (plain, partial(split, mesh=mesh)),
            "FSDP2 of tensor parallel": (plain, lambda m: sharded(split(m, square["tensor"]), square["data"])),
            "FSDP2, replicated": (plain, partial(sharded, mesh=square)),
        }
    return {
        "DDP": (plain, DistributedDataParallel),
        "FSDP2": (plain, partial(sharded, mesh=mesh)),
        "tensor parallel": (plain, partial(split, mesh=mesh)),
        "tp_plan": (plain, planned),
        "sequence parallel": (plain, partial(split, mesh=mesh, sequence=True)),
        "torch.compile": (plain, partial(torch.compile, backend="eager")),
        "accelerate": (plain, lambda m: accelerate.Accelerator(cpu=True).prepare(m)),
        "PEFT": (with_adapter, lambda m: m),
        "compile of DDP": (plain, lambda m: torch.compile(DistributedDataParallel(m), backend="eager")),
        "PEFT in FSDP2": (with_adapter, partial(sharded, mesh=mesh)),
        "FSDP2 of checkpointed layers": (plain, lambda m: sharded(checkpointed(m), mesh)),
    }
