"""Every public function with numbers and switches among its arguments, called with values that are right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from attnflow import masks, order, tasks
from attnflow.masks.spec import named_masks
from attnflow.tasks.derivation import named_families

MASK_ARGUMENTS: dict[str, dict[str, Any]] = {
    "attention_sink": {"n": 6, "sinks": 1, "window": 2},
    "big_bird": {"n": 8, "block": 1, "num_global": 1, "num_window": 3, "num_random": 1, "seed": 3},
    "block_causal": {"n": 6, "block": 2},
    "block_diffusion": {"num_blocks": 2, "block": 2},
    "block_two_stream": {"num_blocks": 3, "block": 2, "predict_first": True},
    "butterfly": {"n": 4},
    "causal": {"n": 5},
    "dilated_window": {"n": 9, "window": 2, "dilation": 3, "causal": False},
    "document": {"lengths": [2, 3]},
    "full": {"n": 3, "num_keys": 4},
    "global_tokens": {"n": 5, "indices": [1, 3]},
    "longformer": {"n": 7, "window": 2, "indices": [0, 4]},
    "multi_token_prediction": {"n": 3, "horizon": 2},
    "permutation_lm": {"permutation": [1, 2, 0]},
    "prefix_lm": {"n": 5, "prefix": 2},
    "sliding_window": {"n": 6, "window": 2, "causal": False},
    "tree": {"parents": [-1, 0, 0, 1]},
}
FAMILY_ARGUMENTS: dict[str, dict[str, Any]] = {
    "block_diffusion": {"tokens": [5, 6, 7, 8], "block": 2, "masked": [1, 3], "mask_token": 1},
    "block_two_stream": {"tokens": [5, 6, 7, 8], "block": 2, "predict_first": True, "mask_token": 1},
    "butterfly": {"tokens": [5, 6, 7, 8], "block": 2, "masked": [1, 3], "mask_token": 1},
    "causal_lm": {"tokens": [5, 6, 7]},
    "masked_lm": {"tokens": [5, 6, 7], "masked": [1], "mask_token": 1},
    "multi_token_prediction": {"tokens": [5, 6, 7], "horizon": 2},
    "permutation_lm": {"tokens": [5, 6, 7], "permutation": [1, 2, 0], "mask_token": 1},
}


def _calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    assert MASK_ARGUMENTS.keys() == named_masks().keys(), "every mask of the catalogue has arguments here"
    assert FAMILY_ARGUMENTS.keys() == named_families().keys(), "every family has arguments here"
    calls = {f"masks.{n}": (getattr(masks, n), given) for n, given in MASK_ARGUMENTS.items()}
    calls |= {f"tasks.{n}": (getattr(tasks, n), given) for n, given in FAMILY_ARGUMENTS.items()}
    mask, flow = masks.causal(6), order.analyze(masks.causal(6))
    for name, given in {
        "keys": {"query": 2},
        "allows": {"query": 3, "key": 1},
        "permute": {"order": [0, 2, 1, 3, 4, 5]},
        "difference": {"other": masks.full(6), "limit": 3},
        "block_counts": {"block_size": 2},
    }.items():
        calls[f"Mask.{name}"] = getattr(mask, name), given
    for name, given in {
        "reaches": {"source": 1, "target": 3, "layers": 2},
        "receptive_field": {"query": 3, "layers": 1},
        "path": {"source": 1, "target": 3},
        "class_of": {"position": 3},
        "growth": {"max_layers": 2},
        "reachability": {"layers": 1},
        "sparsify": {"window": 2, "anchors": 2},
    }.items():
        calls[f"Flow.{name}"] = getattr(flow, name), given
    edges = {"edges": [(1, 0)], "num_queries": 3, "num_keys": 4}
    calls["masks.from_edges"] = masks.from_edges, edges
    intervals = {"rows": [[(0, 1)], [(1, 2)]], "num_keys": 4}
    calls["masks.from_intervals"] = masks.from_intervals, intervals
    mod = {"mask_mod": lambda b, h, q, k: q >= k, "num_queries": 3, "num_keys": 4}
    calls["masks.from_mask_mod"] = masks.from_mask_mod, mod
    task = tasks.merge(tasks.causal_lm([5, 6, 7]))
    calls["tasks.check"] = tasks.check, {"task": task, "layers": 2}
    collator = {"family_fn": tasks.causal_lm, "by_length": True, "pad_to_multiple_of": 4}
    calls["tasks.Collator"] = _collated, collator
    calls["tasks.Label"] = (
        partial(tasks.Label, target=tasks.Token(1, 0)),
        {"weight": 2.0, "position": 1, "task": 1},
    )
    calls["tasks.Token"] = tasks.Token, {"id": 7, "position": 1, "provenance": [1]}
    return calls


def _collated(**given: Any) -> object:
    collator = tasks.Collator(**given)
    return torch.cat([value.flatten().double() for value in collator([[5, 6, 7]]).values()]).tolist()


CALLS = _calls()
