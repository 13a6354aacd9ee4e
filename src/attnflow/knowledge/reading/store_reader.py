"""Readers of a store in any decoder: gated cross-attention to its entries, added after a layer."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from attnflow._core.checks import integer, preview
from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.per_thread import PerThread
from attnflow.knowledge.attention import GeneralizedCrossAttention, softmax_one
from attnflow.knowledge.layered import SharedReader, reads_entries
from attnflow.knowledge.store import Store
from attnflow.knowledge.store.source import EntrySource
from attnflow.models.anatomy.sites import Stack, models_around
from attnflow.models.loading.addons import Addon, check_loaded, read_addon, save_addon, split_heads
from attnflow.models.passes.interception import (
    AttentionCall,
    Output,
    Proceed,
    base_implementation,
    check_implementation,
    intercept,
)
from attnflow.models.passes.trial import DoesNotRun, read, trial
from attnflow.models.passes.watching import calls_of
from attnflow.models.subject import Subject

_CHILD: Final = "knowledge_reader"  # of an attention module
_POOL: Final = "knowledge_pool"  # of attention modules and readers
_LAYERS: Final = 4  # how many layers are pooled
_OWN: Final = 0.1  # weight of the token itself beside the pooled values
_SHARE: Final = 2 / 3  # of the layers, above which readers stand by default
_KIND: Final = "reader"  # of a saved add-on


class StoreReader(SharedReader):
    """Reads a store after a layer: H' = H + gate sqrt(d) C(X, E), with X = own norm(H) + P W_P.

    P pools the tokens that each one may attend to: the last token of "the colour of Balorin" alone does not identify an
    entry. C is cross-attention (knowledge, eq. 1-9) with `softmax_one`. In training `source` may be a matrix.
    """

    letter = "S"

    def __init__(
        self, layer: int, model_dim: int, pooled: PooledValues, key_dim: int, num_heads: int, source: EntrySource
    ) -> None:
        attention = GeneralizedCrossAttention(
            model_dim, key_dim, source.store.dim, num_heads, softmax_one, threshold="constant", bias=False
        )
        nn.init.normal_(attention.key)  # entries have length 1: scores with standard deviation 1
        super().__init__(layer, attention)
        self.gate = nn.Parameter(torch.zeros(1))  # FSDP2 shards no scalars
        self.own = nn.Parameter(torch.full((1,), _OWN))
        self.pooled = pooled
        self.pooled_map = nn.Linear(pooled.width, model_dim, bias=False)
        nn.init.normal_(self.pooled_map.weight, std=pooled.width**-0.5)
        self.source: Tensor | EntrySource = source

    def read(self, hidden: Float[Tensor, "batch tokens model_dim"]) -> Float[Tensor, "batch tokens model_dim"]:
        check_loaded(self, "reader", hidden)
        kind = self.gate.dtype
        with torch.autocast(hidden.device.type, enabled=False):
            pooled = self.pooled.read(self.layer, hidden, kind)
            normed = functional.rms_norm(hidden.to(kind), hidden.shape[-1:])
            asking = self.own * normed + self.pooled_map(pooled)
            return self(asking).to(hidden.dtype)

    def forward(self, hidden: Tensor, source: object = None) -> Float[Tensor, "*tokens model_dim"]:
        current = self.source
        if isinstance(current, EntrySource) and self.retrieval is None:
            current = current.entries(hidden)
        return self._scale * super().forward(hidden, current)

    def current(self) -> Tensor | EntrySource:
        return self.source

    def values(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "heads entries model_dim"]:
        return self._scale * super().values(positions)

    @property
    def _scale(self) -> Tensor:
        return self.gate * math.sqrt(self.attention.model_dim)


@dataclass(eq=False)
class _Passes:
    parts: dict[bool, dict[int, Tensor]] = field(default_factory=lambda: {False: {}, True: {}})  # with gradients or not
    open: int = 0  # passes with gradients whose backward pass has not begun
    backward: bool = False


class PooledValues(nn.Module):
    """P: for each token, in several layers, the mean value over all it may attend to: attention for a zero query.

    Heads that share values give one mean. The module is a child of the attention modules and of the readers, so copies
    of a model have their own. Each thread has its own P, dropped after the `last` layer with a reader.
    """

    def __init__(self, layers: Sequence[int], width: int, last: int) -> None:
        super().__init__()
        self.layers, self.width, self.last = tuple(layers), width, last
        self._passes = PerThread(_Passes)

    def begin(self) -> None:
        if _recomputing():
            return
        passes, grad = self._passes(), torch.is_grad_enabled()
        passes.parts[grad] = {}
        if grad:
            passes.open = 1 if passes.backward else passes.open + 1
            passes.backward = False

    def put(self, layer: int, call: AttentionCall, proceed: Proceed) -> None:
        kwargs = {name: 0.0 if name == "dropout" else value for name, value in call.kwargs.items()}
        output, _ = Proceed((), proceed.kernels)(call.replace(query=torch.zeros_like(call.query), kwargs=kwargs))
        if call.empty is not None:
            output = output.masked_fill(call.empty.transpose(1, 2)[..., None], 0.0)
        shared = call.query.shape[1] // call.key.shape[1]
        self._now().parts[torch.is_grad_enabled()][layer] = output[:, :, ::shared].flatten(2)

    def read(
        self, layer: int, hidden: Float[Tensor, "batch tokens model_dim"], kind: torch.dtype
    ) -> Float[Tensor, "batch tokens width"]:
        """Return P for a layer's reader; each pooled layer's part has root mean square 1."""
        passes, grad = self._now(), torch.is_grad_enabled()
        parts = passes.parts[grad]
        pooled = [parts[number] for number in self.layers if number in parts]
        if len(pooled) == len(self.layers) and sum(part.shape[-1] for part in pooled) != self.width:
            raise split_heads("reader")
        if len(pooled) < len(self.layers) or any(part.shape[:2] != hidden.shape[:2] for part in pooled):
            raise RuntimeError(
                "a layer ran without its reader, because the attention implementation was set after "
                "af.knowledge.attach: remove the reader, set the implementation, and attach the reader again"
            )
        result = [functional.rms_norm(part.to(kind), part.shape[-1:]) for part in pooled]
        if layer == self.last and not grad:
            passes.parts[False] = {}
        return torch.cat(result, dim=-1)

    def _now(self) -> _Passes:
        """Return the passes of this thread; in a backward pass on an autograd thread, the passes it may belong to."""
        mine = self._passes()
        if not _recomputing():
            return mine
        waiting = [mine] if mine.open else [passes for passes in self._passes.all() if passes.open]
        if (number := sum(passes.open for passes in waiting)) > 1:
            raise RuntimeError(
                f"{number} forward passes with gradients came before this backward pass, but gradient checkpointing "
                "can recompute a reader's queries only for the last: run passes that need no gradient under "
                "torch.no_grad(), or call model.gradient_checkpointing_disable()"
            )
        for passes in waiting:
            passes.backward = True
        return waiting[0] if waiting else mine


def _pool_before(layer: int, call: AttentionCall, proceed: Proceed) -> Output:
    cast(PooledValues, getattr(call.module, _POOL)).put(layer, call, proceed)
    return proceed(call)


def _begin_before(path: str, layer: nn.Module, _: object) -> None:
    """Forward pre-hook of the first pooled layer: start a pass of the pool below the module at `path`."""
    cast(PooledValues, getattr(layer.get_submodule(path), _POOL)).begin()


def _read_after(path: str, layer: nn.Module, _: object, output: Any) -> Any:
    """Forward hook of a layer: add what the reader below the attention module at `path` reads."""
    module = layer.get_submodule(path)
    reader = getattr(module, _CHILD)
    if not isinstance(reader, StoreReader):  # an adapter wrapped it, so it no longer acts
        raise RuntimeError(
            f"the reader of {type(module).__name__} was replaced by a {type(reader).__name__}: leave {_CHILD!r} out of "
            "an adapter's modules_to_save, since a reader is trained and saved separately"
        )
    hidden = output[0] if isinstance(output, tuple) else output
    added = hidden + reader.read(hidden)
    return (added, *output[1:]) if isinstance(output, tuple) else added


def _recomputing() -> bool:
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportAttributeAccessIssue]


def add_readers(
    subject: Subject,
    store: Store,
    folder: str | os.PathLike[str] | None,
    layers: Sequence[int] | None,
    key_dim: int,
    num_heads: int,
) -> tuple[ExitStack, EntrySource, str]:
    """Add readers to a model; return what takes them out again, what they read, and the encoder of the entries."""
    if not len(store):
        raise ValueError(f"{store.uri} has no entries to read: insert some first")
    encoders = store.stats().encoders
    if len(encoders) > 1:
        raise ValueError(
            f"a reader needs entries of one encoder, but those of {store.uri} come from {len(encoders)} "
            f"({preview(encoders)}): build a store of their texts with one encoder"
        )
    encoder = next(iter(encoders), "")
    if reads_entries(subject.model):
        raise ValueError(
            f"{subject.kind} reads entries already: remove the earlier handle; edit the entries of a converted model "
            "in its base, model.knowledge"
        )
    subject.require_unwrapped("reader")
    stack = subject.stack
    saved = None if folder is None else _saved(folder, stack, store, encoder)
    if saved is not None:
        if layers is not None:
            raise ValueError("a saved reader has its own layers: pass reader or layers, not both")
        layers, key_dim, num_heads = (saved.config[name] for name in ("layers", "key_dim", "num_heads"))
    chosen = _chosen(layers, stack)
    # Early values identify words best. Of 1,000 made-up facts, SmolLM2-135M found the right entry for 86 % of
    # held-out questions from layer 3, 70 % from layer 6, 56 % from layer 9, and 95 % from several of the first.
    pooled = [layer for layer in sorted(stack.attention) if layer <= chosen[0]][:_LAYERS]
    owner = models_around(list(stack.attention.values()))[0]
    implementation = base_implementation(owner.config)
    check_implementation(owner, implementation, "the model's attention implementation", "reader")
    # FlexAttention warns where it is not compiled, and a trial compiles nothing
    widths = _measured(stack, sorted({*pooled, *chosen}), "sdpa" if implementation == "flex_attention" else None)
    pool, source = PooledValues(pooled, sum(widths[number][1] for number in pooled), chosen[-1]), EntrySource(store)
    added = [StoreReader(number, widths[number][0], pool, key_dim, num_heads, source) for number in chosen]
    for reader in added:
        module = stack.attention[reader.layer].module
        parameter = next((weight for weight in module.parameters() if weight.is_floating_point()), None)
        if parameter is not None:  # half precision is too coarse to learn in
            reader.to(Subject(module).device, torch.promote_types(parameter.dtype, torch.float32))
        reader.train(module.training)
    if saved is not None:
        saved.fill(_tensors_of(added))
    return _put(stack, pool, added), source, encoder


def save_readers(
    folder: str | os.PathLike[str], model: nn.Module, readers: Sequence[StoreReader], encoder: str
) -> Path:
    first = readers[0].attention
    config = {
        "encoder": encoder,
        "entry_dim": first.entry_dim,
        "layers": [reader.layer for reader in readers],
        "key_dim": first.key_dim,
        "num_heads": first.num_heads,
    }
    subject = Subject(model)
    return subject.on_every_rank(
        "save",
        lambda first: save_addon(folder, _KIND, _tensors_of(readers), config, subject.stack.identity(_CHILD), first),
    )


def _put(stack: Stack, pool: PooledValues, readers: Sequence[StoreReader]) -> ExitStack:
    sites, undo = stack.attention, ExitStack()
    paths = {number: site.name.removeprefix(f"{stack.path}.{number}").strip(".") for number, site in sites.items()}
    children = [(sites[number].module, _POOL, pool) for number in pool.layers]
    children += [(sites[reader.layer].module, _CHILD, reader) for reader in readers]
    for module, name, child in children:
        module.add_module(name, child)
        undo.callback(delattr, module, name)
    first = stack.layers[pool.layers[0]]
    undo.callback(first.register_forward_pre_hook(partial(_begin_before, paths[pool.layers[0]])).remove)
    for number in (reader.layer for reader in readers):
        undo.callback(stack.layers[number].register_forward_hook(partial(_read_after, paths[number])).remove)
    pooling = {sites[number].module: partial(_pool_before, number) for number in pool.layers}
    interception = intercept(models_around(list(sites.values())), pooling, role="pool")
    undo.callback(interception.remove, keep_changes=True)
    return undo


def _chosen(layers: Sequence[int] | None, stack: Stack) -> list[int]:
    """Return the layers that get a reader: by default every second of the last third, except the final layer."""
    number, able = len(stack.layers), sorted(stack.attention)
    if layers is None:
        few = [layer for layer in able if layer >= int(number * _SHARE)] or able[-1:]
        return few[:-1:2] or few
    if isinstance(layers, str) or not layers:
        raise ValueError(f"layers must list layer numbers from 0 to {number - 1}, got {layers!r}")
    chosen = sorted(integer("layer", layer, 0, number - 1) for layer in layers)
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"layers must name each layer once, got {chosen}")
    without = [layer for layer in chosen if layer not in stack.attention]
    if without:
        raise UnsupportedArchitecture(
            f"a reader needs self-attention, which layers {without} lack: choose among {able}"
        )
    return chosen


def _measured(stack: Stack, chosen: Sequence[int], implementation: str | None) -> dict[int, tuple[int, int]]:
    """Run two tokens to measure the token width and the value width (without repeated heads) of each layer."""
    model = models_around(list(stack.attention.values()))[0]
    values: dict[int, int] = {}

    def look(number: int, call: AttentionCall, proceed: Proceed) -> Output:
        output, weights = proceed(call)
        values[number] = call.key.shape[1] * output.shape[-1]
        return output, weights

    try:
        looks = {stack.attention[number]: partial(look, number) for number in chosen}
        with trial(model, looks, implementation=implementation):
            layers = {number: stack.layers[number] for number in chosen}
            calls = calls_of(layers, lambda: read(model, [Subject(model).ordinary_tokens(2)]))
    except DoesNotRun as error:
        raise UnsupportedArchitecture(
            f"attaching a reader needs a model that runs on two token ids, which {type(model).__name__} does not: "
            f"{error.why}"
        ) from error
    returned = {call.name: call.output[0] if isinstance(call.output, tuple) else call.output for call in calls}
    for number in chosen:
        hidden = returned.get(number)
        if number not in values or not isinstance(hidden, Tensor) or hidden.shape[:2] != (1, 2) or hidden.ndim != 3:
            raise UnsupportedArchitecture(
                f"a reader adds to a layer's output [batch, tokens, width], which layer {number} "
                f"({type(stack.layers[number]).__name__}) does not return"
            )
    return {number: (returned[number].shape[-1], values[number]) for number in chosen}


def _tensors_of(readers: Sequence[StoreReader]) -> dict[str, Tensor]:
    states = {reader.layer: reader.state_dict() for reader in readers}
    return {f"layers.{layer}.{name}": tensor for layer, state in states.items() for name, tensor in state.items()}


def _saved(folder: str | os.PathLike[str], stack: Stack, store: Store, here: str) -> Addon:
    saved = read_addon(folder, _KIND)
    saved.check_base(stack.identity(_CHILD))
    width, encoder = saved.config["entry_dim"], saved.config["encoder"]
    if store.dim != width:
        raise ValueError(f"the saved reader reads entries of width {width}, but those of {store.uri} have {store.dim}")
    if here != encoder:
        raise ValueError(
            f"the reader was trained on entries of {encoder or 'an unnamed encoder'}, but those of {store.uri} are of "
            f"{here or 'an unnamed encoder'}: build a store of the same texts with the former"
        )
    return saved
