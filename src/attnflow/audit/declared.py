"""The order that a call declares through its inputs, the masks that its model asks for, and its configuration.

The strongest source is an order that the caller gives. Then come documents and padding, which must stay apart in every
layer, and the direction in the configuration. Windows, chunks and image blocks that the model asks transformers for
follow, then windows of the configuration. A mask of pairs in the inputs is itself tested, so it declares nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.markup import plural
from attnflow.audit.fields import Relation
from attnflow.audit.inputs import Inputs, Slot, read
from attnflow.audit.packing import DOCUMENT_ARGUMENTS, allowed_pairs, documents
from attnflow.audit.report import Violation
from attnflow.audit.requests import Disagreement, disagreement, within_blocks
from attnflow.audit.survey import CallSurvey, LayerCall, survey
from attnflow.masks.batches import MaskGrid
from attnflow.masks.build import from_dense
from attnflow.masks.diagnosis import equal_to
from attnflow.masks.mask import Mask, not_a_mask
from attnflow.models.anatomy.mixing import moves_between_positions
from attnflow.models.passes.evaluation import evaluating, unchanged
from attnflow.models.subject import Loaded, Subject
from attnflow.order.flow import Flow, analyze

if TYPE_CHECKING:
    from attnflow.models.passes.mask_request import MaskRequest

Order = Mask | MaskGrid | Sequence[Mask | MaskGrid] | Flow | Literal["mask"] | None

# Layers that keep positions apart, and layers whose state runs forward over the sequence.
_POINTWISE = frozenset({"moe", "mlp", "sparse", "dense"})
_RECURRENT = frozenset({"linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid", "hybrid_sliding"})
_FULL = frozenset({"full_attention", "attention", "global", "indexed_attention", "minimax_m3_sparse"})
_LOCAL = frozenset({"sliding_attention", "local", "sliding_window", "local_attention"})


def declared_order(
    model: nn.Module | Loaded, inputs: str | Sequence[int] | Tensor | Mapping[str, Any], sequence: int = 0
) -> Flow:
    """Return the order that a model declares for these inputs, as a flow; `check` tests against it by default.

    Args:
        model: a model with a configuration, or a result of `af.load_model`.
        inputs: as for `check`.
        sequence: row of the batch, if rows differ (padding, packed documents).

    Raises:
        UnsupportedArchitecture: the model declares no order.

    Cost: one forward pass.
    """
    subject = Subject.of(model).inside
    with unchanged(subject.model), evaluating(subject.model):
        return flow_of(survey(read(subject, inputs)), sequence)


def flow_of(seen: CallSurvey, sequence: int = 0) -> Flow:
    relation = declared(seen)
    rows = [layer[min(sequence, len(layer) - 1)] for layer in relation.layers]
    masks = [from_dense(row, relation.name) for row in rows]
    # causal(n=64) says more than a sentence about all layers, which says more than the lengths of documents
    known = [(mask, equal_to(mask)) for mask in masks]
    named = [mask if plain is None or plain.name == "document" else plain for mask, plain in known]
    return analyze(named[0] if relation.repeat else named)


def relation_of(seen: CallSurvey, order: Order) -> Relation:
    inputs = seen.inputs
    if order is None:
        return declared(seen)
    if isinstance(order, str) and order == "mask":
        slot = inputs.slots[-1]
        allow = pairs_passed(inputs, slot)
        if allow is None or len(inputs.slots) > 1:
            raise ValueError("order='mask' needs an attention_mask of pairs, [batch, heads, n, n], among the inputs")
        return Relation((allow,), True, "the pairs that attention_mask allows")
    repeat, masks = _masks_of(order)
    for mask in masks:
        if (mask.num_queries, mask.num_keys) != (inputs.size, inputs.size):
            parts = " + ".join(f"{slot.length} of {slot.title}" for slot in inputs.slots)
            raise ValueError(f"expected an order over {inputs.size} positions ({parts}), got a mask {mask.shape}")
        if isinstance(mask, MaskGrid) and mask.shape[0] not in (1, inputs.batch):
            raise ValueError(f"expected an order for {inputs.batch} sequences, got {mask!r}")
    dense = {id(mask): mask.dense().any(1) if isinstance(mask, MaskGrid) else mask.dense()[None] for mask in masks}
    name = repr(masks[0])
    if any(repr(mask) != name for mask in masks):
        counts = Counter(mask.name if isinstance(mask, Mask) else repr(mask) for mask in masks)
        name = f"{len(masks)} masks, one per layer: {', '.join(f'{count} {kind}' for kind, count in counts.items())}"
    rows = max(map(len, dense.values()))
    return Relation(tuple(dense[id(mask)].expand(rows, -1, -1) for mask in masks), repeat, name)


def _masks_of(order: object) -> tuple[bool, tuple[Mask | MaskGrid, ...]]:
    if isinstance(order, Mask | MaskGrid):
        return True, (order,)
    if isinstance(order, Flow):
        return order.num_layers is None, order.masks
    if isinstance(order, Sequence) and not isinstance(order, str):
        masks = tuple(cast(Sequence[object], order))
        if masks and all(isinstance(mask, Mask | MaskGrid) for mask in masks):
            return False, cast(tuple[Mask | MaskGrid, ...], masks)
    raise TypeError(
        "order must be a Mask, a batch of masks, a list with one of them per layer, a Flow, or 'mask' for the pairs of "
        f"attention_mask; {not_a_mask(order)}"
    )


def declared(seen: CallSurvey) -> Relation:
    inputs = seen.inputs
    if inputs.subject.text_config is None:
        raise _unknown(inputs, "it has no configuration")
    slot, *others = inputs.slots
    if others or slot.prefix:
        return _encoder_decoder(seen)
    hidden = inputs.kwargs.get("perm_mask")  # of XLNet: 1 hides a key from a query, but no token from itself
    if isinstance(hidden, Tensor):
        allow = (hidden.detach().cpu() == 0).expand(inputs.batch, slot.length, slot.length)
        return Relation(tuple(_of_one_batch([allow], inputs.real_in(slot))), True, "the order of perm_mask")
    stack = _DeclaredStack(seen.config, inputs, slot, _causal(seen))
    real = stack.real
    layers = _of_one_batch([stack.relation(call) for call in seen.calls] or [stack.base], real)
    repeat = all(torch.equal(layer, layers[0]) for layer in layers)
    words = stack.words(len(seen.calls)) + ("" if real.all() else f"; padding ({int((~real).sum())} positions)")
    return Relation(tuple(layers[:1] if repeat else layers), repeat, words, stack.disputes(), tuple(stack.unsure))


class _DeclaredStack:
    def __init__(self, config: Any, inputs: Inputs, slot: Slot, causal: bool) -> None:
        self.causal, self.length = causal, slot.length
        n = slot.length
        q, k = torch.arange(n)[:, None], torch.arange(n)[None, :]
        self.distance = (q - k).abs()
        self.direction = (k <= q if causal else torch.ones(n, n, dtype=torch.bool))[None]
        ids = inputs.kwargs.get("input_ids")
        length = ids.shape[-1] if isinstance(ids, Tensor) else n
        others = any(isinstance(v, Tensor) and v.is_floating_point() for v in inputs.kwargs.values())
        if n > length and n % length == 0 and not others and n - 1 not in slot.places:  # else virtual tokens in front
            raise _unknown(inputs, f"its layers get {n} positions for {length} tokens, in streams of their own")
        if length != n and documents(inputs, replace(slot, length=length))[1]:
            raise _unknown(inputs, f"its inputs tell documents of {length} positions apart, and its layers get {n}")
        self.together, self.packed = documents(inputs, slot)
        self.base = self.direction & self.together
        self.real = inputs.real_in(slot)
        self.kinds = _kinds(config)
        self.window = _size(config, "sliding_window") or _size(config, "window_size")
        if self.kinds is None and _size(config, "sliding_window") is not None:
            self.kinds = ("sliding_attention",) * int(config.num_hidden_layers)
        if not causal and not getattr(config, "use_bidirectional_attention", None) and self.window is not None:
            self.window += 1  # encoders count the half-window without the query itself
        self.chunk = _size(config, "attention_chunk_size")
        self.inputs, self.slot = inputs, slot
        families = (getattr(kind, "model_type", None) for kind in (config, inputs.subject.config))
        self.family = next((str(family) for family in families if family), "")
        self.labels: list[str] = []  # of the layer calls so far
        self.unsure: list[str] = []
        self._disputed: dict[str, tuple[LayerCall, Disagreement]] = {}  # the first layer call by what disagrees
        self._relations: dict[tuple[str | None, int], tuple[Tensor, str, Disagreement | None]] = {}
        self.blocks = torch.zeros(1, n, n, dtype=torch.bool)  # later positions that the model asks for, if causal

    def relation(self, call: LayerCall) -> Tensor:
        """What one layer call may read, [rows, n, n], by its configuration and by the mask that the model asks for."""
        kind = self.kinds[call.index] if self.kinds is not None and call.index < len(self.kinds) else None
        request = call.asked
        if request is not None and self._reads_more(call, kind):
            kind = request = None
        key = kind, id(request)
        if key not in self._relations:  # layers share what is asked for
            self._relations[key] = self._asked(kind, request)
        allow, label, dispute = self._relations[key]
        if dispute is not None:
            self._disputed.setdefault(dispute.words, (call, dispute))
        self.labels.append(label)
        return allow

    def disputes(self) -> tuple[tuple[Violation, bool], ...]:
        disputed: list[tuple[Violation, bool]] = []
        for words, (call, dispute) in self._disputed.items():
            row, *pair = dispute.pairs.nonzero()[0].tolist()
            target, source = (place + self.slot.offset for place in pair)
            named = Violation("request", call.index, call.name, source, target, 0.0, row, row, why=words)
            disputed.append((named, dispute.wider))
        return tuple(disputed)

    def _reads_more(self, call: LayerCall, kind: str | None) -> bool:
        """Whether a layer reads more than the mask of its attention says: keys of its own making, or a convolution."""
        known = kind is None or kind == "chunked_attention" or kind in _POINTWISE | _RECURRENT | _FULL | _LOCAL
        return not known or any(map(moves_between_positions, self.inputs.model.get_submodule(call.name).modules()))

    def _asked(self, kind: str | None, request: MaskRequest | None) -> tuple[Tensor, str, Disagreement | None]:
        if request is None or kind in _POINTWISE or kind in _RECURRENT:
            return *self._configured(kind), None
        from attnflow.models.passes.mask_request import asks_causal, pairs_asked

        asked = pairs_asked(request).expand(-1, self.length, -1)
        padding, real = request.padding, self.real
        if padding is not None and padding.shape[-1] == self.length:  # a model may know padding by its token
            real = real & padding.bool().cpu()
        within = asked & self.base
        allow, label = self._configured(kind)
        sized = {**dict.fromkeys(_FULL, True), **dict.fromkeys(_LOCAL, self.window), "chunked_attention": self.chunk}
        if not sized.get(kind or "") and (self.base & real[:, None, :] & real[:, :, None] & ~within).any():
            allow, label = within, self._described(within, real)
        later = asked & ~self.direction & real[:, :, None] & self.together
        accepted, problem = torch.zeros_like(later), ""
        # Image tokens may see one another. A causal head that asks for all pairs is not believed.
        if later.any() and asks_causal(request):
            accepted, problem = within_blocks(later, self.family, self.inputs, self.slot)
            self.blocks = self.blocks | accepted
        if problem == "unknown":
            self.unsure.append("the mask lets positions see later ones, and nothing says that they are of one block")
        words = problem or self._described(asked, real), label or ("causal" if self.causal else "bidirectional")
        allow = allow | accepted
        real = real if self.inputs.argument(self.slot, "attention_mask") is None else self.real
        return allow, label, disagreement(asked, allow, self.base, self.together, real, words)

    def _configured(self, kind: str | None) -> tuple[Tensor, str]:
        if kind in _POINTWISE:
            return torch.eye(self.length, dtype=torch.bool)[None], "nothing but itself"
        if kind is None or kind in _FULL or kind in _RECURRENT or (kind in _LOCAL and self.window is None):
            return self.base, ""
        if kind in _LOCAL and self.window is not None:
            return self.base & (self.distance < self.window), f"window {self.window}"
        if kind == "chunked_attention":
            first = (self.together & self.real[:, None, :]).float().argmax(-1)  # real token of the same document
            index = (torch.arange(self.length) - first) // (self.chunk or self.length)
            return self.base & (index[:, :, None] == index[:, None, :]), f"chunks of {self.chunk}"
        raise _unknown(self.inputs, f"its layer type {kind!r} is not known")

    def _described(self, within: Tensor, real: Tensor) -> str:
        pairs = real[:, None, :] & real[:, :, None]
        if (within | ~pairs).all():
            return "all pairs"
        within = within & self.base
        reach = int(torch.where(within & real[:, :, None], self.distance, 0).max())
        position = torch.arange(self.length)
        causal, chunk = position[:, None] >= position, position // (self.chunk or self.length)
        if (self.base & causal & pairs == within & pairs).all():
            return "causal"
        if (self.base & (self.distance <= reach) & pairs == within & real[:, :, None]).all():
            return f"window {reach + 1}"
        if (self.base & (chunk[:, None] == chunk) & pairs == within & pairs).all():
            return f"chunks of {self.chunk} from position 0"
        prefix = within[:, :1].sum(-1)[:, :, None]
        if torch.equal(causal | ((position[:, None] < prefix) & (position < prefix)), within):
            return f"causal after a prefix of {int(prefix.max())} tokens"
        return "a pattern of its own"

    def words(self, calls: int) -> str:
        words = ("causal" if self.causal else "bidirectional") + (f" within {self.packed}" if self.packed else "")
        labels = Counter(label for label in self.labels if label)
        parts = [f"{label} in {count} of {plural(calls, 'layer')}" for label, count in labels.items()]
        if self.blocks.any():
            inside = (self.blocks.any(-1) | self.blocks.any(-2)).sum(-1)
            parts.append(f"up to {plural(int(inside.max()), 'token')} of a sequence see later ones of their own block")
        return "; ".join([words, *parts])


def _causal(seen: CallSurvey) -> bool:
    """The direction: of the configuration, the masks that the model asks for, its attention modules, or its use."""
    model, config, modules = seen.inputs.model, seen.config, seen.own_modules()
    flags = {name: getattr(config, name, None) for name in ("is_causal", "causal", "use_bidirectional_attention")}
    if False in (flags["is_causal"], flags["causal"]) or flags["use_bidirectional_attention"] is True:
        return False
    if getattr(config, "is_decoder", None) is True:
        return True
    generates = _generates(seen)
    asks, both_ways = _asks_causal(seen, config)
    if not generates and both_ways and not any(_triangular(b) for m in modules for b in m.buffers(recurse=False)):
        return False
    flagged = {getattr(module, "is_causal", None) for module in modules if next(module.children(), None) is not None}
    if flagged & {True, False}:
        return True in flagged
    if getattr(config, "is_decoder", None) is False or getattr(config, "attn_type", None) == "bi":
        return False
    if generates or any(kind in _RECURRENT for kind in _kinds(config) or ()):
        return True
    if "ForMaskedLM" in type(model).__name__:
        return False
    if asks or ("pixel_values" in seen.inputs.kwargs and "input_ids" not in seen.inputs.kwargs):
        return bool(asks)  # images have no direction of their own
    raise _unknown(seen.inputs, "neither its configuration nor its attention modules say whether it is causal")


def _generates(seen: CallSurvey) -> bool:
    """Whether the stack generates: a part of the model beside it may, with a head of its own (CLVP's speech)."""

    def can(module: Any) -> bool:
        return callable(found := getattr(module, "can_generate", None)) and bool(found())

    model: Any = seen.inputs.model
    parts = {f"{name}.": part for name, part in model.named_modules() if name and can(part)}
    if not can(model) or not parts or any(call.name.startswith(tuple(parts)) for call in seen.calls):
        return can(model)
    head = model.get_output_embeddings()
    return head is not None and not any(head is module for part in parts.values() for module in part.modules())


def _asks_causal(seen: CallSurvey, config: Any) -> tuple[bool | None, bool]:
    """(whether a mask that is asked for is causal, None without any; whether none is, nor a head that exists of it)."""
    requests = [call.asked for call in seen.calls if call.asked is not None]
    if not requests:
        return None, False
    from attnflow.models.passes.mask_request import asks_causal, has_causal_head

    causal = any(map(asks_causal, requests))
    return causal, not causal and not has_causal_head(config)


def _triangular(buffer: Tensor) -> bool:
    """Whether a buffer holds the pairs k <= q and so narrows what attention asks for (ImageGPT)."""
    square = buffer.ndim > 1 and buffer.shape[-1] == buffer.shape[-2] > 1
    return square and bool((buffer != 0).eq(torch.ones_like(buffer, dtype=torch.bool).tril()).all())


def _size(config: Any, name: str) -> int | None:
    """A size that all layers share; None if it is absent or differs between layers."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError
        return None
    return value if isinstance(value, int) else None


def _kinds(config: Any) -> tuple[str, ...] | None:
    for name in ("layer_types", "layers_block_type", "attention_layers"):
        value = getattr(config, name, None)
        if isinstance(value, list | tuple) and value:
            return tuple(str(kind) for kind in cast(Sequence[object], value))
    return None


def pairs_passed(inputs: Inputs, slot: Slot) -> Tensor | None:
    """The union over heads of a mask of pairs in the inputs, as allow [rows, n, n]; None without one."""
    mask = inputs.kwargs.get("attention_mask")
    if isinstance(mask, Mapping):
        raise UnsupportedArchitecture("attention_mask is a dict of masks: give the order with order=")
    return None if mask is None else allowed_pairs(mask, inputs.batch, slot.length)


def _encoder_decoder(seen: CallSurvey) -> Relation:
    """Joint positions, encoder first: encoder layers read the encoder, decoder layers are causal and read both."""
    inputs = seen.inputs
    if any(inputs.kwargs.get(name) is not None for name in DOCUMENT_ARGUMENTS):
        raise _unknown(inputs, "documents packed into an encoder-decoder are not read")
    n, *_, decoder = inputs.size, *inputs.slots
    stacks: dict[int, _DeclaredStack] = {}
    for slot in inputs.slots:
        config = getattr(inputs.subject.text_config, "decoder" if slot is decoder else "encoder", None)
        config = config if hasattr(config, "num_hidden_layers") else None
        stacks[slot.offset] = _DeclaredStack(config, inputs, slot, causal=slot is decoder)
    layers: list[Tensor] = []
    for call in seen.calls:
        slot = seen.slot_of(call)
        within = stacks[slot.offset].relation(call)
        allow = torch.eye(n, dtype=torch.bool).repeat(len(within), 1, 1)
        rows = slice(slot.offset, slot.offset + slot.length)
        allow[:, rows, rows] = within
        if slot is decoder:
            allow[:, rows, : slot.offset] = True
        layers.append(allow)
    above = sum(seen.slot_of(call) is decoder for call in seen.calls)
    words = (
        f"encoder-decoder ({len(layers) - above} bidirectional layers, then {above} causal ones that read the encoder)"
    )
    disputed = tuple(dispute for stack in stacks.values() for dispute in stack.disputes())
    unsure = tuple(words for stack in stacks.values() for words in stack.unsure)
    words += "" if inputs.real.all() else "; padding"
    return Relation(tuple(_of_one_batch(layers, inputs.real)), False, words, disputed, unsure)


def _of_one_batch(layers: list[Tensor], real: Tensor) -> list[Tensor]:
    """Forbid reading from padding; keep one row if all sequences agree. What padding itself reads is not judged."""
    layers = [(layer & real[:, None, :]) | ~real[:, :, None] for layer in layers]
    if all(bool((layer == layer[:1]).all()) for layer in layers):
        return [layer[:1] for layer in layers]
    rows = max(len(layer) for layer in layers)
    return [layer.expand(rows, -1, -1) for layer in layers]


def _unknown(inputs: Inputs, why: str) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(
        f"declared order of {inputs.subject.kind}: unknown; {why}. Pass order=, e.g. af.masks.causal(n), or one mask "
        "per layer"
    )
