"""`capture`: records the bias of a transformers model on a text, or on text it generates, as a `BiasMap`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from attnflow._core import checks
from attnflow._core.wrappers import own_name
from attnflow.bias.attention import bias_of, weights_of
from attnflow.bias.call import Allow, BiasedCall
from attnflow.bias.kind import LayerBias, layer_biases
from attnflow.bias.map import BiasMap, LayerMap
from attnflow.bias.terms import Dense, Term, wide
from attnflow.models.passes.evaluation import evaluating
from attnflow.models.subject import Loaded, Subject, Text

Heads = Sequence[int] | Literal["all"] | None
Queries = int | Sequence[int] | Literal["all"] | None

_ALL: Final = 128  # tokens up to which every query is captured
_LAST: Final = 32  # queries captured of a longer text
_PAIRS: Final = 1 << 15  # of one bias tile; the guidance network holds its hidden layer for each of them
_SCORES: Final = 1 << 21  # scores held at once: heads x queries x keys
_MOST_ROWS: Final = 64


def capture(
    model: nn.Module | Loaded,
    inputs: Text,
    *,
    layers: Sequence[int] | None = None,
    queries: Queries = None,
    heads: Heads = None,
    generate: int | Mapping[str, Any] | None = None,
    base: bool = True,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> BiasMap:
    """Run a model with a bias on one text, and record the bias B (raw and row-centred) and the attention weights.

    Args:
        model: a model with a bias, or what `af.load_model` returned.
        inputs: a text; token ids [tokens] or [1, tokens]; or the model's named inputs for one sequence, as a tokenizer
            returns them, possibly padded.
        layers: numbers of layers; by default all that have a bias.
        queries: positions of the queries, negative ones from the end, or "all". By default all queries of at most 128
            tokens, or the last 32 of a longer text; with `generate`, those that generated a token.
        heads: numbers of query heads, or "all"; by default the mean over heads.
        generate: how many tokens to generate first, greedily, or arguments of the model's `generate`. The map is of the
            returned sequence, so any decoding strategy works.
        base: also run the model without its bias, for `weights_base`.
        tokenizer: needed for a text unless `model` has one; for token ids, it names the tokens.

    Returns:
        The map, on the CPU in float32.

    Raises:
        ValueError: no bias is attached, a text without a tokenizer, several sequences, or layers, queries or heads
            that do not exist.

    Cost: a forward pass, or two with `base`. Memory: queries x keys for each layer (and head), computed in tiles.

    >>> import attnflow as af
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2))
    >>> _ = af.bias.attach(model, af.bias.GuidanceConfig(hidden_dim=8, init="kaiming"))
    >>> capture(model, [5, 6, 7, 8]).values("bias", layer=0).sum(dim=1).abs() < 1e-6
    tensor([True, True, True, True])
    """
    subject = Subject.of(model, tokenizer).inside
    model = subject.model
    biases = _chosen(model, layers)
    chosen, prompt = _heads(biases, heads), None
    two = any(isinstance(m, PreTrainedModel) and m.config.is_encoder_decoder for m in model.modules())
    # the input that holds the tokens between which the bias acts
    name = "decoder_input_ids" if two and "decoder" in biases[0][0].split(".") else "input_ids"
    tensors, last = subject.read(inputs, ids=True), None
    if len(tensors["input_ids"]) > 1:
        raise ValueError(f"capture takes one sequence, got a batch of {len(tensors['input_ids'])}: pass one row of it")
    with evaluating(model), torch.no_grad():
        if generate is not None:
            tensors, prompt, last = _generated(subject, tensors, generate, name)
        if name not in tensors:
            raise ValueError(f"the bias is in the decoder: pass the inputs as a mapping with {name}, or generate=...")
        ids: list[int] = tensors[name][0].tolist()
        rows = _rows(queries, len(ids), prompt)
        look = partial(_look, model, biases, partial(model, **tensors, **subject.sparing), rows, chosen)
        seen, plain = look(), look(without=True) if base else None
    layers_seen = tuple(
        replace(found, weights_base=None if plain is None else plain[number].weights)
        for _, bias in biases
        if (found := seen.get(number := bias.shape.index)) is not None
    )
    causal = all(not bool(one.allowed[:, i, row + 1 :].any()) for one in layers_seen for i, row in enumerate(rows))
    if last is not None:
        ids.append(int(last[0]))
    names = subject.texts(ids)
    produced = () if last is None else tuple(names[row + 1] for row in rows)
    names = names if last is None else names[:-1]
    return BiasMap(subject.name, tuple(names), tuple(rows), layers_seen, tuple(chosen or ()), causal, produced)


@torch.no_grad()
def observe(
    call: BiasedCall,
    terms: int,
    queries: Sequence[int],
    heads: Sequence[int] | None = None,
    layer: int = 0,
    name: str = "",
) -> LayerMap:
    """B (of the first `terms` terms) and the weights of some ascending queries of one sequence, in float32."""
    blocks = [_block(call, terms, block, heads) for block in _blocks(call, queries)]
    return LayerMap(layer, name, *(torch.cat(parts, dim=1) for parts in zip(*blocks, strict=True)))


def _blocks(call: BiasedCall, queries: Sequence[int]) -> Iterator[slice]:
    most = max(1, min(_MOST_ROWS, _SCORES // (call.num_heads * call.key.shape[2])))
    cuts = [i for i, (a, b) in enumerate(pairwise(queries), 1) if b != a + 1]
    for start, stop in pairwise([0, *cuts, len(queries)]):
        for first in range(start, stop, most):
            last = min(first + most, stop) - 1
            yield slice(queries[first], queries[last] + 1)


def _block(call: BiasedCall, terms: int, block: slice, heads: Sequence[int] | None) -> tuple[Tensor, ...]:
    """The tensors of a `LayerMap` for neighbouring queries; B is 0 for forbidden pairs."""
    size = 1, 1, block.stop - block.start, call.key.shape[2]
    rows = call.allow.rows(block)
    allowed = (torch.ones(size, dtype=torch.bool) if rows is None else rows).to(call.query.device)
    bias = _tiled(call, call.terms[:terms], block)
    bias = torch.zeros(size, device=call.query.device) if bias is None else bias
    bias, allowed = torch.broadcast_tensors(bias.double(), allowed)
    raw = bias.masked_fill(~allowed, 0.0)
    mean = raw.sum(dim=-1, keepdim=True) / allowed.sum(dim=-1, keepdim=True).clamp(min=1)
    centred = (raw - mean).masked_fill(~allowed, 0.0)
    rest = _tiled(call, call.terms[terms:], block)
    other = () if rest is None else (Dense(rest),)
    part = replace(call, query=call.query[:, :, block], terms=other, allow=Allow.from_dense(allowed))
    without = weights_of(part)
    weights = without if terms == 0 else weights_of(replace(part, terms=(*other, Dense(raw.to(without.dtype)))))
    parts = (tensor[0] for tensor in (centred, raw, allowed, weights, without))
    if heads is None:
        maps = (t.any(dim=0, keepdim=True) if t.dtype == torch.bool else t.mean(dim=0, keepdim=True) for t in parts)
    else:
        chosen = torch.tensor(heads, device=raw.device)
        maps = (t.expand(call.num_heads, -1, -1)[chosen] for t in parts)
    return tuple((t if t.dtype == torch.bool else t.float()).cpu() for t in maps)


def _tiled(call: BiasedCall, terms: tuple[Term, ...], block: slice) -> Tensor | None:
    """The sum of terms for neighbouring queries and all keys, [1, 1 or heads, queries, keys], in tiles."""
    if not terms:
        return None
    keys, maps = call.key.shape[2], max(term.groups for term in terms)
    width = max(1, _PAIRS // (maps * (block.stop - block.start)))
    parts: list[Tensor] = []
    for start in range(0, keys, width):
        tile = bias_of(terms, call.num_heads, block, slice(start, min(start + width, keys)))
        assert tile is not None
        parts.append(wide(tile))
    return torch.cat(parts, dim=-1)


def _look(
    model: nn.Module,
    biases: Sequence[tuple[str, LayerBias]],
    run: Callable[[], object],
    rows: Sequence[int],
    heads: Sequence[int] | None,
    without: bool = False,
) -> dict[int, LayerMap]:
    seen: dict[int, LayerMap] = {}
    before = [(bias, bias.enabled) for _, bias in layer_biases(model)]

    def see(path: str, bias: LayerBias, call: BiasedCall) -> None:
        number = bias.shape.index
        seen[number] = observe(call, len(bias.kinds) if bias.enabled else 0, rows, heads, number, own_name(path))

    try:
        for bias, state in before:
            bias.enabled = state and not without
        for path, bias in biases:
            bias.observer = partial(see, path, bias)
        run()
    finally:
        for bias, state in before:
            bias.enabled, bias.observer = state, None
    return seen


def _chosen(model: nn.Module, layers: Sequence[int] | None) -> list[tuple[str, LayerBias]]:
    biases = {bias.shape.index: (name.rpartition(".")[0], bias) for name, bias in layer_biases(model)}
    if not biases:
        raise ValueError(f"{type(model).__name__} has no bias attached: call af.bias.attach first")
    if layers is None:
        return list(biases.values())
    missing = [layer for layer in layers if layer not in biases]
    if missing or not layers:
        raise ValueError(f"layers must list some of the layers with a bias, {sorted(biases)}, got {list(layers)}")
    return [biases[layer] for layer in sorted(set(layers))]


def _heads(biases: Sequence[tuple[str, LayerBias]], heads: object) -> list[int] | None:
    num_heads = min(bias.shape.num_heads for _, bias in biases)
    if heads is None or heads == "all":
        return None if heads is None else list(range(num_heads))
    if isinstance(heads, str):
        raise ValueError(f"heads must be None, 'all' or numbers of heads, got {heads!r}")
    if not len(numbers := checks.index_array("heads", heads, num_heads).tolist()):
        raise ValueError("heads must list at least one head, or be None for their mean")
    return sorted(set(numbers))


def _generated(
    subject: Subject, inputs: dict[str, Tensor], generate: int | Mapping[str, Any], name: str
) -> tuple[dict[str, Tensor], int, Tensor]:
    """(inputs with all tokens but the last, which is never a query; length of the prompt; last tokens)."""
    if isinstance(generate, Mapping):
        options = dict(generate)
    else:
        options = {"max_new_tokens": checks.integer("generate", generate, 1), "do_sample": False}
    if not callable(run := getattr(subject.model, "generate", None)):
        raise ValueError(f"{subject.kind} cannot generate: leave generate= out")
    result = run(**inputs, **options)
    ids = result if isinstance(result, Tensor) else cast(Tensor, cast(Any, result).sequences)
    if len(ids) != len(inputs["input_ids"]):
        raise ValueError(
            f"generate returned {len(ids)} sequences for {len(inputs['input_ids'])}: leave num_return_sequences at 1"
        )
    prompt = inputs[name].shape[1] if name in inputs else 1  # a decoder starts from one token of its own
    longer = inputs | {name: ids[:, :-1]}
    if name == "input_ids":  # positions and token types belong to the prompt alone
        longer = {key: value for key, value in longer.items() if key not in ("position_ids", "token_type_ids")}
        if "attention_mask" in longer:
            new = longer["attention_mask"].new_ones(len(ids), ids.shape[1] - 1 - prompt)
            longer["attention_mask"] = mask = torch.cat([longer["attention_mask"], new], dim=1)
            if not mask.all() and subject.accepts("position_ids"):  # as `generate` counts them in a padded batch
                longer["position_ids"] = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    return longer, prompt, ids[:, -1]


def _rows(queries: Queries, size: int, prompt: int | None) -> list[int]:
    if queries == "all":
        return list(range(size))
    if queries is None:
        start = (0 if size <= _ALL else size - _LAST) if prompt is None else prompt - 1
        return list(range(start, size))
    positions = [queries] if isinstance(queries, int) else list(queries)
    if not positions or not all(-size <= position < size for position in positions):
        raise ValueError(f"queries must be positions from {-size} to {size - 1} for {size} tokens, got {positions}")
    return sorted({position % size for position in positions})
