"""Intercepts the attention of a transformers model, without knowledge of masks and biases.

`intercept(model, {module: interceptor}, role=...)` wraps `interceptor(call, proceed)` around every attention call of
`module`, until `Interception.remove()`. `proceed(call)` computes the call by the next interceptor or by transformers'
kernel; `call.replace(...)` changes what it computes. An interceptor may instead return its own output: ([batch,
queries, heads, head_dim], weights or None).

`call.mask` is what transformers hands to the implementation: None (then `is_causal` of the keywords or of the module
applies), a boolean or additive tensor [batch or 1, heads or 1, queries, keys], or a `BlockMask`.

Roles run in order: "look" sees the call with all that follows; "mask" decides which pairs exist; "pool" computes
something of its own and lets the call go on; "bias" comes last. All but the first see the mask's pairs. Within a role
the newest is in force, and the older one again once it is removed. Handles may be removed in any order.

The configs name our attention function. It is registered with a mask function of the same name, since it would silently
run without a mask otherwise; that function returns transformers' own mask unchanged. `call.request` holds the mask's
parameters (cache offsets, padding, window), found by the mask's identity. It is None if the model made or changed its
mask itself.

An interception that `replaces_mask` lets the model have a mask that it will not use. It is never None, so that its
request is found; under FlexAttention it is the padding alone, which costs nothing. Other modules of the same configs
get their own mask from the request.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final, Literal, cast, get_args
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.anatomy.sites import eager_kernel
from attnflow.models.passes.mask_request import FLEX, AttentionMask, MaskRequest, mask_function, request_of

Role = Literal["look", "mask", "pool", "bias"]
Output = tuple[Tensor, Tensor | None]
Kernel = Callable[..., Output]

IMPLEMENTATIONS: Final = ("sdpa", "eager", FLEX)
_STACK: Final = "_attnflow_interceptors"  # of an attention module, so that copies of the model have them
_CONFIG: Final = "_attn_implementation_internal"  # of a config
_OURS: Final = "attnflow_"  # the rest of the name is kept: transformers looks for "sdpa" and "flex_attention" in it
_REPLACED: Final = "attnflow_masked_"
_SAME_AS_SDPA: Final = re.compile(r"flash|flex|paged|/")  # with a slash: a kernel of the hub
_CHOSEN: Final = ("indices", "block_indices")  # keywords with the keys, or blocks of keys, that an indexer chose


@dataclass(frozen=True, eq=False)
class AttentionCall:
    module: nn.Module
    query: Tensor  # [batch, heads, queries, head_dim]
    key: Tensor  # [batch, kv_heads, keys, head_dim]
    value: Tensor
    mask: AttentionMask  # which pairs exist, in the form that `implementation` takes
    request: MaskRequest | None  # what the model asked for when it made that mask; None if it made its own
    implementation: str  # "sdpa", "eager" or "flex_attention"
    kwargs: Mapping[str, Any]  # other keywords of the attention function
    # bool[batch or 1, heads or 1, queries], queries that may attend to nothing: the mask lets them attend to all, since
    # a softmax over nothing is NaN, and their output is set to zero afterwards.
    empty: Tensor | None = None
    narrowed: bool = False  # whether `mask` has fewer pairs than `request` names, for this call alone

    def replace(self, **changes: Any) -> AttentionCall:
        return replace(self, **changes)


@dataclass(frozen=True, eq=False)
class Proceed:
    following: tuple[Interceptor, ...]
    kernels: Mapping[str, Kernel]

    def __call__(self, call: AttentionCall) -> Output:
        """Return (output [batch, queries, heads, head_dim], weights or None)."""
        if self.following:
            return self.following[0](call, Proceed(self.following[1:], self.kernels))
        function = self.kernels.get(call.implementation) or kernel(call.module, call.implementation)
        return function(call.module, call.query, call.key, call.value, call.mask, **call.kwargs)


Interceptor = Callable[[AttentionCall, Proceed], Output]


_numbers: Final = count(1)
_trial: Final = ContextVar("_trial", default=0)  # the first claim of a trial under way, in which older masks sleep


@contextmanager
def without_masks() -> Generator[None]:
    """Let the masks that are in force sleep in the calls inside, of this thread; later ones hold."""
    before = _trial.set(next(_numbers))
    try:
        yield
    finally:
        _trial.reset(before)


@dataclass(eq=False)
class _Claim:
    """What one interception needs of the configs; modules keep it, so that copies and pickles have their own."""

    role: Role
    implementation: str | None
    replaces_mask: bool
    configs: list[tuple[PreTrainedConfig, object]]  # with the name that each had before any claim
    thread: int | None = None  # the one whose calls it holds for; None for all
    number: int = field(default_factory=_numbers.__next__)

    def before(self, config: PreTrainedConfig) -> object:
        return next(name for claimed, name in self.configs if claimed is config)

    def __post_init__(self) -> None:
        _claims.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _claims.add(self)


@dataclass(frozen=True, eq=False)
class _Interceptors:
    entries: tuple[tuple[_Claim, Interceptor], ...]
    kernels: Mapping[str, Kernel]
    chain: tuple[Interceptor, ...] = ()  # those in force, in the order in which they run
    replaces_mask: bool = False

    def here(self) -> _Interceptors:
        """Leave out trials of other threads and, within a trial, the masks that are older than it."""
        first, threads = _trial.get(), (None, threading.get_ident())
        kept = tuple(
            (claim, interceptor)
            for claim, interceptor in self.entries
            if claim.thread in threads and (claim.role != "mask" or claim.number >= first)
        )
        return self if len(kept) == len(self.entries) else _Interceptors(kept, self.kernels)

    def __post_init__(self) -> None:
        newest = {claim.role: interceptor for claim, interceptor in self.entries}
        object.__setattr__(self, "chain", tuple(newest[role] for role in get_args(Role) if role in newest))
        object.__setattr__(self, "replaces_mask", any(claim.replaces_mask for claim, _ in self.entries))


_claims: Final[WeakSet[_Claim]] = WeakSet()


class Interception:
    """Interceptors in force; `remove()` takes them away, in any order with others."""

    def __init__(self, claim: _Claim, modules: Sequence[nn.Module]) -> None:
        self._claim = claim
        self._modules = list(modules)
        self.num_modules = len(self._modules)

    @property
    def active(self) -> bool:
        return bool(self._modules)

    def remove(self, *, keep_changes: bool = False) -> list[str]:
        """Restore modules and configs; a second call does nothing.

        Returns implementations that others have set since, disabling the interceptors; `keep_changes` leaves them.
        """
        if not self._modules:
            return []
        names = {id(config): config.__dict__[_CONFIG] for config, _ in self._claim.configs}
        changed = [id(config) for config, _ in self._claim.configs if names[id(config)] != _name(config)]
        for module in self._modules:
            stack: _Interceptors = module.__dict__[_STACK]
            entries = tuple(entry for entry in stack.entries if entry[0] is not self._claim)
            if entries:
                setattr(module, _STACK, _Interceptors(entries, stack.kernels))
            else:
                delattr(module, _STACK)
        _claims.discard(self._claim)
        for config, before in self._claim.configs:
            if not (keep_changes and id(config) in changed):
                config.__dict__[_CONFIG] = _name(config) if _claims_of(config) else before
        self._modules = []
        return [str(names[config]) for config in changed]


def intercept(
    around: Sequence[PreTrainedModel],
    interceptors: Mapping[nn.Module, Interceptor],
    *,
    role: Role,
    implementation: str | None = None,
    replaces_mask: bool = False,
) -> Interception:
    """Put each interceptor around the attention of its module, as this file's docstring describes.

    Copies and pickles of the model carry the interceptors, which must be picklable. `implementation` sets that of all
    models `around` (None keeps each); `UnsupportedArchitecture`, before any change, if a module lacks it.
    """
    configs = {id(owner.config): owner.config for owner in around}
    configs |= {id(m.config): cast(PreTrainedConfig, m.config) for m in interceptors if hasattr(m, "config")}
    kernels = {module: _kernels(module, implementation) for module in interceptors}
    _register()
    before = [(config, _before(config)) for config in configs.values()]
    claim = _Claim(role, implementation, replaces_mask, before, threading.get_ident() if _trial.get() else None)
    for module, interceptor in interceptors.items():
        stack = cast("_Interceptors | None", module.__dict__.get(_STACK))
        old = stack or _Interceptors((), {})
        setattr(module, _STACK, _Interceptors((*old.entries, (claim, interceptor)), {**old.kernels, **kernels[module]}))
    for config, _ in before:  # past the property, which would also set sub-configs
        config.__dict__[_CONFIG] = _name(config)
    return Interception(claim, list(interceptors))


def in_force(module: nn.Module, *roles: Role) -> list[Interceptor]:
    stack = cast("_Interceptors | None", module.__dict__.get(_STACK))
    newest = {} if stack is None else {claim.role: interceptor for claim, interceptor in stack.entries}
    return [newest[role] for role in roles if role in newest]


def base_implementation(config: PreTrainedConfig) -> str:
    """Return the implementation that a config names, without our prefix; "sdpa" by default."""
    name = str(config.__dict__[_CONFIG] or "sdpa")
    return name.removeprefix(_REPLACED).removeprefix(_OURS)


def readable_implementation(config: PreTrainedConfig) -> str:
    """Return the implementation that scores are read with: the config's own, or SDPA for one that computes the same.

    Raises `UnsupportedArchitecture` for one that a user registered, which may compute anything.
    """
    current = base_implementation(config)
    if current in ("eager", "sdpa"):
        return current
    if not _SAME_AS_SDPA.search(current):
        raise UnsupportedArchitecture(
            f"the model attends by {current!r}, an implementation of its own, so that its scores are not known; call "
            "model.set_attn_implementation('sdpa') if that computes the same"
        )
    return "sdpa"


def check_implementation(owner: PreTrainedModel, name: str, origin: str, purpose: str) -> None:
    """Raise unless `owner` runs with the implementation `name` and that can be intercepted.

    Messages say what named it (`origin`) and what it is for (`purpose`: "mask", "bias").
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"{origin} is {name!r}, which takes no {purpose}; choose one of {', '.join(IMPLEMENTATIONS)}, such as "
            f"model.set_attn_implementation('sdpa')"
        )
    try:
        owner.get_correct_attn_implementation(name)
    except (ValueError, ImportError) as error:
        raise UnsupportedArchitecture(f"{type(owner).__name__} does not run with {name!r}: {error}") from error


def kernel(module: nn.Module, implementation: str) -> Kernel:
    """Return the attention function that transformers itself would call for `module`."""
    if implementation == "eager":
        return cast(Kernel, eager_kernel(module))
    return cast(Kernel, ALL_ATTENTION_FUNCTIONS[implementation])


def _kernels(module: nn.Module, implementation: str | None) -> dict[str, Kernel]:
    """Return the kernels that a module's call may end in; looked up early, as a compiler cannot."""
    config = getattr(module, "config", None)
    current = base_implementation(config) if isinstance(config, PreTrainedConfig) else "sdpa"
    implementation = implementation or current
    names = (FLEX, "sdpa") if implementation == FLEX else (implementation,)  # sdpa stands in on the CPU
    return {name: kernel(module, name) for name in names}


def _name(config: PreTrainedConfig) -> object:
    claims = _claims_of(config)
    before = str(claims[0].before(config) or "sdpa")
    chosen = [claim.implementation for claim in claims if claim.implementation is not None]
    base = chosen[-1] if chosen else before.removeprefix(_REPLACED).removeprefix(_OURS)
    replaced = before.startswith(_REPLACED) or any(claim.replaces_mask for claim in claims)
    return (_REPLACED if replaced else _OURS) + base


def _before(config: PreTrainedConfig) -> object:
    claims, current = _claims_of(config), config.__dict__[_CONFIG]
    return claims[0].before(config) if claims and current == _name(config) else current


def _claims_of(config: PreTrainedConfig) -> list[_Claim]:
    claims = [claim for claim in _claims if any(claimed is config for claimed, _ in claim.configs)]
    return sorted(claims, key=lambda claim: claim.number)


def _register() -> None:
    """Register attention and mask functions under our names, unless they are: others may be listening to them."""
    for implementation in IMPLEMENTATIONS:
        for prefix in (_OURS, _REPLACED):
            name, replaced = prefix + implementation, prefix == _REPLACED
            if name not in AttentionInterface._global_mapping:
                AttentionInterface.register(name, _attention(implementation, replaced))
            if name not in AttentionMaskInterface._global_mapping:
                AttentionMaskInterface.register(name, mask_function(implementation, replaced))


def _selected(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
) -> Tensor:
    """A mask narrowed to the keys that an indexer chose for each query, or to their blocks, as sparse models do.

    They do so under the names "eager" and "sdpa" alone, and leave it to the attention function under ours.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    if block_indices is not None:
        positions = torch.arange(num_keys - num_queries, num_keys, device=query.device)[None]
        narrow = cast(Any, module).indexer.build_block_mask
        return narrow(block_indices, mask, num_keys, query.dtype, query.device, positions)
    mask, keys = cast(Tensor, mask), cast(Tensor, indices)[:, None].long()  # such models always make a mask
    chosen = torch.zeros(*keys.shape[:3], mask.shape[-1], dtype=torch.bool, device=mask.device)
    chosen.scatter_(-1, keys, True)
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _attention(implementation: str, replaced: bool) -> Kernel:
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: AttentionMask = None,
        **kwargs: Any,
    ) -> Output:
        stack = cast("_Interceptors | None", getattr(module, _STACK, None))
        if stack is not None and not torch.compiler.is_compiling():
            stack = stack.here()
        request = request_of(attention_mask)
        if replaced and request is not None and not (stack is not None and stack.replaces_mask):
            attention_mask = request.own(implementation)
        chosen = {name: kwargs.get(name) for name in _CHOSEN if kwargs.get(name) is not None}
        narrowed = bool(chosen) and not isinstance(attention_mask, BlockMask)
        mask = _selected(module, query, key, cast(Any, attention_mask), **chosen) if narrowed else attention_mask
        call = AttentionCall(module, query, key, value, mask, request, implementation, kwargs, narrowed=narrowed)
        return Proceed(() if stack is None else stack.chain, {} if stack is None else stack.kernels)(call)

    return attend
