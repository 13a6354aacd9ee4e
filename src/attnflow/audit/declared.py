"""The order that a model declares, read from its configuration and modules, or the one that the user states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.audit.fields import Relation
from attnflow.audit.inputs import Inputs, config_of, read
from attnflow.audit.trace import layer_names
from attnflow.masks.build import from_dense
from attnflow.masks.mask import Mask
from attnflow.models.loaded import Loaded, split
from attnflow.order.flow import Flow, analyze

# Layers that keep positions apart, and layers whose state runs forward over the sequence.
_POINTWISE = frozenset({"moe", "mlp", "sparse", "dense"})
_RECURRENT = frozenset({"linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid", "hybrid_sliding"})
_FULL = frozenset({"full_attention", "attention", "global", "indexed_attention", "minimax_m3_sparse"})
_LOCAL = frozenset({"sliding_attention", "local", "sliding_window", "local_attention"})


def declared_order(
    model: nn.Module | Loaded, inputs: str | Sequence[int] | Tensor | Mapping[str, Any], sequence: int = 0
) -> Flow:
    """The order that a model declares for these inputs, as a flow: what an audit without `order` tests against.

    Args:
        model: a model with a configuration, or what `af.load_model` returned.
        inputs: as for `check`.
        sequence: row of the batch, where they differ (padding, packed documents).

    Raises:
        UnsupportedArchitecture: nothing is declared.
    """
    model, tokenizer = split(model)
    relation = declared(model, read(model, inputs, tokenizer))
    rows = [layer[min(sequence, len(layer) - 1)] for layer in relation.layers]
    masks = [from_dense(row, relation.name) for row in rows]
    return analyze(masks[0] if relation.repeat else masks)


def relation_of(model: nn.Module, inputs: Inputs, order: Mask | Sequence[Mask] | Flow | None) -> Relation:
    """The relation to audit against: `order` if given, else what the model declares.

    Raises:
        TypeError: `order` is of another type.
        ValueError: `order` is not square or not of the inputs' size.
        UnsupportedArchitecture: nothing is given and nothing declared.
    """
    if order is None:
        return declared(model, inputs)
    repeat, masks = _masks_of(order)
    for mask in masks:
        if mask.shape != (inputs.size, inputs.size):
            parts = " + ".join(f"{slot.length} of {slot.name}" for slot in inputs.slots)
            raise ValueError(
                f"expected an order over {inputs.size} positions ({parts}), got a mask of shape {mask.shape}"
            )
    dense = {id(mask): mask.dense()[None] for mask in masks}
    name = repr(masks[0]) if repeat else f"{len(masks)} masks, one per layer: {_names([m.name for m in masks])}"
    return Relation(tuple(dense[id(mask)] for mask in masks), repeat, name)


def _masks_of(order: object) -> tuple[bool, tuple[Mask, ...]]:
    if isinstance(order, Mask):
        return True, (order,)
    if isinstance(order, Flow):
        return order.num_layers is None, order.masks
    if isinstance(order, Sequence) and order and all(isinstance(mask, Mask) for mask in cast(Sequence[object], order)):
        return False, tuple(cast(Sequence[Mask], order))
    raise TypeError(
        f"order must be a Mask, a list with one Mask per layer, or a Flow, got {type(order).__name__}; wrap a bool "
        "tensor with af.masks.from_dense"
    )


@dataclass(frozen=True)
class _Stack:
    """How the layers of one stack attend: direction and, per layer, kind and window."""

    causal: bool
    kinds: tuple[str, ...] | None
    window: int | None
    chunk: int | None

    @property
    def recurrent(self) -> bool:
        return any(kind in _RECURRENT for kind in self.kinds or ())


def declared(model: nn.Module, inputs: Inputs) -> Relation:
    """The order that the model declares for these inputs.

    Direction: `is_encoder_decoder`; else `is_causal=False` or `use_bidirectional_attention` in the configuration;
    else `is_decoder=True`; else `is_causal` of the attention modules; else `is_decoder=False` or `attn_type="bi"`;
    else whether the model generates, or has recurrent layers. Windows: `layer_types` with `sliding_window` or
    `attention_chunk_size`. Inputs: padding in a 2D `attention_mask`, the pairs of a 4D one, and, for causal attention,
    `position_ids` that go back (packed documents).
    """
    config = config_of(model)
    if config is None:
        raise _unknown(model, "it has no configuration")
    names = [slot.name for slot in inputs.slots]
    if len(names) > 1 or names[0].startswith("decoder_"):
        return _encoder_decoder(model, inputs)
    stack = _stack(model, config, _direction(model, config))
    slot = inputs.slots[0]
    passed = _given_mask(inputs, "attention_mask", slot.length)
    if passed is not None:
        return Relation((passed,), True, "the pairs that attention_mask allows")
    allow, words = _rows(stack, slot.length, inputs)
    keep = padding(inputs, "attention_mask", slot.length)
    if keep is not None:
        words += f", padding ({int((~keep).sum())} positions)"
    layers = tuple(_without_padding(layer, keep) for layer in allow)
    return Relation(layers, len(layers) == 1, words)


def _direction(model: nn.Module, config: Any) -> bool:
    """True for causal."""
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", None) is True:
        return False
    if getattr(config, "is_decoder", None) is True:
        return True
    flags = {getattr(module, "is_causal", None) for module in model.modules() if next(module.children(), None)}
    flags &= {True, False}
    if flags:
        return True in flags
    if getattr(config, "is_decoder", None) is False or getattr(config, "attn_type", None) == "bi":
        return False
    generates = getattr(model, "can_generate", None)
    if (callable(generates) and generates()) or any(kind in _RECURRENT for kind in _kinds(config) or ()):
        return True
    if "ForMaskedLM" in type(model).__name__:
        return False
    raise _unknown(model, "neither its configuration nor its attention modules say whether it is causal")


def _kinds(config: Any) -> tuple[str, ...] | None:
    for name in ("layer_types", "layers_block_type", "attention_layers"):
        value = getattr(config, name, None)
        if isinstance(value, list | tuple) and value:
            return tuple(str(kind) for kind in cast(Sequence[object], value))
    return None


def _stack(model: nn.Module, config: Any, causal: bool) -> _Stack:
    kinds = _kinds(config)
    window = getattr(config, "sliding_window", None) or getattr(config, "window_size", None)
    if kinds is None and isinstance(getattr(config, "sliding_window", None), int):
        kinds = ("sliding_attention",) * int(config.num_hidden_layers)
    for kind in kinds or ():
        if kind not in _POINTWISE | _RECURRENT | _FULL | _LOCAL | {"chunked_attention"}:
            raise _unknown(model, f"its layer type {kind!r} is not known")
    if not causal and not getattr(config, "use_bidirectional_attention", None) and isinstance(window, int):
        window += 1  # encoders count the half-window without the query itself
    return _Stack(causal, kinds, window, getattr(config, "attention_chunk_size", None))


def _rows(stack: _Stack, n: int, inputs: Inputs) -> tuple[list[Tensor], str]:
    """One relation [rows, n, n] per layer (or a single one for all), and the order in words."""
    q, k = torch.arange(n)[:, None], torch.arange(n)[None, :]
    base = (k <= q if stack.causal else torch.ones(n, n, dtype=torch.bool))[None]
    words = "causal" if stack.causal else "bidirectional"
    documents = _documents(inputs, n) if stack.causal and not stack.recurrent else None
    if documents is not None:
        base = base & (documents[:, :, None] == documents[:, None, :])
        words += f", packed documents (up to {int(documents.max()) + 1} a sequence)"
    if stack.kinds is None:
        return [base], words
    near = (q - k).abs() < (stack.window or n)
    kinds: dict[str, Callable[[], Tensor]] = {"chunked_attention": lambda: base & _same_chunk(stack.chunk, n, inputs)}
    kinds |= dict.fromkeys(_LOCAL, lambda: base & near)
    kinds |= dict.fromkeys(_POINTWISE, lambda: torch.eye(n, dtype=torch.bool)[None])
    relations = {kind: kinds[kind]() if kind in kinds else base for kind in dict.fromkeys(stack.kinds)}
    if len(relations) > 1 or not set(relations) <= _FULL:
        words += f" ({_names(stack.kinds)}" + (f"; window {stack.window})" if _LOCAL & set(relations) else ")")
    return [relations[kind] for kind in stack.kinds], words


def _same_chunk(chunk: int | None, n: int, inputs: Inputs) -> Tensor:
    mask = inputs.kwargs.get("attention_mask")
    left = torch.zeros(1, dtype=torch.int64)
    if isinstance(mask, Tensor) and mask.ndim == 2:  # chunks are counted from the first real token
        left = (mask.cpu().cumsum(-1) == 0).sum(-1)
    index = torch.div(torch.arange(n)[None] - left[:, None], chunk or n, rounding_mode="floor")
    return index[:, :, None] == index[:, None, :]


def _documents(inputs: Inputs, n: int) -> Tensor | None:
    """Document number of each position [rows, n] where position_ids go back; None where they do not."""
    positions = inputs.kwargs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.ndim > 2 or positions.shape[-1] != n:
        return None
    positions = positions.detach().cpu().reshape(-1, n)
    starts = positions.diff(dim=-1) <= 0
    return torch.nn.functional.pad(starts.cumsum(-1), (1, 0)) if starts.any() else None


def padding(inputs: Inputs, name: str, n: int) -> Tensor | None:
    """Which positions are real, bool [batch, n]; None without padding."""
    mask = inputs.kwargs.get(name)
    if not isinstance(mask, Tensor) or mask.ndim > 2 or mask.shape[-1] != n:
        return None
    keep = mask.detach().cpu().reshape(-1, n) != 0
    return None if keep.all() else keep


def _without_padding(allow: Tensor, keep: Tensor | None) -> Tensor:
    """Nothing may come from padding; what padding positions themselves show is nobody's business."""
    return allow if keep is None else (allow & keep[:, None, :]) | ~keep[:, :, None]


def _given_mask(inputs: Inputs, name: str, n: int) -> Tensor | None:
    """A 3D or 4D mask passed by the caller, as allow [rows, n, n] (any head)."""
    mask = inputs.kwargs.get(name)
    if isinstance(mask, Mapping):
        raise UnsupportedArchitecture(f"{name} is a dict of masks: say what it means with order=, one mask per layer")
    if not isinstance(mask, Tensor) or mask.ndim < 3:
        return None
    if mask.shape[-2:] != (n, n):
        raise ValueError(f"{name} must end in [{n}, {n}], got {tuple(mask.shape)}")
    mask = mask.detach().cpu()
    zero_one = not mask.is_floating_point() or bool(((mask == 0) | (mask == 1)).all() and (mask == 1).any())
    allow = mask != 0 if zero_one else mask == 0
    return allow.any(1) if mask.ndim == 4 else allow


def _encoder_decoder(model: nn.Module, inputs: Inputs) -> Relation:
    """Joint positions, encoder first: encoder layers read the encoder, decoder layers are causal and read both."""
    n = inputs.size
    decoder = inputs.slots[-1]
    encoder = inputs.slots[0] if len(inputs.slots) > 1 else None
    split = decoder.offset
    identity = torch.eye(n, dtype=torch.bool)
    source, target = identity.clone(), identity.clone()
    source[:split, :split] = True
    q = torch.arange(n)
    target[split:] = (q[None, :] <= q[split:, None]) | (q[None, :] < split)
    real: list[Tensor] = []
    for slot, name in ((encoder, "attention_mask"), (decoder, "decoder_attention_mask")):
        if slot is not None:
            keep = padding(inputs, name, slot.length)
            every = torch.ones(inputs.batch, slot.length, dtype=torch.bool)
            real.append(every if keep is None else keep.expand(inputs.batch, -1))
    keep = torch.cat(real, dim=-1)
    mask = None if keep.all() else keep
    counts = _encoder_decoder_layers(model)
    layers = (_without_padding(source[None], mask),) * counts[0] + (_without_padding(target[None], mask),) * counts[1]
    words = f"encoder-decoder ({counts[0]} bidirectional layers, then {counts[1]} causal ones that read the encoder)"
    return Relation(layers, False, words + ("" if mask is None else ", padding"))


def _encoder_decoder_layers(model: nn.Module) -> tuple[int, int]:
    stacks = [name.split(".") for name in layer_names(model)]
    encoder, decoder = (sum(part in path for path in stacks) for part in ("encoder", "decoder"))
    if not decoder:
        raise _unknown(model, "no stack of layers is named decoder")
    return encoder, decoder


def _names(kinds: Sequence[str]) -> str:
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def _unknown(model: nn.Module, why: str) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(
        f"cannot tell which order {type(model).__name__} declares: {why}. Pass order=, e.g. af.masks.causal(n), or "
        "one mask per layer"
    )
