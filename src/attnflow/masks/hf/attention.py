"""The attention functions registered with transformers: each gives a layer its own mask, or its bias."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.bias.hf.forward import biased
from attnflow.bias.hf.hooks import CHILD
from attnflow.bias.layer import LayerBias
from attnflow.masks.hf.placement import FLEX, Placement, place
from attnflow.masks.hf.tables import MaskTables
from attnflow.models.sites import eager_kernel

IMPLEMENTATIONS: Final = ("sdpa", "eager", FLEX)
ATTRIBUTE: Final = "_attnflow_rule"
_PREFIX: Final = "attnflow_"  # the rest of the name is kept: transformers looks for "sdpa" and "flex_attention" in it

Attention = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, eq=False)
class Rule:
    """What one attention module does under `attach`; kept as an attribute of the module, so that copies have it.

    Attributes:
        name: the module's path, for messages.
        tables: its mask, or None to keep the model's own.
        cross: whether its keys are another sequence's.
        crop: whether keys beyond the sequence may be dropped.
        flex_on_cpu: what computes FlexAttention on the CPU.
        kernels: the real attention function per implementation.
    """

    name: str
    tables: MaskTables | None
    cross: bool
    crop: bool
    flex_on_cpu: Literal["forward", "sdpa"]
    kernels: dict[str, Attention]


def registered_name(implementation: str) -> str:
    """The name under which our version of an implementation is registered, as a string object of its own."""
    return "".join([_PREFIX, implementation])


def is_registered(name: object) -> bool:
    """Whether a config's implementation is one of ours."""
    return isinstance(name, str) and name.startswith(_PREFIX)


def base_implementation(name: str) -> str:
    """The implementation behind a registered name; other names are their own."""
    return name.removeprefix(_PREFIX)


def kernel(module: nn.Module, implementation: str) -> Attention:
    """The attention function that transformers itself would call for `module`."""
    if implementation == "eager":
        return cast(Attention, eager_kernel(module))
    return cast(Attention, ALL_ATTENTION_FUNCTIONS[implementation])


def register() -> None:
    """Register attention and mask function of every implementation under one name each; harmless when repeated.

    An attention function alone would run with the mask `None`: transformers makes no mask for a name that its mask
    registry does not know.
    """
    for implementation in IMPLEMENTATIONS:
        AttentionInterface.register(registered_name(implementation), _attention(implementation))
        AttentionMaskInterface.register(registered_name(implementation), place)


def _attention(implementation: str) -> Attention:
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object = None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        rule = cast("Rule | None", getattr(module, ATTRIBUTE, None))

        def base() -> tuple[Tensor, Tensor | None]:
            if rule is None or rule.tables is None:
                function = kernel(module, implementation) if rule is None else rule.kernels[implementation]
                own = attention_mask
                if isinstance(attention_mask, Placement):
                    own = attention_mask.original(implementation)
                return function(module, query, key, value, own, **kwargs)
            return _masked(module, rule, rule.tables, implementation, query, key, value, attention_mask, kwargs)

        bias = getattr(module, CHILD, None)
        if not isinstance(bias, LayerBias) or not (bias.enabled or bias.observer is not None):
            return base()
        tables = None if rule is None else rule.tables
        mask = attention_mask if rule is None or tables is None else _placement(rule, query, key, attention_mask)
        crop = rule is not None and rule.crop
        return biased(module, bias, base, implementation == "eager", mask, tables, crop, query, key, value, kwargs)

    return attend


def _masked(
    module: nn.Module,
    rule: Rule,
    tables: MaskTables,
    implementation: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    kwargs: dict[str, object],
) -> tuple[Tensor, Tensor | None]:
    """Attention under a mask of ours, by the kernel that transformers would call."""
    placement = _placement(rule, query, key, attention_mask)
    route = _route(rule, implementation, query, key, value, kwargs)
    mask, empty = placement.native(tables, rule.cross, rule.crop, route, query.device, query.dtype)
    output, weights = rule.kernels[route](module, query, key, value, mask, **kwargs)
    if empty is not None:
        output = output.masked_fill(empty[:, :, None, None], 0.0)
        if weights is not None and route == "eager":
            weights = weights.masked_fill(empty[:, None, :, None], 0.0)
    return output, weights


def _placement(rule: Rule, query: Tensor, key: Tensor, given: object) -> Placement:
    """The call's placement, checked against the tensors that it is about."""
    batch, _, queries, _ = query.shape
    keys = key.shape[2]
    if given is None and (queries == keys or rule.cross):
        return Placement(batch, queries, keys)  # vision encoders ask for no mask at all
    if not isinstance(given, Placement):
        what = "None" if given is None else f"{type(given).__name__} of shape {tuple(getattr(given, 'shape', ()))}"
        raise ValueError(
            f"{rule.name} was given the attention mask {what}, which would bypass the mask of attach. Pass a 2D "
            "attention_mask [batch, keys] for padding or none; put everything else into the mask itself. If you "
            "passed no such mask, the model makes its own: then this architecture is not supported."
        )
    if given.shape[2:] != (queries, keys):
        raise UnsupportedArchitecture(
            f"{rule.name} attends from {queries} queries to {keys} keys where transformers asked for a mask of "
            f"{given.shape[2]} queries and {given.shape[3]} keys: positions of the mask cannot be matched to tokens"
        )
    return given


def _route(
    rule: Rule, implementation: str, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, object]
) -> str:
    """The implementation that computes this call; differs from the chosen one only as `flex_on_cpu` says."""
    if implementation == FLEX and query.device.type == "cpu":
        if rule.flex_on_cpu == "sdpa":
            lost = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
            if lost:
                raise ValueError(
                    f"{rule.name} passes {' and '.join(lost)}, which sdpa cannot apply in place of flex_attention; "
                    "use attn_implementation='eager'"
                )
            return "sdpa"
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            raise RuntimeError(
                "FlexAttention computes no gradients on the CPU. Use attn_implementation='sdpa' (the same numbers), "
                "or flex_on_cpu='sdpa' to let SDPA stand in on the CPU only; torch.no_grad() for inference"
            )
    return implementation
