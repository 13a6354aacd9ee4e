"""Parameters and floating-point operations of a bias, counted by torch, beside those of the model that has it.

Counted are products of matrices and of matrices with vectors, which is what torch's counter knows: 2 for each
multiplication and addition. What is done for each number of a hidden layer (norm, GELU) comes on top, on every pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import attnflow as af
from attnflow.bias.config import BiasConfig
from benchmarks.bench_bias import HIDDEN, Layer, base_model, concatenated_map, separated_map


def operations(run: Callable[[], object]) -> int:
    """Of one call, on any device; on "meta" nothing is computed.

    >>> operations(lambda: torch.ones(2, 3) @ torch.ones(3, 4)), operations(lambda: torch.ones(2, 3) @ torch.ones(3))
    (48, 12)
    """

    def with_vector(matrix: tuple[int, int], *_: object, **__: object) -> int:
        return 2 * matrix[0] * matrix[1]

    mapping: dict[Any, Any] = {torch.ops.aten.mv: with_vector}  # the network's last layer, which torch leaves out
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        run()
    return int(counter.get_total_flops())


def passes(model: Any, length: int) -> int:
    """Count one forward pass on a row. The model must have eager attention, so that no product hides in a kernel."""
    ids = torch.zeros(1, length, dtype=torch.long, device=model.device)
    # An explicit mask, since the model would read numbers to make its own; its values do not matter for the counts.
    mask = torch.zeros(1, 1, length, length, dtype=model.dtype, device=model.device)
    if model.device.type != "meta":
        mask = mask.masked_fill(~torch.ones_like(mask, dtype=torch.bool).tril(), torch.finfo(model.dtype).min)
    return operations(lambda: model(input_ids=ids, attention_mask=mask, use_cache=False))


def of_network(sizes: Mapping[str, Any], length: int) -> dict[str, int]:
    """Of g over all pairs of one layer: as algorithm 1 prints it, and with its first layer separated."""
    layer = Layer.random(length, "meta", False, sizes)
    return {
        "concatenated": operations(lambda: concatenated_map(layer)),
        "separated": operations(lambda: separated_map(layer)),
    }


def printed_parameters(sizes: Mapping[str, Any], layers: int) -> int:
    """Of g in so many layers by the formula of sec. 5.6.1: 2 d = the widths of a query and a key, all heads."""
    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    width = head_dim * (sizes["num_attention_heads"] + sizes["num_key_value_heads"])
    return layers * (width * HIDDEN + HIDDEN + 2 * HIDDEN + HIDDEN + 1)


def counted(sizes: Mapping[str, Any], arms: Mapping[str, BiasConfig | None], length: int) -> dict[str, Any]:
    """Parameters of every arm, and operations of the base model and of g; on "meta", without weights."""
    model = base_model(sizes, "meta")
    model.set_attn_implementation("eager")
    total = sum(parameter.numel() for parameter in model.parameters())
    found: dict[str, Any] = {"length": length, "parameters of the base": total, "operations of the base": 0}
    found["operations of the base"] = passes(model, length)
    found["operations of g in a layer"] = of_network(sizes, length)
    found["arms"] = {}
    for name, config in arms.items():
        if config is not None:
            with af.bias.attach(model, config) as handle:
                one = {"parameters": handle.num_parameters, "layers": len(handle.layers)}
            if config.kind == "guidance":
                one["parameters by the formula"] = printed_parameters(sizes, one["layers"])
            found["arms"][name] = one
    return found
