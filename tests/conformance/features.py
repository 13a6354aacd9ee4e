"""The features of the table of pairs: what is put on a small model or its call, and what the oracle must know of it."""

from __future__ import annotations

import copy
import logging
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import accelerate
import peft
import torch
import transformers
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.cache_utils import Cache, DynamicCache, QuantizedLayer
from transformers.integrations.neftune import activate_neftune

import attnflow as af
from tests.conformance import dense
from tests.conformance.scene import LARGEST, Impossible, Scene, Wrong, small
from tests.knowledge.readers import store_of


@dataclass(frozen=True)
class Feature:
    """Something that is put on a model or its call; `place` orders what is put on, None for calls."""

    name: str
    put: Callable[[Scene], None]
    ours: bool = False
    place: int | None = None
    decodes: bool = False
    group: str = ""  # two of a group exclude each other


def _stirred(module: nn.Module, part: str) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for name, value in module.named_parameters():
            if part in name:
                value.copy_(torch.randn(value.shape).to(value) * 0.5)


def _table(seed: int) -> Tensor:
    table = torch.rand(LARGEST, LARGEST, generator=torch.Generator().manual_seed(seed)) < 0.5
    return (table | torch.eye(LARGEST).bool()).tril()


def mask(scene: Scene) -> None:
    scene.handles.append(af.masks.attach(scene.model, af.masks.from_dense(_table(100))))
    scene.facts["masks"] = [_table(100)]


def batch_of_masks(scene: Scene) -> None:
    tables = [_table(200 + row) for row in range(scene.count)]
    mine = [af.masks.from_dense(table) for table in tables[scene.mine(scene.count)]]
    scene.handles.append(af.masks.attach(scene.model, af.masks.batch(mine)))
    scene.facts["masks"] = tables


def bias(scene: Scene) -> None:
    scene.handles.append(af.bias.attach(scene.model, af.bias.GuidanceConfig(layers="every", hidden_dim=8)))
    _stirred(scene.model, "score_terms")
    scene.facts["biased"] = True


def reader(scene: Scene) -> None:
    store = store_of(6)
    scene.handles.append(af.knowledge.attach(scene.model, store, layers=[0], key_dim=3))
    _stirred(scene.model, "knowledge_reader")
    scene.facts["entries"] = store_rows(store)


def store_rows(store: Any) -> Tensor:
    """The six entries, by the generator that made them."""
    rows = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    return (rows / rows.norm(dim=1, keepdim=True)).double()


def shared(scene: Scene) -> None:
    handle = af.tasks.share_prefixes(scene.model)
    scene.handles.append(handle)

    def told() -> None:
        reason = next(iter(handle.report.stock), "")
        if not handle.report.shared:
            scene.notes.append(f"runs unshared, and counted: {reason}" if reason else "runs unshared")

    scene.checks.append(told)


def guard(scene: Scene) -> None:
    handle = af.audit.guard(scene.model)
    scene.handles.append(handle)

    def clean() -> None:
        if not handle.ok:
            raise Wrong(f"the guard has nothing to say: {handle}")

    scene.checks.append(clean)


def monitor(scene: Scene) -> None:
    handle = af.geometry.monitor(scene.model, every=1, log=lambda *_: None)
    scene.handles.append(handle)

    def scored() -> None:
        handle.start()
        right = dense.geometry(scene.weights | dense.weights_of(scene.model), "adapted" in scene.facts)
        if scene.rank:  # the first process records
            return
        found = [(row["symmetry"], row["directionality"]) for row in handle.scores.rows() if row["head"] == "all"]
        if len(found) != len(right):
            raise Wrong(f"scores of {len(found)} layers")
        for one, other in zip(found, right, strict=True):
            if max(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-3:
                raise Wrong(f"symmetry and directionality {one}, by the matrices {other}")

    scene.checks.append(scored)


def lora(scene: Scene) -> None:
    targets = [f"{one}_proj" for one in "qkvo"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    scene.model = peft.get_peft_model(scene.model, config)
    _stirred(scene.model, "lora_")
    scene.facts["adapted"] = True


def checkpointing(scene: Scene) -> None:
    scene.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def neftune(scene: Scene) -> None:
    activate_neftune(scene.model, 5.0)
    scene.facts["alpha"] = 5.0


class _Lossless(QuantizedLayer):
    """A quantised layer of a cache whose rounding is none, so that its answers can be compared."""

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        return tensor.clone()

    def _dequantize(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


def quantised() -> Cache:
    return Cache(layers=[_Lossless(residual_length=3) for _ in range(dense.LAYERS)])


def sets(name: str, value: object) -> Callable[[Scene], None]:
    return lambda scene: setattr(scene, name, value)


def option(name: str, value: object) -> Callable[[Scene], None]:
    return lambda scene: scene.options.update({name: value})


def assisted(scene: Scene) -> None:
    scene.count //= 2
    helper = small()
    with torch.no_grad():
        for value in helper.parameters():
            value.mul_(1 + 0.05 * torch.randn_like(value))
    scene.options["assisted"] = helper


def compiled(scene: Scene) -> None:
    torch.compiler.reset()
    scene.model.compile(backend="eager")
    if not scene.decodes:
        scene.plain()  # so that what comes later must be noticed


def copied(copy_of: Callable[[Any], Any]) -> Callable[[Scene], None]:
    def put(scene: Scene) -> None:
        if scene.handles:
            scene.copied.append(scene.model)
        scene.model = copy_of(scene.model)

    return put


def ddp(scene: Scene) -> None:
    _spread(scene)
    scene.model = DistributedDataParallel(scene.model)


def fsdp(scene: Scene) -> None:
    _spread(scene)
    base = scene.model.get_base_model() if isinstance(scene.model, peft.PeftModel) else scene.model
    for layer in base.model.layers:
        fully_shard(layer)
    fully_shard(scene.model)


def _spread(scene: Scene) -> None:
    if not distributed.is_initialized():
        raise Impossible("needs two processes")


def offloaded(scene: Scene) -> None:
    scene.weights |= dense.weights_of(scene.model)
    accelerate.cpu_offload(scene.model, execution_device=torch.device("cpu"))


def half(scene: Scene) -> None:
    scene.model.to(torch.float16)
    scene.rounding = 0.02


FEATURES = {
    feature.name: feature
    for feature in (
        Feature("mask", mask, ours=True, place=3),
        Feature("batch of masks", batch_of_masks, ours=True, place=3),
        Feature("bias", bias, ours=True, place=3),
        Feature("reader", reader, ours=True, place=3),
        Feature("shared prefixes", shared, ours=True, place=3),
        Feature("guard", guard, ours=True, place=3),
        Feature("monitor", monitor, ours=True, place=3),
        Feature("LoRA", lora, place=1),
        Feature("gradient checkpointing", checkpointing, place=4),
        Feature("NEFTune", neftune, place=4),
        Feature("dynamic cache", sets("caches", DynamicCache), decodes=True, group="cache"),
        Feature("static cache", option("cache_implementation", "static"), decodes=True, group="cache"),
        Feature("quantised cache", sets("caches", quantised), decodes=True, group="cache"),
        Feature("offloaded cache", option("cache_implementation", "offloaded"), decodes=True, group="cache"),
        Feature("beams", option("num_beams", 3), decodes=True),
        Feature("assisted generation", assisted, decodes=True),
        Feature("chunked prefill", option("prefill_chunk_size", 3), decodes=True),
        Feature("left padding", sets("padded", True)),
        Feature("packed rows", sets("packed", True)),
        Feature("torch.compile", compiled, place=8),
        Feature("deepcopy", copied(copy.deepcopy), place=5),
        Feature("pickle", copied(lambda model: pickle.loads(pickle.dumps(model))), place=5),
        Feature("DDP", ddp, place=7, group="processes"),
        Feature("FSDP2", fsdp, place=6, group="processes"),
        Feature("offload", offloaded, place=2),
        Feature("half precision", half, place=0),
        Feature("threads", sets("mode", "threads")),
    )
}
DISTRIBUTED = {name for name, feature in FEATURES.items() if feature.group == "processes"}


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings, transformers' log and threads of PyTorch's own."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name in ("attnflow", "torch._dynamo"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
