"""`capture`: the bias of a transformers model on a text, or while it generates, as a `BiasMap`.

`observe` looks at one attention call, in tiles; a recorder puts together what was seen in each forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from attnflow._core import checks
from attnflow.bias.attention import bias_of, weights_of
from attnflow.bias.call import Allow, Call
from attnflow.bias.hf.attach import switched
from attnflow.bias.kind import LayerBias, layer_biases
from attnflow.bias.map import BiasMap, LayerMap
from attnflow.bias.terms import Dense, Term, wide
from attnflow.models.evaluation import evaluating
from attnflow.models.inputs import Text, model_inputs, model_name, sparing
from attnflow.models.loaded import Loaded, split
from attnflow.models.watching import Call as ModelCall
from attnflow.models.watching import Watch

Heads = Sequence[int] | Literal["all"] | None
Queries = int | Sequence[int] | Literal["all"] | None
Choose = Callable[[int, int], Sequence[int]]  # (position of the first new token, how many) -> rows to keep

_ALL: Final = 128  # tokens up to which every query is captured
_LAST: Final = 32  # queries captured of a longer text
_PAIRS: Final = 1 << 15  # of one bias tile; the guidance network holds its hidden layer for each of them
_SCORES: Final = 1 << 21  # scores held at once: heads x queries x keys
_MOST_ROWS: Final = 64


def capture(
    model: nn.Module | Loaded,
    inputs: Text | Callable[[], object],
    *,
    layers: Sequence[int] | None = None,
    queries: Queries = None,
    heads: Heads = None,
    generate: int | Mapping[str, Any] | None = None,
    base: bool = True,
    tokenizer: PreTrainedTokenizerBase | None = None,
    sequence: int = 0,
) -> BiasMap:
    """Run a model with a bias on one text and look at B, raw and as softmax sees it, and at the weights.

    Args:
        model: a model with a bias, or what `af.load_model` returned.
        inputs: a text; token ids [tokens] or [1, tokens]; or the model's inputs by name, as a tokenizer returns
            them, batched and padded if need be. Or a function that runs the model, such as `lambda:
            model.generate(ids)` or a training step: each pass is watched as it runs, with its cache. Beam search moves
            its hypotheses about in the batch, while `sequence` stays; for what it returns use `generate`.
        layers: numbers of layers; by default all that have a bias.
        queries: positions of the queries, negative ones from the end, or "all". By default all of at most 128 tokens,
            and the last 32 of a longer text; during generation those at which a token was generated. Of a function's
            passes by default the last query of each, and no negative ones; one that runs again counts as it ran last.
        heads: numbers of query heads, or "all"; by default the mean over heads.
        generate: how many tokens to generate first, greedily, or arguments of the model's `generate`. The map is of
            the sequence that it returned, so that any decoding strategy will do.
        base: also run the model without its bias, for `weights_base`; a function is run once, with it.
        tokenizer: needed for a text unless `model` brings one; else it names the tokens.
        sequence: which one of a batch.

    Returns:
        The map, on the CPU in float32.

    Raises:
        ValueError: no bias is attached, or it is being captured already; a text without a tokenizer, a function that
            does not run the model, or layers, queries or heads that do not exist.

    Cost: a forward pass, or two with `base`. Memory: queries x keys for each layer (and head), computed in tiles.

    >>> import attnflow as af
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2))
    >>> _ = af.bias.attach(model, af.bias.GuidanceConfig(hidden_dim=8, init="kaiming"))
    >>> capture(model, [5, 6, 7, 8]).values("bias", layer=0).sum(dim=1).abs() < 1e-6
    tensor([True, True, True, True])
    """
    model, brought = split(model)
    tokenizer = tokenizer or brought
    biases = _chosen(model, layers)
    record = partial(_Recorder, model, biases, _heads(biases, heads), sequence)
    if callable(inputs):
        if generate is not None:
            raise ValueError("a function runs the model as it likes: leave generate= out, and generate there")
        recorder = record(_rows(queries, None))
        recorder.watch(inputs)
        return recorder.map(model_name(model), tokenizer)
    tensors = model_inputs(model, inputs, tokenizer, sequence)
    name, prompt, last = _sequence(model, biases), None, None
    with evaluating(model), torch.no_grad():
        if generate is not None:
            tensors, prompt, last = _generated(model, tensors, generate, name)
        if name not in tensors:
            raise ValueError(f"the bias is in the decoder: pass the inputs as a mapping with {name}, or generate=...")
        choose = _rows(queries, tensors[name].shape[1], prompt)
        recorder, run = record(choose), partial(model, **tensors, **sparing(model))
        recorder.watch(run)
        result = recorder.map(model_name(model), tokenizer, None if last is None else int(last[sequence]))
        if base:
            plain = record(choose)
            with switched(model, False):
                plain.watch(run)
            pairs = zip(result.layers, plain.map("", None).layers, strict=True)
            result = replace(result, layers=tuple(replace(one, weights_base=other.weights) for one, other in pairs))
    return result if last is not None else replace(result, produced=())


class Observed(NamedTuple):
    """Some queries of one call; a map for each head asked for, or one, the mean over heads. As in `LayerMap`."""

    raw: Float[Tensor, "maps queries keys"]
    bias: Float[Tensor, "maps queries keys"]
    allowed: Bool[Tensor, "maps queries keys"]
    weights: Float[Tensor, "maps queries keys"]
    weights_without: Float[Tensor, "maps queries keys"]


@torch.no_grad()
def observe(
    call: Call, terms: int, queries: Sequence[int], heads: Sequence[int] | None = None, sequence: int = 0
) -> Observed:
    """B and the weights for some queries of one sequence of a call, on the CPU in float32.

    Args:
        call: an attention call.
        terms: how many of its terms, from the first, are the bias; the rest belongs to the scores without it.
        queries: rows of the call, ascending.
        heads: query heads to tell apart; None for the mean over all of them.
        sequence: number in the batch.

    Raises:
        ValueError: a sequence or a head that the call does not have.

    Cost: memory O(queries x keys) for the result, and a few MB beside it; time O(queries x keys x head_dim x heads).
    """
    if not 0 <= sequence < call.query.shape[0]:
        raise ValueError(f"sequence must be a number of the batch, 0 to {call.query.shape[0] - 1}, got {sequence}")
    wrong = [head for head in heads or () if not 0 <= head < call.num_heads]
    if wrong:
        raise ValueError(f"heads must lie in 0 to {call.num_heads - 1}, got {wrong}")
    blocks = [_block(call, terms, block, heads, sequence) for block in _blocks(call, queries)]
    if not blocks:
        empty = torch.zeros(1 if heads is None else len(heads), 0, call.key.shape[2])
        return Observed(empty, empty, empty.bool(), empty, empty)
    return Observed(*(torch.cat(parts, dim=1) for parts in zip(*blocks, strict=True)))


def _blocks(call: Call, queries: Sequence[int]) -> Iterator[slice]:
    """The queries as slices of neighbours, short enough for the scores of one to fit."""
    most = max(1, min(_MOST_ROWS, _SCORES // (call.num_heads * call.key.shape[2])))
    cuts = [i for i, (a, b) in enumerate(pairwise(queries), 1) if b != a + 1]
    for start, stop in pairwise([0, *cuts, len(queries)]):
        for first in range(start, stop, most):
            last = min(first + most, stop) - 1
            yield slice(queries[first], queries[last] + 1)


def _block(call: Call, terms: int, block: slice, heads: Sequence[int] | None, sequence: int) -> tuple[Tensor, ...]:
    """The parts of `Observed` for neighbouring queries; B is 0 where there is no pair."""
    one, size = slice(sequence, sequence + 1), (1, 1, block.stop - block.start, call.key.shape[2])
    rows = call.allow.rows(block)
    if rows is None:
        rows = torch.ones(size, dtype=torch.bool)
    allowed = (rows if len(rows) == 1 else rows[one]).to(call.query.device)
    bias = _tiled(call, call.terms[:terms], block, one)
    bias = torch.zeros(size, device=call.query.device) if bias is None else bias
    bias, allowed = torch.broadcast_tensors(bias.double(), allowed)
    raw = bias.masked_fill(~allowed, 0.0)
    mean = raw.sum(dim=-1, keepdim=True) / allowed.sum(dim=-1, keepdim=True).clamp(min=1)
    centred = (raw - mean).masked_fill(~allowed, 0.0)
    rest = _tiled(call, call.terms[terms:], block, one)
    other = () if rest is None else (Dense(rest),)
    part = replace(call, query=call.query[one, :, block], key=call.key[one], value=call.value[one], terms=other)
    part = replace(part, allow=Allow.from_dense(allowed))
    without = weights_of(part)
    weights = without if terms == 0 else weights_of(replace(part, terms=(*other, Dense(raw.to(without.dtype)))))
    parts = (tensor[0] for tensor in (raw, centred, allowed, weights, without))
    if heads is None:
        maps = (t.any(dim=0, keepdim=True) if t.dtype == torch.bool else t.mean(dim=0, keepdim=True) for t in parts)
    else:
        chosen = torch.tensor(heads, device=raw.device)
        maps = (t.expand(call.num_heads, -1, -1)[chosen] for t in parts)
    return tuple((t if t.dtype == torch.bool else t.float()).cpu() for t in maps)


def _tiled(call: Call, terms: tuple[Term, ...], block: slice, sequences: slice) -> Tensor | None:
    """The sum of terms for neighbouring queries and all keys, [batch or 1, 1 or heads, queries, keys], in tiles."""
    if not terms:
        return None
    keys, maps = call.key.shape[2], max(term.groups for term in terms)
    width = max(1, _PAIRS // (call.query.shape[0] * maps * (block.stop - block.start)))
    parts: list[Tensor] = []
    for start in range(0, keys, width):
        tile = bias_of(terms, call.num_heads, block, slice(start, min(start + width, keys)))
        assert tile is not None
        parts.append(wide(tile if len(tile) == 1 else tile[sequences]))
    return torch.cat(parts, dim=-1)


class _Recorder:
    """Keeps some queries of every forward pass that a function runs.

    The attention call alone does not say where its tokens stand in the sequence: the stack's cache does, before it
    takes them. Token ids come from whichever model around the stack is given them.
    """

    def __init__(
        self,
        model: nn.Module,
        biases: Sequence[tuple[str, LayerBias]],
        heads: Sequence[int] | None,
        sequence: int,
        choose: Choose,
    ) -> None:
        self.model, self.biases, self.choose, self.heads, self.sequence = model, biases, choose, heads, sequence
        self.input_ids: Tensor | None = None
        self.ids: list[int] | None = []
        self.first = 0
        # layer -> (positions of queries, position of the first key, what was seen of them), for each pass
        self.seen: dict[int, list[tuple[list[int], int, Observed]]] = {}

    def watch(self, run: Callable[[], object]) -> None:
        """Run, and look at what runs."""
        busy = [name for name, bias in self.biases if bias.observer is not None]
        if busy:
            raise ValueError(f"the bias of {busy[0]} is being captured already; end that first")
        around = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, PreTrainedModel)
            and any(not name or f"{path}.".startswith(f"{name}.") for path, _ in self.biases)
        }
        with Watch(around, enter=partial(self._begin, list(around)[-1])):
            try:
                for _, bias in self.biases:
                    bias.observer = partial(self._see, bias)
                run()
            finally:
                for _, bias in self.biases:
                    bias.observer = None

    def _begin(self, innermost: str, call: ModelCall) -> None:
        """Before a model's forward; the innermost one holds the layers."""
        input_ids = call.kwargs.get("input_ids", call.args[0] if call.args else None)
        if isinstance(input_ids, Tensor) and input_ids.ndim == 2 and not input_ids.is_floating_point():
            self.input_ids = input_ids
        if call.name != innermost:
            return
        cache = call.kwargs.get("past_key_values")
        self.first = int(cache.get_seq_length()) if isinstance(cache, Cache) else 0
        if self.input_ids is None or self.ids is None or len(self.ids) < self.first:
            self.ids = None  # embeddings in place of ids, or a cache that was filled elsewhere
        elif self.sequence < len(self.input_ids):
            self.ids = self.ids[: self.first] + self.input_ids[self.sequence].tolist()
        self.input_ids = None

    def _see(self, bias: LayerBias, call: Call) -> None:
        """Before an attention call."""
        new, keys = call.query.shape[2], call.key.shape[2]
        rows = self.choose(self.first, new)
        if not rows:
            return
        observed = observe(call, len(bias.kinds) if bias.enabled else 0, rows, self.heads, self.sequence)
        total = self.first + new
        start = max(0, total - keys)  # a sliding cache has dropped the first keys, a static one has empty slots behind
        parts = Observed(*(part[..., : total - start].clone() for part in observed))
        self.seen.setdefault(bias.shape.index, []).append(([self.first + row for row in rows], start, parts))

    def map(self, model: str, tokenizer: PreTrainedTokenizerBase | None, last: int | None = None) -> BiasMap:
        """Everything seen as one map; `last` is the token that the last query produced, if it is known."""
        passes = [one for passes in self.seen.values() for one in passes]
        queries = sorted({query for positions, _, _ in passes for query in positions})
        if not queries:
            raise ValueError("no forward pass of the model has run: there is nothing to look at")
        size = max(start + parts.raw.shape[-1] for _, start, parts in passes)
        layers = tuple(
            LayerMap(bias.shape.index, name, **self._assembled(bias.shape.index, queries, size))
            for name, bias in self.biases
            if bias.shape.index in self.seen
        )
        causal = all(
            not bool(one.allowed[:, i, query + 1 :].any()) for one in layers for i, query in enumerate(queries)
        )
        ids = self.ids if self.ids is not None and len(self.ids) >= size else None
        names = [str(position) for position in range(size)] if ids is None else _names(ids[:size], tokenizer)
        follow = [*names[1:], "" if last is None else _names([last], tokenizer)[0]]
        produced = tuple(follow[query] for query in queries)
        return BiasMap(model, tuple(names), tuple(queries), layers, tuple(self.heads or ()), causal, produced)

    def _assembled(self, layer: int, queries: Sequence[int], size: int) -> dict[str, Tensor]:
        """One tensor [maps, queries, keys] for each part, zero where nothing was seen."""
        row_of, passes = {query: row for row, query in enumerate(queries)}, self.seen[layer]
        whole: dict[str, Tensor] = {}
        for name, first in passes[0][2]._asdict().items():
            whole[name] = first.new_zeros(len(first), len(queries), size)
            for positions, start, parts in passes:
                part, rows = getattr(parts, name), [row_of[query] for query in positions]
                whole[name][:, rows] = 0
                whole[name][:, rows, start : start + part.shape[-1]] = part
        return whole


def _names(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    return [str(token) if tokenizer is None else str(tokenizer.decode([token])) for token in ids]


def _within(positions: Sequence[int], first: int, new: int) -> list[int]:
    return [position - first for position in positions if first <= position < first + new]


def _chosen(model: nn.Module, layers: Sequence[int] | None) -> list[tuple[str, LayerBias]]:
    biases = {bias.shape.index: (name.rpartition(".")[0], bias) for name, bias in layer_biases(model)}
    if not biases:
        raise ValueError(f"{type(model).__name__} has no bias attached; see af.bias.attach")
    if layers is None:
        return list(biases.values())
    missing = [layer for layer in layers if layer not in biases]
    if missing or not layers:
        raise ValueError(f"layers must list some of the layers with a bias, {sorted(biases)}, got {list(layers)}")
    return [biases[layer] for layer in sorted(set(layers))]


def _heads(biases: Sequence[tuple[str, LayerBias]], heads: object) -> list[int] | None:
    if heads is None:
        return None
    num_heads = min(bias.shape.num_heads for _, bias in biases)
    if heads == "all":
        return list(range(num_heads))
    if isinstance(heads, str):
        raise ValueError(f"heads must be None, 'all' or numbers of heads, got {heads!r}")
    if not len(numbers := checks.index_array("heads", heads, num_heads).tolist()):
        raise ValueError("heads must list at least one head, or be None for their mean")
    return sorted(set(numbers))


def _sequence(model: nn.Module, biases: Sequence[tuple[str, LayerBias]]) -> str:
    """The input that holds the tokens between which the bias acts."""
    two = any(isinstance(m, PreTrainedModel) and m.config.is_encoder_decoder for m in model.modules())
    return "decoder_input_ids" if two and "decoder" in biases[0][0].split(".") else "input_ids"


def _generated(
    model: nn.Module, inputs: dict[str, Tensor], generate: int | Mapping[str, Any], name: str
) -> tuple[dict[str, Tensor], int, Tensor]:
    """(inputs with all tokens but the last, after which no query came; length of the prompt; last tokens)."""
    if isinstance(generate, Mapping):
        options = dict(generate)
    else:
        options = {"max_new_tokens": checks.integer("generate", generate, 1), "do_sample": False}
    if not callable(run := getattr(model, "generate", None)):
        raise ValueError(f"{type(model).__name__} does not generate; leave generate= out")
    result = run(**inputs, **options)
    ids = result if isinstance(result, Tensor) else cast(Tensor, cast(Any, result).sequences)
    if len(ids) != len(inputs["input_ids"]):
        raise ValueError(
            f"generate returned {len(ids)} sequences for {len(inputs['input_ids'])}; leave num_return_sequences at 1"
        )
    prompt = inputs[name].shape[1] if name in inputs else 1  # a decoder starts from one token of its own
    longer = inputs | {name: ids[:, :-1]}
    if name == "input_ids":  # positions and token types belong to the prompt alone
        longer = {key: value for key, value in longer.items() if key not in ("position_ids", "token_type_ids")}
        if "attention_mask" in longer:
            new = longer["attention_mask"].new_ones(len(ids), ids.shape[1] - 1 - prompt)
            longer["attention_mask"] = torch.cat([longer["attention_mask"], new], dim=1)
    return longer, prompt, ids[:, -1]


def _rows(queries: Queries, size: int | None, prompt: int | None = None) -> Choose:
    """Which rows of each pass to keep; `size` is None where a function runs passes over texts of any length."""
    if queries == "all":
        return lambda first, new: range(new)
    if queries is None and size is None:
        return lambda first, new: [new - 1]
    if queries is None:
        assert size is not None
        start = (0 if size <= _ALL else size - _LAST) if prompt is None else prompt - 1
        return partial(_within, range(start, size))
    positions = [queries] if isinstance(queries, int) else list(queries)
    if size is None:
        if min(positions, default=-1) < 0:
            raise ValueError(f"queries of what a function runs must be positions from 0 on, or 'all', got {positions}")
        return partial(_within, sorted(set(positions)))
    if not positions or not all(-size <= position < size for position in positions):
        raise ValueError(f"queries must be positions of {size} tokens, {-size} to {size - 1}, got {positions}")
    return partial(_within, sorted({position % size for position in positions}))
