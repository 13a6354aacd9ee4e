"""Reads the masks that a model's attention really uses, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.markup import part_name
from attnflow.masks.batches import MaskGrid
from attnflow.masks.build import from_block_mask, from_dense
from attnflow.masks.diagnosis import equal_to
from attnflow.masks.in_model import LayerMask, ModelMasks
from attnflow.masks.mask import Mask
from attnflow.models.anatomy.mixing import attends, moves_between_positions
from attnflow.models.anatomy.sites import Site, mixers_beside, models_around
from attnflow.models.passes.evaluation import REFUSALS, refusal, still
from attnflow.models.passes.interception import (
    IMPLEMENTATIONS,
    AttentionCall,
    Output,
    Proceed,
    base_implementation,
    in_force,
    intercept,
    readable_implementation,
)
from attnflow.models.subject import Loaded, Subject, Text

Place = tuple[str, str, str]  # kind, half and path of the list of layers
_ADVICE: Final = "af.audit.measure measures its order"
_MASKED: Final = -9e3  # what is added to a score instead of removing its pair is -1e4 or less; ALiBi adds more


def from_model(model: nn.Module | Loaded, inputs: Text, *, tokenizer: Any = None) -> ModelMasks:
    """Read the masks under which a model attends to these inputs: what its attention does, not what a config says.

    A pair (query, key) is allowed where the mask leaves it a weight in any head of a layer. Windows, padding, attached
    masks and masks in the inputs all show. Packed documents show as `model(**inputs)` keeps them apart. By
    `position_ids` alone it does not beside a cache: pass use_cache=False among the inputs if you train so. Under eager
    attention a row of padding attends to all keys, if its mask leaves none. Layers with one mask are listed together.
    Heads are separate only where the model or an attached mask separates them.

    Args:
        model: a transformers model, or what `af.load_model` returned.
        inputs: a text, token ids, or the model's named inputs, of one sequence. Both halves of an encoder-decoder
            model read a text: the decoder all of it but the last token.
        tokenizer: needed for a text unless `model` has one; for token ids, it names the tokens.

    Returns:
        The distinct masks, each with its layers. `print` and `af.report.figure` show them.

    Raises:
        UnsupportedArchitecture: the model does not attend, or in a way that shows no weights.
        ValueError: a text without a tokenizer, or several sequences.

    Cost: one forward pass, with the weights of one layer at a time.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2))
    >>> from_model(model, [5, 6, 7])
    LlamaForCausalLM, 3 tokens: 1 mask
    layers 0, 1 attention: causal(n=3), 66.7\xa0% allowed
    """
    subject = Subject.of(model, tokenizer).inside
    named = _arguments(subject, inputs)
    found = _Found()
    try:
        sites = subject.sites
    except UnsupportedArchitecture:
        beside = _told(subject, named, found)
    else:
        _watch(subject, sites, named, found)
        beside = mixers_beside(subject.model, sites)
    ids = {name: value[0].tolist() for name, value in named.items() if name.endswith("input_ids")}
    texts = {name: tuple(subject.texts_in_sequence(listed)) for name, listed in ids.items()}
    two = "decoder_input_ids" in texts
    tokens, encoder = (texts.get(name, ()) for name in ("decoder_input_ids" if two else "input_ids", "input_ids"))
    return ModelMasks(subject.name, tokens, encoder if two else (), found.parts(), tuple(beside))


def _arguments(subject: Subject, inputs: Text) -> dict[str, Tensor]:
    two = subject.encodes_and_decodes and subject.accepts("decoder_input_ids")
    named = subject.read(inputs, ids=two and not isinstance(inputs, Mapping))
    for name, value in named.items():
        if name.endswith("input_ids") and len(value) != 1:
            raise ValueError(f"expected one sequence, got a batch of {len(value)} in {name}: pass one row of it")
    if two and not any(name.startswith("decoder_input") for name in named):
        named["decoder_input_ids"] = named["input_ids"][:, : max(1, named["input_ids"].shape[1] - 1)]
    return named


class _Found:
    """The masks of a pass by place, layer and heads, in the order of the calls."""

    def __init__(self) -> None:
        self._parts: dict[tuple[Place, tuple[int, ...], Mask], list[int]] = {}

    def add(self, place: Place, layer: int, allowed: Tensor) -> None:
        """Add a table [heads or 1, queries, keys]; heads that differ from one another are listed apart."""
        tables = [table.cpu() for table in allowed]
        rest = list(range(len(tables)))
        while rest:
            same = [head for head in rest if torch.equal(tables[head], tables[rest[0]])]
            dense = from_dense(tables[rest[0]], "a pattern of its own")
            heads = () if len(same) == len(tables) else tuple(same)
            layers = self._parts.setdefault((place, heads, equal_to(dense) or dense), [])
            if layer not in layers:  # DiffLlama attends twice in each layer
                layers.append(layer)
            rest = [head for head in rest if head not in same]

    def parts(self) -> tuple[LayerMask, ...]:
        stacks: dict[tuple[str, str], set[str]] = {}
        for (kind, half, path), *_ in self._parts:
            stacks.setdefault((kind, half), set()).add(path)
        found: list[LayerMask] = []
        for ((kind, half, path), heads, mask), layers in self._parts.items():
            several = len(stacks[kind, half]) > 1
            found.append(LayerMask(mask, tuple(layers), heads, kind, half, path if several else ""))
        return tuple(found)


def _watch(subject: Subject, sites: Iterable[Site], named: Mapping[str, Tensor], found: _Found) -> None:
    sites = list(sites)
    runs: dict[Site, int] = {}
    tables: list[tuple[Place, int, Tensor]] = []
    other = next((site for site in sites if base_implementation(site.owner.config) not in IMPLEMENTATIONS), None)
    implementation = None if other is None else readable_implementation(other.owner.config)

    def look(site: Site, call: AttentionCall, proceed: Proceed) -> Output:
        inside = site.name[len(site.layers) + 1 :].split(".")[0]
        members = len(cast(nn.ModuleList, subject.model.get_submodule(site.layers))) if inside.isdecimal() else 1
        number = int(inside) if inside.isdecimal() else 0
        if members < (
            getattr(site.owner.config, "num_hidden_layers", None) or 0
        ):  # as in ALBERT, whose layer runs again
            number += members * runs.get(site, 0)
            runs[site] = runs.get(site, 0) + 1
        half = "encoder" if subject.encodes_and_decodes and site.part == "encoder" else ""
        place = ("cross-attention" if site.kind == "cross" else "attention", half, site.layers)
        if isinstance(call.mask, BlockMask) and not in_force(call.module, "mask"):
            tables.append((place, number, table := _of_blocks(from_block_mask(call.mask), call)))
            dense = table[None].to(call.query.device)  # FlexAttention is slow where it is not compiled
            return proceed(call.replace(mask=dense, implementation="sdpa"))
        allowed, apart = _kept(call, proceed), bool(in_force(call.module, "mask"))
        if not apart and isinstance(call.mask, Tensor):  # it may hold ALiBi, too, by which far keys are rounded to zero
            stated = call.mask if call.mask.dtype == torch.bool else call.mask > _MASKED
            stated = stated[0, ..., : allowed.shape[-1]]
            apart = len(stated) > 1
            allowed = allowed | stated if apart else allowed.any(0, keepdim=True) | stated
        tables.append((place, number, allowed if apart else allowed.any(0, keepdim=True)))
        return proceed(call)

    with still(subject.model), torch.no_grad():
        interceptors = {site.module: partial(look, site) for site in sites}
        looking = intercept(models_around(sites), interceptors, role="look", implementation=implementation)
        try:
            _run(subject, named)
        except UnsupportedArchitecture:
            raise
        except REFUSALS as error:
            raise UnsupportedArchitecture(
                f"{subject.kind} does not run on these inputs ({type(error).__name__}: {refusal(error)})"
            ) from error
        finally:
            looking.remove()
    for table in tables:
        found.add(*table)


def _run(subject: Subject, named: Mapping[str, Tensor], **more: object) -> Any:
    """Run the model as its caller does: with a cache if it makes one, which ends what position_ids keep apart."""
    last = {"logits_to_keep": 1} if subject.accepts("logits_to_keep") else {}
    return cast(Callable[..., Any], subject.model)(**{**last, **named, **more})


def _kept(call: AttentionCall, proceed: Proceed) -> Tensor:
    """Whether a call gives a pair a weight, bool [heads, queries, keys].

    Queries and keys of zeros score all pairs alike, and the values are an identity: the output is the weights that the
    mask leaves, and none of them is rounded to zero. Learned biases keep all pairs, and stand aside.
    """
    dtype = torch.float32 if call.query.device.type == "mps" else torch.float64
    keys = call.key.shape[2]
    query, key = (torch.zeros_like(tensor, dtype=dtype) for tensor in (call.query, call.key))
    value = torch.eye(keys, dtype=dtype, device=call.value.device).expand(*call.value.shape[:2], keys, keys)
    mask, *more = (_as(tensor, dtype) for tensor in (call.mask, *call.kwargs.values()))
    kwargs = dict(zip(call.kwargs, more, strict=True))
    if isinstance(bias := kwargs.get("position_bias"), Tensor):  # T5's, which is added beside the mask
        kwargs["position_bias"] = torch.zeros_like(bias)
    masks = in_force(call.module, "mask")
    chain = tuple(member for member in proceed.following if member in masks)
    probe = call.replace(query=query, key=key, value=value, mask=mask, kwargs=kwargs)
    output = replace(proceed, following=chain)(probe)[0]
    if len(output) != 1:
        raise UnsupportedArchitecture(
            f"{type(call.module).__name__} attends in {len(output)} windows of one input, which have no mask in "
            f"common: {_ADVICE}"
        )
    if output.ndim == 3:  # some kernels join the heads
        output = output.unflatten(-1, (query.shape[1], -1))
    return (output[0] > 0).transpose(0, 1)


def _as(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _of_blocks(masks: Mask | MaskGrid, call: AttentionCall) -> Tensor:
    table = masks.dense()[None] if isinstance(masks, Mask) else masks.dense()[0]
    return torch.as_tensor(table)[:, : call.query.shape[2], : call.key.shape[2]]


def _mixers(layer: nn.Module) -> list[str]:
    """The outermost modules of a layer that move information between positions."""
    return [
        name
        for child in layer.children()
        for name in ([type(child).__name__] if moves_between_positions(child) else _mixers(child))
    ]


def _told(subject: Subject, named: Mapping[str, Tensor], found: _Found) -> list[str]:
    """Read the weights that a model returns which computes its attention itself."""
    mixers = dict.fromkeys(name for path in subject.layers for name in _mixers(subject.model.get_submodule(path)))
    if not any(attends(module) for module in subject.model.modules()):
        by = f"its layers mix positions by {', '.join(mixers)}" if mixers else "nothing in it mixes positions"
        raise UnsupportedArchitecture(f"{subject.kind} has no attention, and so no mask: {by}. {_ADVICE}")
    try:
        with still(subject.model), torch.no_grad():
            usual, output = _run(subject, named), _run(subject, named, output_attentions=True)
    except REFUSALS as error:
        raise UnsupportedArchitecture(
            f"{subject.kind} shows no weights of attention ({type(error).__name__}: {refusal(error)}): {_ADVICE}"
        ) from error
    told, wanted = _first(output), _first(usual)
    if told.shape != wanted.shape or not torch.allclose(told, wanted, rtol=1e-2, atol=1e-3):
        raise UnsupportedArchitecture(
            f"{subject.kind} computes other outputs where it returns weights of attention, which are therefore not "
            'those of its usual pass: load it with attn_implementation="eager"'
        )
    listed: dict[Place, Any] = {
        ("attention", "encoder", ""): getattr(output, "encoder_attentions", None),
        ("attention", "", ""): getattr(output, "decoder_attentions", None) or getattr(output, "attentions", None),
        ("cross-attention", "", ""): getattr(output, "cross_attentions", None),
    }
    for place, layers in listed.items():
        for number, weights in enumerate(layers or ()):
            name = part_name(number, place[0], half=place[1])
            found.add(place, number, _positive(weights, f"{subject.kind}, {name}", own=place[0] == "attention"))
    if not found.parts():
        raise UnsupportedArchitecture(
            f"{subject.kind} computes its attention itself and returns no weights of it: {_ADVICE}"
        )
    return list(mixers)


def _first(output: Any) -> Tensor:
    return cast(Tensor, output.logits if getattr(output, "logits", None) is not None else output[0]).float()


def _positive(weights: object, where: str, own: bool) -> Tensor:
    """The pairs with a weight, bool [1, queries, keys]; raises unless they are weights, and zeros are a mask's."""
    problem = "not weights over all keys (but scores, or of windows)"
    if isinstance(weights, Tensor) and weights.ndim == 4 and len(weights) == 1:
        sums = weights[0].float().nan_to_num().sum(-1)
        square = not own or weights.shape[2] == weights.shape[3]
        if square and bool((((sums - 1).abs() < 1e-2) | (sums == 0)).all()):
            allowed = weights[0] > 0
            kept = allowed.any(0, keepdim=True)
            if bool((allowed == kept).all()) or equal_to(from_dense(kept[0].cpu(), "")) is not None:
                return kept
            problem = "zero in some heads only, where they may be rounded"
    raise UnsupportedArchitecture(
        f"{where}: it is computed by the model itself, and what that returns is {problem}: {_ADVICE}"
    )
