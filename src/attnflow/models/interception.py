"""The one way to intercept the attention of a transformers model. It knows neither masks nor biases.

`intercept(model, {module: interceptor}, role=...)` lets `interceptor(call, proceed)` stand around every attention call
of `module`, until `Interception.remove()`:

- `call` is an `AttentionCall`: module, query, key, value, the mask that arrives there, the keywords of the attention
  function, and the implementation that will compute it. The mask is what transformers hands to that implementation:
  None (then `is_causal` of the keywords or of the module says what is meant), a boolean or additive tensor
  [batch or 1, heads or 1, queries, keys], or a `BlockMask`.
- `proceed(call)` computes the call, by the next interceptor or by transformers' own kernel; `call.replace(...)` changes
  what it computes. An interceptor may also return an output of its own: ([batch, queries, heads, head_dim], weights or
  None).
- Interceptors of one module are ordered by role: the one of role "mask", which decides which pairs exist, comes first;
  those of role "pool", which computes something of its own from the call and lets it go on, and "bias" see the mask
  that the first has put in place. Within a role the newest is in force, and the
  older one again when it is removed. Handles may be removed in any order.

Nothing of ours travels through the model's code. Its configs name our attention function, which is registered together
with a mask function under the same name (an attention function alone would silently run without a mask); that mask
function returns transformers' own mask, to the bit. What the model asked for (offsets of a cache, padding, window) is
noted beside it: `call.request`, found by the identity of the mask, and None where the model has made or changed its
mask by itself.

An interception that `replaces_mask` lets the model have a mask that it will not use: always a real one (never None, so
that its request is found again), which under FlexAttention says the padding alone and costs nothing. Modules of the
same configs without such an interceptor get their own mask from the request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final, Literal, cast
from weakref import WeakSet

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.mask_request import FLEX, AttentionMask, MaskRequest, mask_function, request_of
from attnflow.models.sites import eager_kernel

Role = Literal["mask", "pool", "bias"]
Output = tuple[Tensor, Tensor | None]
Kernel = Callable[..., Output]

IMPLEMENTATIONS: Final = ("sdpa", "eager", FLEX)
ROLES: Final = ("mask", "pool", "bias")
_STACK: Final = "_attnflow_interceptors"  # of an attention module, so that copies of the model have them
_CONFIG: Final = "_attn_implementation_internal"  # of a config
_OURS: Final = "attnflow_"  # the rest of the name is kept: transformers looks for "sdpa" and "flex_attention" in it
_REPLACED: Final = "attnflow_masked_"


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of an attention module."""

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

    def replace(self, **changes: Any) -> AttentionCall:
        """The call with other values in some fields."""
        return replace(self, **changes)


@dataclass(frozen=True, eq=False)
class Proceed:
    """Computes a call by the interceptors that follow, and in the end by transformers' own attention function."""

    following: tuple[Interceptor, ...]
    kernels: Mapping[str, Kernel]

    def __call__(self, call: AttentionCall) -> Output:
        """(output [batch, queries, heads, head_dim], weights or None)."""
        if self.following:
            return self.following[0](call, Proceed(self.following[1:], self.kernels))
        function = self.kernels.get(call.implementation) or kernel(call.module, call.implementation)
        return function(call.module, call.query, call.key, call.value, call.mask, **call.kwargs)


Interceptor = Callable[[AttentionCall, Proceed], Output]


@dataclass(eq=False)
class _Claim:
    """What one interception wants of the configs; kept by the modules, so that copies and pickles have their own."""

    role: Role
    implementation: str | None
    replaces_mask: bool
    configs: list[tuple[PreTrainedConfig, object]]  # with the name that each had before any claim
    number: int = field(default_factory=count().__next__)

    def __post_init__(self) -> None:
        _claims.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _claims.add(self)


@dataclass(frozen=True, eq=False)
class _Stack:
    """The interceptors of one module, the newest last."""

    entries: tuple[tuple[_Claim, Interceptor], ...]
    kernels: Mapping[str, Kernel]
    chain: tuple[Interceptor, ...] = ()  # those in force, in the order in which they run
    replaces_mask: bool = False

    def __post_init__(self) -> None:
        newest = {claim.role: interceptor for claim, interceptor in self.entries}
        object.__setattr__(self, "chain", tuple(newest[role] for role in ROLES if role in newest))
        object.__setattr__(self, "replaces_mask", any(claim.replaces_mask for claim, _ in self.entries))


_claims: Final[WeakSet[_Claim]] = WeakSet()


class Interception:
    """Interceptors in force; `remove()` takes them away, in any order with others.

    Attributes:
        num_modules: how many modules it stands around.
    """

    def __init__(self, claim: _Claim, modules: Sequence[nn.Module]) -> None:
        self._claim = claim
        self._modules = list(modules)
        self.num_modules = len(self._modules)

    @property
    def active(self) -> bool:
        """Whether it is still in force, or under a newer one of its role."""
        return bool(self._modules)

    def remove(self, *, keep_changes: bool = False) -> list[str]:
        """Leave modules and configs as if this had never been; a second call does nothing.

        Returns the implementations that somebody else has set since, by which the interceptors were out of force;
        `keep_changes` says whether they stay.
        """
        if not self._modules:
            return []
        names = {id(config): config.__dict__[_CONFIG] for config, _ in self._claim.configs}
        changed = {id(config) for config, _ in self._claim.configs if names[id(config)] != _name(config)}
        for module in self._modules:
            stack: _Stack = module.__dict__[_STACK]
            entries = tuple(entry for entry in stack.entries if entry[0] is not self._claim)
            if entries:
                setattr(module, _STACK, _Stack(entries, stack.kernels))
            else:
                delattr(module, _STACK)
        _claims.discard(self._claim)
        for config, before in self._claim.configs:
            if not (keep_changes and id(config) in changed):
                config.__dict__[_CONFIG] = _name(config) if _claims_of(config) else before
        self._modules = []
        return [str(names[one]) for one in changed]


def intercept(
    around: Sequence[PreTrainedModel],
    interceptors: Mapping[nn.Module, Interceptor],
    *,
    role: Role,
    implementation: str | None = None,
    replaces_mask: bool = False,
) -> Interception:
    """Let each interceptor stand around the attention of its module; see the docstring of this file.

    Copies and pickles of the model carry the interceptors, which must therefore be picklable.

    Args:
        around: models whose configs name the implementation of the modules, as `sites.models_around` gives them.
        interceptors: for each attention module, of those that call the attention interface.
        role: its place among others on the same module.
        implementation: what computes attention from now on, for all `around`; None keeps what each has.
        replaces_mask: whether the interceptors do without the model's own mask.

    Raises:
        UnsupportedArchitecture: a module without the implementation. Nothing is changed then.
    """
    configs = {id(owner.config): owner.config for owner in around}
    configs |= {id(m.config): cast(PreTrainedConfig, m.config) for m in interceptors if hasattr(m, "config")}
    kernels = {module: _kernels(module, implementation or _module_implementation(module)) for module in interceptors}
    _register()
    before = [(config, _before(config)) for config in configs.values()]
    claim = _Claim(role, implementation, replaces_mask, before)
    for module, interceptor in interceptors.items():
        stack = cast("_Stack | None", module.__dict__.get(_STACK))
        old = stack or _Stack((), {})
        setattr(module, _STACK, _Stack((*old.entries, (claim, interceptor)), {**old.kernels, **kernels[module]}))
    for config, _ in before:  # past the property, which would also set sub-configs
        config.__dict__[_CONFIG] = _name(config)
    return Interception(claim, list(interceptors))


def base_implementation(config: PreTrainedConfig) -> str:
    """The implementation that a config names, without our prefix; "sdpa" if it names none."""
    name = str(config.__dict__[_CONFIG] or "sdpa")
    return name.removeprefix(_REPLACED).removeprefix(_OURS)


def check_implementation(owner: PreTrainedModel, name: str, origin: str, purpose: str) -> None:
    """Raise unless `owner` runs with the implementation `name`, and that can be intercepted.

    `origin` is what named it and `purpose` what for ("mask", "bias"), for the messages.
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
    """The attention function that transformers itself would call for `module`."""
    if implementation == "eager":
        return cast(Kernel, eager_kernel(module))
    return cast(Kernel, ALL_ATTENTION_FUNCTIONS[implementation])


def _module_implementation(module: nn.Module) -> str:
    config = getattr(module, "config", None)
    return base_implementation(config) if isinstance(config, PreTrainedConfig) else "sdpa"


def _kernels(module: nn.Module, implementation: str) -> dict[str, Kernel]:
    """What a call of the module can end in; looked up now, because a compiler cannot."""
    names = (FLEX, "sdpa") if implementation == FLEX else (implementation,)  # sdpa stands in on the CPU
    return {name: kernel(module, name) for name in names}


def _name(config: PreTrainedConfig) -> object:
    """The name that a config has under the claims on it."""
    claims = _claims_of(config)
    before = str(next(name for one, name in claims[0].configs if one is config) or "sdpa")
    chosen = [claim.implementation for claim in claims if claim.implementation is not None]
    base = chosen[-1] if chosen else before.removeprefix(_REPLACED).removeprefix(_OURS)
    replaced = before.startswith(_REPLACED) or any(claim.replaces_mask for claim in claims)
    return (_REPLACED if replaced else _OURS) + base


def _before(config: PreTrainedConfig) -> object:
    """What to set a config back to when the last claim on it goes."""
    claims = _claims_of(config)
    current = config.__dict__[_CONFIG]
    if claims and current == _name(config):
        return next(name for one, name in claims[0].configs if one is config)
    return current


def _claims_of(config: PreTrainedConfig) -> list[_Claim]:
    """The claims on a config, the oldest first."""
    claims = [claim for claim in _claims if any(one is config for one, _ in claim.configs)]
    return sorted(claims, key=lambda claim: claim.number)


def _register() -> None:
    """Register attention and mask function under each of our names; harmless when repeated."""
    for implementation in IMPLEMENTATIONS:
        for prefix in (_OURS, _REPLACED):
            replaced = prefix == _REPLACED
            AttentionInterface.register(prefix + implementation, _attention(implementation, replaced))
            AttentionMaskInterface.register(prefix + implementation, mask_function(implementation, replaced))


def _attention(implementation: str, replaced: bool) -> Kernel:
    """The attention function registered for an implementation."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: AttentionMask = None,
        **kwargs: Any,
    ) -> Output:
        stack = cast("_Stack | None", getattr(module, _STACK, None))
        request = request_of(attention_mask)
        if replaced and request is not None and not (stack is not None and stack.replaces_mask):
            attention_mask = request.own(implementation)
        call = AttentionCall(module, query, key, value, attention_mask, request, implementation, kwargs)
        return Proceed(() if stack is None else stack.chain, {} if stack is None else stack.kernels)(call)

    return attend
