"""Keeps a bias's features of each key ("columns") in layers of like class behind those of the model's own cache."""

from __future__ import annotations

from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from attnflow._core.errors import UnsupportedArchitecture

_GAP: Final = "it was filled partly with the bias and partly without: start from an empty cache"
_ATTRIBUTE: Final = "_attnflow_columns"  # on the cache: layer of the model -> index of its companion
_SLOTS: Final = "_attnflow_slots"  # on the cache: the last answer of `new_slots`, behind what it is the answer to


class ColumnsLayer(DynamicLayer):
    """Keys alone: in place of values stands a view of them that has no width, and follows every crop and selection."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = torch.cat([cast(Tensor, self.keys), key_states], dim=-2)
        self.values = self.keys[..., :0]
        return self.keys, self.values


def extend(cache: Cache | None, layer: int, depth: int, columns: Tensor, num_keys: int) -> Tensor:
    """The columns of all keys, [batch, num_keys, width], cached ones first; call it after the cache took the new."""
    if cache is None:
        if columns.shape[1] != num_keys:
            raise ValueError(
                f"the bias must read every key once, but layer {layer} attends to {num_keys} keys, got "
                f"{columns.shape[1]} tokens and no known cache"
            )
        return columns
    main = cast(CacheLayerMixin, cache.layers[layer])
    companion = _companion(cache, main, layer, depth, columns)
    cached = companion.update(columns[:, None], columns[:, None, :, :0])[0][:, 0]
    seen, held = cast(tuple[Any, Any], (companion.get_seq_length(), main.get_seq_length()))
    if isinstance(seen, Tensor):  # of a static cache: looking at it would stop the device, and a compiler
        torch._assert_async(seen == held, _GAP)  # pyright: ignore[reportPrivateImportUsage]
    elif seen != held or cached.shape[1] != num_keys:
        raise ValueError(f"the cache holds {held} tokens of layer {layer}, but the bias has read {seen}: {_GAP}")
    return cached


def new_slots(cache: Cache | None, layer: int, new: int, num_keys: int, device: torch.device) -> Tensor:
    """Where the new tokens lie among the keys of this call, int64[new]; call it after the cache took them."""
    main = None if cache is None else cache.layers[layer]
    if not isinstance(main, StaticLayer) and not torch.compiler.is_compiling():
        tokens = new if main is None else int(cast(Any, main).get_seq_length())
        if num_keys > tokens:
            raise UnsupportedArchitecture(
                f"attention layer {layer} reads {num_keys} keys of {tokens} tokens. A bias cannot read the others, "
                "which belong to another sequence (as in T5Gemma 2) or to blocks of tokens (as in DeepSeek V4): leave "
                "the layer out of layers=[...]"
            )
    full = isinstance(main, StaticSlidingWindowLayer) and main.cumulative_length_int > main.max_cache_len
    if isinstance(main, StaticLayer) and not full:
        return torch.arange(new, device=device) + (main.cumulative_length.to(device) - new)
    if cache is None or torch.compiler.is_compiling():
        return torch.arange(num_keys - new, num_keys, device=device)
    key = num_keys - new, num_keys, device, torch.is_inference_mode_enabled()
    if cache.__dict__.get(_SLOTS, (None,))[0] != key:  # once for all layers of a step
        cache.__dict__[_SLOTS] = key, torch.arange(num_keys - new, num_keys, device=device)
    return cache.__dict__[_SLOTS][1]


def refuse_biased(cache: Cache | None, layer: int) -> None:
    """Refuse to go on without the bias where the cache was filled with it."""
    index = {} if cache is None else cast("dict[int, int]", cache.__dict__.get(_ATTRIBUTE, {}))
    if cache is not None and layer in index and not torch.compiler.is_compiling():
        seen = int(cast(CacheLayerMixin, cache.layers[index[layer]]).get_seq_length())
        if seen:
            raise ValueError(f"the cache holds {seen} tokens of layer {layer} that had the bias: {_GAP}")


def _companion(cache: Cache, main: CacheLayerMixin, layer: int, depth: int, columns: Tensor) -> CacheLayerMixin:
    """The companion of a layer; a new one for the first tokens, and where another bias has left its own."""
    index = cast("dict[int, int]", cache.__dict__.setdefault(_ATTRIBUTE, {}))
    if layer in index:
        cached = cast(CacheLayerMixin, cache.layers[index[layer]])
        if cached.keys is None or not cached.keys.numel() or cached.keys.shape[-1] == columns.shape[-1]:
            return cached
    if type(cache).__len__ is not Cache.__len__:
        raise UnsupportedArchitecture(
            f"a {type(cache).__name__} numbers its layers differently and cannot hold a bias: pass use_cache=False"
        )
    fresh = _like(main)
    seen = 0 if torch.compiler.is_compiling() else int(main.get_seq_length()) - columns.shape[1]
    if seen > 0:
        raise ValueError(
            f"the cache already holds {seen} tokens of layer {layer} that the bias has not seen: start from an "
            "empty cache after attaching or enabling a bias"
        )
    if cache.offloading:  # which asks for the layer after the last one: what attention needs next is the first
        fresh.prefetch = partial(cache.prefetch, 0, cache.only_non_sliding)
    if layer in index:
        cache.layers[index[layer]] = fresh
    else:
        while len(cache.layers) < depth:  # a cache made without a config grows on demand
            cache.layers.append(cast(Any, cache.layer_class_to_replicate or DynamicLayer)())
        index[layer] = len(cache.layers)
        cache.layers.append(fresh)
    return fresh


def _like(main: CacheLayerMixin) -> CacheLayerMixin:
    """An empty cache layer that treats tokens as `main` does; quantised ones have an exact companion."""
    prompt = getattr(main, "prefill_length", None)  # tokens that stay while the window moves on (Unlimited-OCR)
    if isinstance(main, StaticSlidingWindowLayer):
        if prompt is not None:
            raise UnsupportedArchitecture(
                f"a {type(main).__name__} keeps its prompt outside its window, where it cannot hold a bias: "
                "use the model's dynamic cache"
            )
        return StaticSlidingWindowLayer(max_cache_len=main.max_cache_len, sliding_window=main.max_cache_len)
    if isinstance(main, StaticLayer):
        return StaticLayer(max_cache_len=main.max_cache_len)
    if isinstance(main, DynamicSlidingWindowLayer):
        kind = DynamicSlidingWindowLayer if prompt is None else type(main)
        fresh = kind(sliding_window=main.sliding_window)
        if prompt is not None:
            cast(Any, fresh).set_prefill_length(prompt)
        fresh.record_past = getattr(main, "record_past", False)
        return fresh
    if isinstance(main, DynamicLayer):
        return ColumnsLayer()
    raise UnsupportedArchitecture(
        f"a cache layer of class {type(main).__name__} cannot hold a bias's columns: use the model's dynamic cache"
    )
