"""Finds the attention layers that can have a bias, and hooks them to pass their vectors to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache, EncoderDecoderCache

from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.per_thread import PerThread
from attnflow.bias.config import LayerShape
from attnflow.bias.hf.cache import refuse_biased
from attnflow.bias.kind import LayerBias
from attnflow.models.anatomy.sites import Site
from attnflow.models.passes.interception import in_force
from attnflow.models.subject import Subject
from attnflow.models.weights.attention import projections
from attnflow.models.weights.probe import Columns, Projections

CHILD: Final = "score_terms"  # not "bias": Trainer exempts every parameter with that word from weight decay
_THREADS: Final = "; if several threads run this compiled model with other handles beside its bias, give each a copy"


@dataclass(frozen=True, eq=False)
class BiasedLayer:
    site: Site
    shape: LayerShape
    depth: int  # layers of its stack, of whatever kind: as many as a key-value cache has
    query: Columns | None  # what its queries are made of, before rotation; None if that cannot be told
    key: Columns | None
    missing: str  # why it cannot


def layers_of(subject: Subject) -> list[BiasedLayer]:
    stack = subject.stack
    seen = projections(subject.model, stack.sites)
    layers: list[BiasedLayer] = []
    for index, site in enumerate(stack.sites):
        config, found = site.owner.config, seen[site.name]
        query, key, missing, hidden_size = None, None, "", getattr(config, "hidden_size", None)
        if isinstance(found, Projections):
            sizes, query, key = (found.num_heads, found.num_kv_heads, found.head_dim), found.query, found.key
            hidden_size = found.hidden_size or hidden_size
        else:
            missing = found  # why the probe cannot tell; the config has to
            try:
                heads: int = config.num_attention_heads
                kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
                sizes = heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads
            except (AttributeError, RuntimeError, TypeError) as error:  # of configs whose layers differ
                raise UnsupportedArchitecture(f"{site.name} does not state its number of heads; {missing}") from error
        causal = getattr(site.module, "is_causal", None)
        causal = bool(getattr(config, "is_decoder", True)) if causal is None else bool(causal)
        if not isinstance(hidden_size, int):
            raise UnsupportedArchitecture(f"{type(config).__name__} does not say its hidden_size")
        layers.append(
            BiasedLayer(site, LayerShape(index, *sizes, hidden_size, causal), len(stack.layers), query, key, missing)
        )
    return layers


@dataclass(eq=False)
class Shown:
    outputs: dict[str, Tensor] = field(default_factory=lambda: dict[str, Tensor]())  # of submodules, by path
    hidden: Tensor | None = None  # input of the module
    positions: Tensor | None = None  # position ids, if the model passes them
    cache: Cache | None = None
    layer: int = 0  # its index in the cache
    waiting: bool = False  # whether the module runs, and its attention has not asked yet

    def clear(self) -> None:
        self.outputs = {}
        self.hidden = self.positions = self.cache = None
        self.waiting = False


@dataclass(eq=False)
class Hooks:
    """What a pass shows of a module, by thread, kept for its attention; adapters may replace projections meanwhile."""

    depth: int  # layers of the model, which is how many a cache has
    sources: Mapping[str, Columns]  # what queries and keys are made of, by side; nothing if the bias does not read them
    keep_hidden: bool  # whether the bias reads the module's input
    remove_rope: bool
    _of_thread: PerThread[Shown] = field(default_factory=lambda: PerThread(Shown))
    _traced: Shown = field(default_factory=Shown)  # in place of it within a compiled graph
    _hooked: list[nn.Module] = field(default_factory=lambda: list[nn.Module]())
    _reading: list[RemovableHandle] = field(default_factory=lambda: list[RemovableHandle]())
    _handles: tuple[RemovableHandle, ...] = ()

    def install(self, module: nn.Module) -> None:
        before = module.register_forward_pre_hook(self._enter, with_kwargs=True)
        self._handles = (before, module.register_forward_hook(self._leave))
        self._hook(module)

    def remove(self) -> None:
        for handle in (*self._handles, *self._reading):
            handle.remove()

    @property
    def shown(self) -> Shown:
        if torch.compiler.is_compiling():
            return self._traced if self._traced.waiting else self._of_thread()
        mine = self._of_thread()
        return mine if mine.waiting else self._traced

    def _begun(self, module: nn.Module) -> Shown:
        """Begin a call of the module; a pool breaks the graph before attention, where threads would interfere."""
        traced = torch.compiler.is_compiling() and not in_force(module, "pool")
        return self._traced if traced else self._of_thread()

    def vectors(self, side: str, batch: int, where: Tensor | None = None) -> Tensor | None:
        """Queries or keys before rotation; `where` are the new keys, as latent attention makes all of them anew."""
        source = self.sources.get(side)
        if source is None:
            return None
        shown = self.shown.outputs
        if source.paths[0] not in shown:
            raise UnsupportedArchitecture(
                "this attention module calls the attention interface more than once in a forward (as differential "
                "attention does), and a bias cannot distinguish the calls: leave its layers out of layers"
                + (_THREADS if self.shown is self._traced else "")
            )
        outputs: dict[str, Tensor] = {}
        for path in source.paths:
            output = shown[path]
            output = output.reshape(batch, -1, output.shape[-1])
            outputs[path] = output if where is None or output.shape[1] == len(where) else output.index_select(1, where)
        return source.take(outputs)

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if getattr(module, "_is_replica", False):
            raise RuntimeError(
                "a bias does not run under nn.DataParallel, which Trainer chooses for several GPUs in one process: "
                "start it with `accelerate launch` or `torchrun`, or make one GPU visible"
            )
        cache = next((v for v in (*kwargs.values(), *args) if isinstance(v, Cache)), None)
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        bias = getattr(module, CHILD)
        if not isinstance(bias, LayerBias):  # wrapped, and with it taken out of force
            raise RuntimeError(
                f"the bias of {type(module).__name__} was replaced by a {type(bias).__name__}: leave {CHILD!r} out of "
                "an adapter's modules_to_save, since a bias is trained and saved separately"
            )
        shown = self._begun(module)
        shown.clear()
        # Layers that share their weights (Zamba) hear their number in each call.
        shown.layer = cast(int, kwargs.get("layer_idx", getattr(module, "layer_idx", None)) or 0)
        if not bias.enabled:
            refuse_biased(cache, shown.layer)
            return None
        self._hook(module)
        shown.waiting, shown.cache = True, cache
        if self.keep_hidden:
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            shown.hidden = hidden if isinstance(hidden, Tensor) else None
        positions = kwargs.get("position_ids")
        shown.positions = positions if isinstance(positions, Tensor) and positions.ndim == 2 else None
        if not self.remove_rope:
            return None
        cos, sin = kwargs["position_embeddings"]
        return args, kwargs | {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        """After the attention module: a bias that attention has not asked for is out of force, and says so."""
        shown = self._begun(module)
        if shown.waiting:
            shown.clear()
            if getattr(module.__dict__.get("forward"), "stands_in", False):
                return  # an output was put in its place, so that nothing attended
            now = getattr(getattr(module, "config", None), "_attn_implementation", None)
            raise RuntimeError(
                f"{type(module).__name__} has a bias, but ran without it: the model's attention implementation was set "
                f"to {now!r} after af.bias.attach. Remove the bias, choose the implementation, and attach it again"
                + (_THREADS if shown is self._traced else "")
            )

    def _read(self, bias: LayerBias, path: str, module: nn.Module, args: object, output: Tensor) -> None:
        if bias.enabled and (shown := self.shown).waiting:  # else nothing would take the tensor from here
            shown.outputs[path] = output

    def _hook(self, module: nn.Module) -> None:
        paths = dict.fromkeys(path for source in self.sources.values() for path in source.paths)
        current = [module.get_submodule(path) for path in paths]
        if len(current) == len(self._hooked) and all(a is b for a, b in zip(current, self._hooked, strict=True)):
            return
        for handle in self._reading:
            handle.remove()
        self._hooked, self._reading = current, []
        for submodule, path in zip(current, paths, strict=True):
            self._reading.append(submodule.register_forward_hook(partial(self._read, getattr(module, CHILD), path)))
