"""Fused attention with a bias in Triton: forward, a deterministic backward, and decoding.

Read in this order: `inputs` (the table of operands, and a call in its terms), `blocks` beside this folder (the mask),
`ops`, `gradients` and `launch` (what runs when), then `device` (operands as kernels take them) and the kernels: `pairs`
(the bias of pairs and its gradient), `forward` (and decoding), `backward`; all sizes are in `tuning`.

What is held: the bias of pairs in 16 bits where the model is (see `Inputs.pair_type`), in pieces of batch elements and
maps, one bit of mask a pair, and partial gradients of some query blocks at a time. All sums are in float32; products of
float32 inputs are three of TF32.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from attnflow.bias.call import Call
from attnflow.bias.impl.blocks import blocks_of, bytes_of
from attnflow.bias.impl.triton import tuning
from attnflow.bias.terms import Guidance


def refuses(call: Call) -> str | None:
    """Why these kernels cannot compute a call, or None."""
    query, value = call.query, call.value
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if reason := _no_device(query.device):
        return reason
    types = {tensor.dtype for tensor in (query, call.key, value)}
    if len(types) > 1 or query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"query, key and value must share one of float16, bfloat16, float32, got {sorted(map(str, types))}"
    widest = tuning.MAX_WIDE_WIDTH if query.dtype == torch.float32 else tuning.MAX_WIDTH
    if max(query.shape[3], value.shape[3]) > widest:
        return f"heads of {query.dtype} are at most {widest} wide, got {query.shape[3]} and {value.shape[3]}"
    if 0 in query.shape or 0 in value.shape:
        return "a call without queries, keys or channels has nothing to launch"
    if call.dropout:
        return f"weights cannot be dropped inside the kernels, and dropout is {call.dropout}"
    networks = [term for term in call.terms if isinstance(term, Guidance)]
    if len(networks) > 1:
        return f"one guidance network at a time is fused, got {len(networks)}"
    if networks and networks[0].rows.shape[3] > tuning.MAX_HIDDEN:
        return f"hidden_dim is at most {tuning.MAX_HIDDEN}, got {networks[0].rows.shape[3]}"
    return None


def _no_device(device: torch.device) -> str | None:
    """Why kernels cannot run on a device."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type == "cpu" and interpreted:
        return None
    if device.type != "cuda":
        return (
            f"the tensors are on {device.type}, and Triton compiles for CUDA GPUs; to try the kernels without one, set "
            "TRITON_INTERPRET=1 before Python starts (slow: for tests)"
        )
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"compute capability 8.0 or newer is needed, this GPU has {major}.{minor}"


def run(call: Call) -> tuple[Tensor, None]:
    """(output [batch, heads, queries, value_dim] in the type of the values, None: weights are never held)."""
    from attnflow.bias.impl.triton import ops
    from attnflow.bias.impl.triton.inputs import pack

    grad = call.needs_grad()
    queries = call.query.shape[2]
    if not grad and queries <= tuning.DECODE_QUERIES and queries * call.heads_per_kv <= tuning.DECODE_ROWS:
        inputs, _ = pack(call, [])
        return ops.decode(inputs, bytes_of(call.allow, call.query.device)), None
    width = max(call.query.shape[3], call.value.shape[3])
    rows = tuning.tiles(width, call.query.dtype, queries).rows
    inputs, unseen = pack(call, blocks_of(call.allow, call.query.device, rows).flat())
    output, _, _ = ops.biased_attention(*inputs.arguments(), grad)
    learned = [tensor for tensor in unseen if tensor.requires_grad] if grad else []
    return (ops.Unseen.apply(output, *learned) if learned else output), None
