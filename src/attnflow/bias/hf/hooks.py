"""Hooks that hand a layer's projections to its bias: nothing of the model is replaced."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from attnflow.bias.hf.cache import refuse_biased
from attnflow.bias.layer import LayerBias
from attnflow.models.families.rows import Rows

CHILD: Final = "score_terms"  # not "bias": Trainer exempts every parameter with that word from weight decay


@dataclass(eq=False)
class Slot:
    """What one forward pass of an attention module has shown so far; emptied when attention has used it.

    Attributes:
        depth: layers of the model, which is how many a cache has.
        query: projected queries of the new tokens, [batch, tokens, num_heads * head_dim].
        key: projected keys, likewise.
        hidden: input of the module.
        positions: position ids, if the model passes them.
        cache: the key-value cache in use.
        waiting: whether the module runs and its attention has not asked yet.
        thread: the one that runs it; 0 under a compiler.
    """

    depth: int
    query: Tensor | None = None
    key: Tensor | None = None
    hidden: Tensor | None = None
    positions: Tensor | None = None
    cache: Cache | None = None
    waiting: bool = False
    thread: int = 0

    def begin(self) -> None:
        """A forward pass of the module starts.

        Raises:
            RuntimeError: one of another thread is still under way, whose tensors would be taken for ours.
        """
        if self.waiting and not self.mine():
            raise RuntimeError(
                "two threads run one model with a bias at the same time; give each a copy.deepcopy, or take turns"
            )
        self.clear()
        self.waiting = True
        self.thread = 0 if torch.compiler.is_compiling() else get_ident()

    def mine(self) -> bool:
        """Whether the forward pass under way is this thread's."""
        return torch.compiler.is_compiling() or self.thread in (0, get_ident())

    def clear(self) -> None:
        """Let go of all tensors."""
        self.query = self.key = self.hidden = self.positions = self.cache = None
        self.waiting = False


class ReadProjection:
    """Forward hook of a projection: keeps the heads that `rows` names of its output."""

    def __init__(self, slot: Slot, side: str, rows: Rows) -> None:
        self.slot, self.side, self.rows = slot, side, rows

    def __call__(self, module: nn.Module, args: object, output: Tensor) -> None:
        """Called by PyTorch after the projection."""
        if not self.slot.waiting:
            return  # disabled, or the projection alone: nothing would take the tensor from the slot
        rows = self.rows
        if rows.start == 0 and rows.stop == rows.blocks:
            heads = output
        else:
            blocks = output.unflatten(-1, (rows.groups, rows.blocks, rows.head_dim))
            heads = blocks[..., rows.start : rows.stop, :].flatten(-3)
        setattr(self.slot, self.side, heads)


@dataclass(eq=False)
class Enter:
    """Forward pre-hook of the attention module: notes its input and cache, and keeps the projection hooks in place.

    Adapters replace projection modules after we have hooked them, so that each call checks by identity.

    Attributes:
        slot: filled for the attention function.
        projections: path of each projection below the module, the side that it makes, and where the heads lie.
        keep_hidden: whether the bias reads the module's input.
        remove_rope: whether rotary embedding is switched off.
    """

    slot: Slot
    projections: tuple[tuple[str, str, Rows], ...]
    keep_hidden: bool
    remove_rope: bool
    hooked: list[nn.Module] = field(default_factory=lambda: list[nn.Module]())

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Called by PyTorch before the attention module."""
        if getattr(module, "_is_replica", False):
            raise RuntimeError(
                "a bias does not run under nn.DataParallel, which Trainer chooses by itself for several GPUs in one "
                "process; start it with `accelerate launch` or `torchrun`, or show it one GPU"
            )
        cache = next((v for v in (*kwargs.values(), *args) if isinstance(v, Cache)), None)
        if not bias_of(module).enabled:
            self.slot.clear()
            refuse_biased(cache, getattr(module, "layer_idx", 0) or 0)
            return None
        self.hook(module)
        self.slot.begin()
        if self.keep_hidden:
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            self.slot.hidden = hidden if isinstance(hidden, Tensor) else None
        positions = kwargs.get("position_ids")
        self.slot.positions = positions if isinstance(positions, Tensor) and positions.ndim == 2 else None
        self.slot.cache = cache
        if not self.remove_rope:
            return None
        cos, sin = kwargs["position_embeddings"]
        return args, kwargs | {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}

    def hook(self, module: nn.Module) -> None:
        """Hook the projections, unless they are the ones hooked already."""
        current = [module.get_submodule(path) for path, _, _ in self.projections]
        if len(current) == len(self.hooked) and all(a is b for a, b in zip(current, self.hooked, strict=True)):
            return
        self.unhook()
        for projection, (_, side, rows) in zip(current, self.projections, strict=True):
            projection.register_forward_hook(ReadProjection(self.slot, side, rows))
        self.hooked = current

    def unhook(self) -> None:
        """Remove our hooks from the projections."""
        for projection in self.hooked:
            hooks = projection._forward_hooks
            for key in [key for key, hook in hooks.items() if isinstance(hook, ReadProjection)]:
                del hooks[key]
        self.hooked = []


class Leave:
    """Forward hook of the attention module: a bias that attention has not asked for is out of force, and says so."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        """Called by PyTorch after the attention module."""
        if self.slot.waiting and self.slot.mine():
            self.slot.clear()
            now = getattr(getattr(module, "config", None), "_attn_implementation", None)
            raise RuntimeError(
                f"{type(module).__name__} has a bias, but ran without it: the model's attention implementation was set "
                f"to {now!r} after af.bias.attach. Remove the bias, choose the implementation, and attach it again"
            )


def bias_of(module: nn.Module) -> LayerBias:
    """The bias of an attention module.

    Raises:
        RuntimeError: somebody has wrapped it, and with it taken it out of force.
    """
    child = getattr(module, CHILD)
    if not isinstance(child, LayerBias):
        raise RuntimeError(
            f"the bias of {type(module).__name__} was replaced by a {type(child).__name__}; leave {CHILD!r} out of "
            "what an adapter wraps (modules_to_save): a bias is trained and saved by itself"
        )
    return child


def enter_of(module: nn.Module) -> Enter | None:
    """Our pre-hook of an attention module, if it has one."""
    return next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Enter)), None)


def install(module: nn.Module, enter: Enter) -> None:
    """Hook an attention module and its projections."""
    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(Leave(enter.slot))
    enter.hook(module)


def uninstall(module: nn.Module) -> None:
    """Remove all our hooks from an attention module and its projections."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, Enter):
            hook.unhook()
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    for key, hook in list(module._forward_hooks.items()):
        if isinstance(hook, Leave):
            del module._forward_hooks[key]
