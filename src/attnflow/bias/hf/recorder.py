"""Watches the forward passes of a model with a bias, and puts what its attention calls show into one `BiasMap`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from attnflow.bias.call import Call
from attnflow.bias.layer import LayerBias
from attnflow.bias.map import BiasMap, LayerMap
from attnflow.bias.observe import Observed, observe

Choose = Callable[[int, int], Sequence[int]]  # (position of the first new token, how many) -> rows to keep

_PARTS = ("bias", "raw", "allowed", "weights", "weights_without")


class Recorder:
    """Keeps some queries of every forward pass inside its `with` block.

    The attention call alone does not say where its tokens stand in the sequence: the stack's cache does, before it
    takes them. Token ids come from whichever model around the stack is given them.
    """

    def __init__(
        self,
        model: nn.Module,
        biases: Sequence[tuple[str, LayerBias]],
        choose: Choose,
        heads: Sequence[int] | None,
        sequence: int,
    ) -> None:
        busy = [name for name, bias in biases if bias.observer is not None]
        if busy:
            raise ValueError(f"the bias of {busy[0]} is being captured already; end that block first")
        self._model, self._biases = model, biases
        self._choose, self._heads, self._sequence = choose, heads, sequence
        self._handles: list[RemovableHandle] = []
        self._given: Tensor | None = None
        self._ids: list[int] | None = []
        self._first = self._new = 0
        # layer -> position of the query -> (position of the first key, its row)
        self._rows: dict[int, dict[int, tuple[int, Observed]]] = {bias.shape.index: {} for _, bias in biases}

    def __enter__(self) -> Recorder:
        around = [
            module
            for name, module in self._model.named_modules()
            if isinstance(module, PreTrainedModel) and any(_inside(path, name) for path, _ in self._biases)
        ]
        for module in around:
            inner = module is around[-1]
            self._handles.append(module.register_forward_pre_hook(partial(self._begin, inner), with_kwargs=True))
        for _, bias in self._biases:
            bias.observer = partial(self._see, bias)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for _, bias in self._biases:
            bias.observer = None

    def _begin(self, inner: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a model's forward; the innermost one holds the layers."""
        input_ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(input_ids, Tensor) and input_ids.ndim == 2 and not input_ids.is_floating_point():
            self._given = input_ids
        if not inner:
            return
        cache = kwargs.get("past_key_values")
        self._first = int(cache.get_seq_length()) if isinstance(cache, Cache) else 0
        if self._given is None or self._ids is None or len(self._ids) < self._first:
            self._ids = None  # embeddings in place of ids, or a cache that was filled elsewhere
        elif self._sequence < len(self._given):
            self._ids = self._ids[: self._first] + self._given[self._sequence].tolist()
        self._given = None

    def _see(self, bias: LayerBias, call: Call) -> None:
        """Before an attention call."""
        self._new = call.query.shape[2]
        rows = self._choose(self._first, self._new)
        if not rows:
            return
        own = len(bias.kinds) if bias.enabled else 0
        observed = observe(call, own, rows, self._heads, self._sequence)
        total, keys = self._first + self._new, call.key.shape[2]
        start = max(0, total - keys)  # a sliding cache has dropped the first keys, a static one has empty slots behind
        rows_of_layer = self._rows[bias.shape.index]
        for index, row in enumerate(rows):
            parts = (getattr(observed, name)[:, index : index + 1, : total - start] for name in _PARTS)
            bias_, raw, allowed, weights, without = (part.clone() for part in parts)
            rows_of_layer[self._first + row] = start, Observed(raw, bias_, allowed, weights, without)

    def map(self, model: str, tokenizer: PreTrainedTokenizerBase | None, last: int | None = None) -> BiasMap:
        """Everything seen so far as one map.

        Args:
            model: its name.
            tokenizer: names the tokens; without one they are numbers.
            last: the token that the last query produced, if it is known.

        Raises:
            ValueError: nothing was seen.
        """
        queries = sorted({position for rows in self._rows.values() for position in rows})
        if not queries:
            raise ValueError("no forward pass of the model has run inside the block: there is nothing to look at")
        observed = [rows for rows in self._rows.values() if rows]
        size = max(start + row.raw.shape[-1] for rows in observed for start, row in rows.values())
        layers = tuple(
            LayerMap(bias.shape.index, name, *_assembled(self._rows[bias.shape.index], queries, size))
            for name, bias in self._biases
            if self._rows[bias.shape.index]
        )
        causal = all(
            not bool(one.allowed[:, i, query + 1 :].any()) for one in layers for i, query in enumerate(queries)
        )
        ids = self._ids if self._ids is not None and len(self._ids) >= size else None
        names = [str(position) for position in range(size)] if ids is None else _names(ids[:size], tokenizer)
        follow = [*names[1:], "" if last is None else _names([last], tokenizer)[0]]
        produced = tuple(follow[query] for query in queries)
        return BiasMap(model, tuple(names), tuple(queries), layers, tuple(self._heads or ()), causal, produced)


def _assembled(rows: dict[int, tuple[int, Observed]], queries: Sequence[int], size: int) -> list[Tensor]:
    """One tensor [maps, queries, keys] for each part, zero where nothing was seen."""
    maps = next(iter(rows.values()))[1].raw.shape[0]
    parts_whole: list[Tensor] = []
    for name in _PARTS:
        whole = torch.zeros(maps, len(queries), size, dtype=torch.bool if name == "allowed" else torch.float32)
        for index, query in enumerate(queries):
            if query in rows:
                start, row = rows[query]
                part: Tensor = getattr(row, name)
                whole[:, index, start : start + part.shape[-1]] = part[:, 0]
        parts_whole.append(whole)
    return parts_whole


def _names(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    return [str(token) if tokenizer is None else str(tokenizer.decode([token])) for token in ids]


def _inside(path: str, prefix: str) -> bool:
    return not prefix or path == prefix or path.startswith(f"{prefix}.")
