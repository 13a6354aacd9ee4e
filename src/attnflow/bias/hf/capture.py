"""`capture` and `capturing`: the bias of a transformers model on a text, or while it generates, as a `BiasMap`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from attnflow._core import checks
from attnflow.bias.hf.attach import disabled, handle
from attnflow.bias.hf.recorder import Recorder
from attnflow.bias.layer import LayerBias, layer_biases
from attnflow.bias.map import BiasMap
from attnflow.models.evaluation import evaluating
from attnflow.models.inputs import Text, model_inputs, model_name, sparing
from attnflow.models.loaded import Loaded, split

Heads = Sequence[int] | Literal["all"] | None

_ALL: Final = 128  # tokens up to which every query is captured
_LAST: Final = 32  # queries captured of a longer text


def capture(
    model: nn.Module | Loaded,
    inputs: Text,
    *,
    layers: Sequence[int] | None = None,
    queries: int | Sequence[int] | None = None,
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
            them, batched and padded if need be.
        layers: numbers of layers; by default all that have a bias.
        queries: positions of the queries, negative ones from the end. By default all of at most 128 tokens, and the
            last 32 of a longer text; during generation those at which a token was generated.
        heads: numbers of query heads, or "all"; by default the mean over heads.
        generate: how many tokens to generate first, greedily, or arguments of the model's `generate`. The map is of
            the sequence that it returned, so that any decoding strategy will do.
        base: also run the model without its bias, for `weights_base`.
        tokenizer: needed for a text unless `model` brings one; else it names the tokens.
        sequence: which one of a batch.

    Returns:
        The map, on the CPU in float32.

    Raises:
        ValueError: no bias is attached, a text without a tokenizer, or layers, queries or heads that do not exist.

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
    handle(model)  # raises for a model without a bias
    chosen = _chosen(model, layers)
    tensors = model_inputs(model, inputs, tokenizer, sequence)
    name, prompt, last = _sequence(model, chosen), None, None
    with evaluating(model):
        if generate is not None:
            tensors, prompt, last = _generated(model, tensors, generate, name)
        if name not in tensors:
            raise ValueError(f"the bias is in the decoder: pass the inputs as a mapping with {name}, or generate=...")
        rows = _positions(queries, tensors[name].shape[1], prompt)
        look = partial(_look, model, tensors, chosen, rows, _heads(chosen, heads), sequence)
        result = look().map(model_name(model), tokenizer, last=None if last is None else int(last[sequence]))
        if base:
            with disabled(model):
                pairs = zip(result.layers, look().map("", None).layers, strict=True)
            result = replace(result, layers=tuple(replace(one, weights_base=plain.weights) for one, plain in pairs))
    return result if last is not None else replace(result, produced=())


class Captured:
    """What `capturing` has seen so far."""

    def __init__(self, recorder: Recorder, name: str, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._recorder, self._name, self._tokenizer = recorder, name, tokenizer

    def map(self) -> BiasMap:
        """The map of all queries seen so far; a query that ran more than once counts as it ran last.

        Raises:
            ValueError: no forward pass has run.
        """
        return self._recorder.map(self._name, self._tokenizer)


@contextmanager
def capturing(
    model: nn.Module | Loaded,
    *,
    layers: Sequence[int] | None = None,
    heads: Heads = None,
    every: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    sequence: int = 0,
) -> Generator[Captured]:
    """Look at every forward pass inside the `with` block, as it runs: `generate` with its cache, a training step.

    The last query of each pass is kept, which is the one that predicts the token being generated. Beam search moves
    its hypotheses about in the batch, while `sequence` stays; for what it returns use `capture(..., generate=...)`.

    Args:
        model: a model with a bias, or what `af.load_model` returned.
        layers: numbers of layers; by default all that have a bias.
        heads: numbers of query heads, or "all"; by default the mean over heads.
        every: keep all queries of each pass.
        tokenizer: names the tokens, unless `model` brings one.
        sequence: which one of the batch.

    Yields:
        An object whose `map()` is the `BiasMap` of what has run.

    Raises:
        ValueError: no bias is attached, it is being captured already, or there are no such layers or heads.

    Cost: one query's scores once more for each layer and pass.
    """
    model, brought = split(model)
    tokenizer = tokenizer or brought
    handle(model)
    chosen = _chosen(model, layers)
    rows: Callable[[int, int], Sequence[int]] = (lambda _, new: range(new)) if every else (lambda _, new: [new - 1])
    recorder = Recorder(model, chosen, rows, _heads(chosen, heads), sequence)
    with recorder:
        yield Captured(recorder, model_name(model), tokenizer)


def _look(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    chosen: Sequence[tuple[str, LayerBias]],
    rows: Sequence[int],
    heads: Sequence[int] | None,
    sequence: int,
) -> Recorder:
    """One forward pass, watched."""
    recorder = Recorder(model, chosen, partial(_within, rows), heads, sequence)
    with recorder, torch.no_grad():
        model(**inputs, **sparing(model))
    return recorder


def _within(rows: Sequence[int], first: int, new: int) -> list[int]:
    return [row - first for row in rows if first <= row < first + new]


def _chosen(model: nn.Module, layers: Sequence[int] | None) -> list[tuple[str, LayerBias]]:
    biases = {bias.shape.index: (name.rpartition(".")[0], bias) for name, bias in layer_biases(model)}
    if layers is None:
        return list(biases.values())
    missing = [layer for layer in layers if layer not in biases]
    if missing or not layers:
        raise ValueError(f"layers must list some of the layers with a bias, {sorted(biases)}, got {list(layers)}")
    return [biases[layer] for layer in sorted(set(layers))]


def _heads(chosen: Sequence[tuple[str, LayerBias]], heads: object) -> list[int] | None:
    if heads is None:
        return None
    num_heads = min(bias.shape.num_heads for _, bias in chosen)
    if heads == "all":
        return list(range(num_heads))
    if isinstance(heads, str):
        raise ValueError(f"heads must be None, 'all' or numbers of heads, got {heads!r}")
    numbers = sorted(set(checks.index_array("heads", heads, num_heads).tolist()))
    if not numbers:
        raise ValueError("heads must list at least one head, or be None for their mean")
    return numbers


def _sequence(model: nn.Module, chosen: Sequence[tuple[str, LayerBias]]) -> str:
    """The input that holds the tokens between which the bias acts."""
    two = any(isinstance(m, PreTrainedModel) and m.config.is_encoder_decoder for m in model.modules())
    return "decoder_input_ids" if two and "decoder" in chosen[0][0].split(".") else "input_ids"


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
    with torch.no_grad():
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


def _positions(queries: int | Sequence[int] | None, size: int, prompt: int | None) -> list[int]:
    if queries is None:
        first = 0 if size <= _ALL else size - _LAST
        return list(range(first if prompt is None else prompt - 1, size))
    positions = [queries] if isinstance(queries, int) else list(queries)
    wrong = [position for position in positions if not -size <= position < size]
    if wrong or not positions:
        raise ValueError(f"queries must be positions of {size} tokens, {-size} to {size - 1}, got {positions}")
    return sorted({position % size for position in positions})
