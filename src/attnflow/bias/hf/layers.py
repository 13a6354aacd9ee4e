"""Which attention layers of a model can carry a bias, and the hooks that hand it what it reads of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache, EncoderDecoderCache

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.bias.hf.cache import refuse_biased
from attnflow.bias.layer import LayerBias
from attnflow.bias.shape import LayerShape
from attnflow.models.attention import attention_places
from attnflow.models.families.find import Place
from attnflow.models.families.rows import Rows
from attnflow.models.sites import Site, find_sites

Projection = tuple[str, str, Rows]  # path below the attention module, what it makes, and where the heads lie in that

CHILD: Final = "score_terms"  # not "bias": Trainer exempts every parameter with that word from weight decay
_OF_CONFIG: Final = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
_OF_MODULE: Final = ("num_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True, eq=False)
class Layer:
    """One self-attention layer.

    Attributes:
        site: where it is.
        shape: its sizes.
        depth: layers of its stack, of whatever kind: as many as a key-value cache has.
        projections: of queries and keys; empty if they cannot be reached, with the reason in `missing`.
        missing: why not.
    """

    site: Site
    shape: LayerShape
    depth: int
    projections: tuple[Projection, ...]
    missing: str = ""


def layers_of(model: nn.Module) -> list[Layer]:
    """The self-attention layers of one stack of a transformers model, in order.

    Raises:
        ValueError: not a transformers model, or several stacks of self-attention.
        UnsupportedArchitecture: no layer calls the attention interface of transformers.
    """
    sites = [site for site in find_sites(model) if site.kind == "self"]
    if not sites:
        raise UnsupportedArchitecture(f"{type(model).__name__} has no self-attention on the attention interface")
    stacks = {site.layers: type(site.owner).__name__ for site in sites}
    if len(stacks) > 1:
        names = ", ".join(f"{owner} ({path})" for path, owner in stacks.items())
        raise ValueError(f"the model has several stacks of self-attention: {names}; pass the one that you mean")
    try:  # where their projections are, by the registry that `geometry` reads checkpoints with
        places, missing = attention_places(model), "its projections are not in the registry"
    except UnsupportedArchitecture as error:
        places, missing = dict[str, Place](), str(error)
    stack = model.get_submodule(sites[0].layers)
    depth = len(stack) if isinstance(stack, nn.ModuleList) else len(sites)
    return [_layer(index, site, depth, places.get(site.name), missing) for index, site in enumerate(sites)]


def _layer(index: int, site: Site, depth: int, place: Place | None, missing: str) -> Layer:
    config = site.owner.config
    numbers: dict[str, int] = {}
    for owner, names in ((config, _OF_CONFIG), (site.module, _OF_MODULE)):
        numbers |= {name: size for name in names if isinstance(size := getattr(owner, name, None), int)}
    if place is None:
        heads = numbers.get("num_heads", numbers.get("num_attention_heads", 0))
        if not heads:
            raise UnsupportedArchitecture(f"{site.name} does not say how many heads it has; {missing}")
        kv_heads = numbers.get("num_key_value_heads") or heads
        head_dim = numbers.get("head_dim") or numbers["hidden_size"] // heads
    else:
        heads, kv_heads, head_dim = place.num_heads, place.num_kv_heads, place.head_dim
    causal = getattr(site.module, "is_causal", None)
    causal = bool(getattr(config, "is_decoder", True)) if causal is None else bool(causal)
    shape = LayerShape(index, heads, kv_heads, head_dim, numbers["hidden_size"], causal)
    if place is None or not isinstance(place.query_rows, Rows) or not isinstance(place.key_rows, Rows):
        latent = "its queries or keys are products of two projections (latent attention)"
        return Layer(site, shape, depth, (), latent if place is not None else missing)
    sides = (("query", place.query_rows), ("key", place.key_rows))
    projections = tuple(
        (rows.tensor.removeprefix(place.name).strip(".").removesuffix(".weight"), side, rows) for side, rows in sides
    )
    return Layer(site, shape, depth, projections)


@dataclass(eq=False)
class Hooks:
    """Hooks on one attention module and its projections, which keep what a forward pass shows until attention uses it.

    Nothing of the model is replaced. Adapters replace projections after we have hooked them, so that each pass checks
    them by identity.

    Attributes:
        depth: layers of the model, which is how many a cache has.
        projections: to be read.
        keep_hidden: whether the bias reads the module's input.
        remove_rope: whether rotary embedding is switched off.
        query: projected queries of the new tokens, [batch, tokens, num_heads * head_dim].
        key: projected keys, likewise.
        hidden: input of the module.
        positions: position ids, if the model passes them.
        cache: the key-value cache in use.
        waiting: whether the module runs and its attention has not asked yet.
        thread: the one that runs it; 0 under a compiler.
    """

    depth: int
    projections: Sequence[Projection]
    keep_hidden: bool
    remove_rope: bool
    query: Tensor | None = None
    key: Tensor | None = None
    hidden: Tensor | None = None
    positions: Tensor | None = None
    cache: Cache | None = None
    waiting: bool = False
    thread: int = 0
    _hooked: list[nn.Module] = field(default_factory=lambda: list[nn.Module]())
    _reading: list[RemovableHandle] = field(default_factory=lambda: list[RemovableHandle]())
    _handles: tuple[RemovableHandle, ...] = ()

    def install(self, module: nn.Module) -> None:
        """Hook an attention module and its projections."""
        before = module.register_forward_pre_hook(self._enter, with_kwargs=True)
        self._handles = (before, module.register_forward_hook(self._leave))
        self._hook(module)

    def remove(self) -> None:
        """Take all hooks away."""
        for handle in (*self._handles, *self._reading):
            handle.remove()

    def mine(self) -> bool:
        """Whether the forward pass under way is this thread's."""
        return torch.compiler.is_compiling() or self.thread in (0, get_ident())

    def clear(self) -> None:
        """Let go of all tensors."""
        self.query = self.key = self.hidden = self.positions = self.cache = None
        self.waiting = False

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before the attention module."""
        if getattr(module, "_is_replica", False):
            raise RuntimeError(
                "a bias does not run under nn.DataParallel, which Trainer chooses by itself for several GPUs in one "
                "process; start it with `accelerate launch` or `torchrun`, or show it one GPU"
            )
        cache = next((v for v in (*kwargs.values(), *args) if isinstance(v, Cache)), None)
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        if not _bias_of(module).enabled:
            self.clear()
            refuse_biased(cache, getattr(module, "layer_idx", 0) or 0)
            return None
        self._hook(module)
        if self.waiting and not self.mine():  # its tensors would be taken for ours
            raise RuntimeError(
                "two threads run one model with a bias at the same time; give each a copy.deepcopy, or take turns"
            )
        self.clear()
        self.waiting, self.cache = True, cache
        self.thread = 0 if torch.compiler.is_compiling() else get_ident()
        if self.keep_hidden:
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            self.hidden = hidden if isinstance(hidden, Tensor) else None
        positions = kwargs.get("position_ids")
        self.positions = positions if isinstance(positions, Tensor) and positions.ndim == 2 else None
        if not self.remove_rope:
            return None
        cos, sin = kwargs["position_embeddings"]
        return args, kwargs | {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        """After the attention module: a bias that attention has not asked for is out of force, and says so."""
        if self.waiting and self.mine():
            self.clear()
            now = getattr(getattr(module, "config", None), "_attn_implementation", None)
            raise RuntimeError(
                f"{type(module).__name__} has a bias, but ran without it: the model's attention implementation was set "
                f"to {now!r} after af.bias.attach. Remove the bias, choose the implementation, and attach it again"
            )

    def _read(self, side: str, rows: Rows, module: nn.Module, args: object, output: Tensor) -> None:
        """After a projection: keeps the heads that `rows` names."""
        if not self.waiting:
            return  # disabled, or the projection alone: nothing would take the tensor from here
        if rows.start != 0 or rows.stop != rows.blocks:
            blocks = output.unflatten(-1, (rows.groups, rows.blocks, rows.head_dim))
            output = blocks[..., rows.start : rows.stop, :].flatten(-3)
        setattr(self, side, output)

    def _hook(self, module: nn.Module) -> None:
        """Hook the projections, unless they are the ones hooked already."""
        current = [module.get_submodule(path) for path, _, _ in self.projections]
        if len(current) == len(self._hooked) and all(a is b for a, b in zip(current, self._hooked, strict=True)):
            return
        for handle in self._reading:
            handle.remove()
        self._hooked, self._reading = current, []
        for projection, (_, side, rows) in zip(current, self.projections, strict=True):
            self._reading.append(projection.register_forward_hook(partial(self._read, side, rows)))


def _bias_of(module: nn.Module) -> LayerBias:
    child = getattr(module, CHILD)
    if not isinstance(child, LayerBias):  # wrapped, and with it taken out of force
        raise RuntimeError(
            f"the bias of {type(module).__name__} was replaced by a {type(child).__name__}; leave {CHILD!r} out of "
            "what an adapter wraps (modules_to_save): a bias is trained and saved by itself"
        )
    return child
