"""`attention`: scaled dot-product attention with a bias, defined in plain PyTorch, and its backends.

FlexAttention captures `Additive` and `Offset` as vectors and looks them up in the score function; other terms are
materialised by `term.tile`, one number per pair. The gradient of a captured tensor goes through atomic additions, so
that two runs may differ in the last bits. On the CPU, FlexAttention has no backward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, cast, no_type_check

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from attnflow.bias import dense, fused, tiled
from attnflow.bias.call import Allow, BiasedCall, make_call
from attnflow.bias.terms import Additive, Offset, Term, bias_of, wide
from attnflow.masks.flex import block_mask_of_counts, mask_mod_of_bits, packed

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Backend = Literal["auto", "reference", "fused", "tiled", "dense", "flex"]

BACKENDS: Final = ("reference", "fused", "tiled", "dense", "flex")
_BLOCK: Final = 128
_LEAST: Final = 16  # width of a head below which FlexAttention does not compile for a GPU
_FEW: Final = 1 << 14  # (query, key) pairs, for which there is nothing to gain over the reference
_FEW_QUERIES: Final = 16  # for which copying the keys to widen them costs as much as attention
_log: Final = logging.getLogger("attnflow.bias")
_logged: Final[set[tuple[str, str]]] = set()

# torch reads the signature and closure of these functions: `no_type_check` keeps run-time type checkers away.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Lookup = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def attention(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    terms: Sequence[Term],
    mask: object = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    dropout: float = 0.0,
    backend: Backend = "auto",
    need_weights: bool = False,
) -> tuple[Float[Tensor, "batch heads queries value_dim"], Float[Tensor, "batch heads queries keys"] | None]:
    """softmax(scale * q k^T + B, over the keys that the mask allows) v, with B the sum of terms (daa, sec. 3.1).

    The mask always wins: B is finite. A query that may attend to nothing has the output 0, with zero gradients.

    Args:
        query: queries; head h uses key-value head h // (heads // kv_heads).
        key: keys.
        value: values.
        terms: terms of `attnflow.bias.terms`, or objects with the methods of its `Term`.
        mask: a `Mask`, a boolean tensor [queries, keys] or [batch or 1, heads or 1, queries, keys], an `Allow`, or
            None for every pair.
        scale: factor of q k^T; by default head_dim ** -0.5.
        softcap: if set, scores become softcap * tanh(score / softcap) before the bias.
        sinks: one score per head that takes weight but has no value.
        dropout: the probability of dropping a weight.
        backend: "reference" (plain PyTorch, holds every pair), "fused" (torch's fused attention, for terms that have
            `factors`), "tiled" (memory-bounded, any term), "dense" (on CUDA, one number a pair and the memory-efficient
            operator), "flex" (compiled FlexAttention), or "auto": the reference for a few pairs, otherwise fused
            attention where it can compute the call, then dense on CUDA if its numbers take at most 256 MB, then tiles.
            FlexAttention is never chosen unasked: on an H100 its backward pass did not fit for some biases.
        need_weights: also return the post-softmax weights; only "reference" has them.

    Returns:
        The output, in the dtype of the values, and the weights or None.

    Raises:
        ValueError: the shapes do not fit, the devices differ, or the backend cannot compute this call (it says why).
        TypeError: a mask or a term has the wrong type.

    >>> from attnflow.bias.terms import Additive
    >>> q = k = v = torch.eye(2)[None, None]
    >>> bias = Additive(columns=torch.tensor([[[0.0, 20.0]]]))
    >>> attention(q, k, v, [bias])[0].round(decimals=3)
    tensor([[[[0., 1.],
              [0., 1.]]]])
    """
    return compute(make_call(query, key, value, terms, mask, scale, softcap, sinks, dropout), backend, need_weights)


def weights_of(call: BiasedCall) -> Float[Tensor, "batch heads queries keys"]:
    """Post-softmax weights before dropout, in float32 (or float64); all zero for a query that may attend to nothing."""
    score = _by_key_head(wide(call.query), call) @ wide(call.key).mT * call.scale
    score = score.view(*call.query.shape[:3], call.key.shape[2])
    if call.softcap is not None:
        score = call.softcap * torch.tanh(score / call.softcap)
    every = slice(0, call.query.shape[2]), slice(0, call.key.shape[2])
    bias = bias_of(call.terms, call.num_heads, *every)
    if bias is not None:
        score = score + bias
    allowed, empty = call.allow.dense(), None
    if allowed is not None:
        # A softmax over nothing is NaN, and so is its gradient: such a query attends everywhere here, and is zeroed.
        empty = ~allowed.any(dim=-1, keepdim=True)
        score = score.masked_fill(~(allowed | empty), -torch.inf)
    if call.sinks is not None:
        sink = wide(call.sinks)[None, :, None, None].expand(*score.shape[:3], 1)
        weights = torch.cat([score, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = score.softmax(dim=-1)
    return weights if empty is None else weights.masked_fill(empty, 0.0)


def reference(call: BiasedCall) -> tuple[Tensor, Tensor]:
    """The definition, holding every pair: (output in the type of the values, weights in float32)."""
    weights = weights_of(call)
    dropped = functional.dropout(weights, call.dropout) if call.dropout else weights
    output = _by_key_head(dropped, call) @ wide(call.value)
    return output.view(*call.query.shape[:3], call.value.shape[3]).to(call.value.dtype), weights


def _by_key_head(heads: Tensor, call: BiasedCall) -> Tensor:
    """[batch, kv_heads, queries of all heads that share a key, n]: keys and values need not be repeated."""
    queries = call.heads_per_kv * call.query.shape[2]
    return heads.reshape(*call.key.shape[:2], queries, heads.shape[-1])


def compute(call: BiasedCall, backend: str, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
    return compute_by(choose(call, backend, need_weights), call, need_weights)


def compute_by(name: str, call: BiasedCall, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
    """`compute` by a backend that `choose` returned."""
    if name == "reference":
        output, weights = reference(call)
        return output, weights if need_weights else None
    runs = {"fused": fused.run, "tiled": tiled.run, "dense": dense.run, "flex": run_flex}
    return runs[name](call), None


def choose(call: BiasedCall, backend: str, need_weights: bool = False) -> str:
    """The backend of a call: the named one, or by "auto" the reference for a few pairs, then the first that can."""
    if backend == "auto":
        queries, few = call.query.shape[2], call.query.shape[0] * call.query.shape[2] * call.key.shape[2] <= _FEW
        paths = {"fused": queries >= _FEW_QUERIES, "dense": call.query.is_cuda and dense.fits(call), "tiled": True}
        able = [] if need_weights or few else [path for path, tried in paths.items() if tried]
        name = next((path for path in able if refusal(call, path) is None), "reference")
        if (
            not torch.compiler.is_compiling()
            and (choice := (labelled(call, name), call.query.device.type)) not in _logged
        ):
            _logged.add(choice)
            _log.info("attention with a bias runs with %r on %s", *choice)
        return name
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of 'auto', {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    if need_weights and backend != "reference":
        raise ValueError(f"backend={backend!r} never holds the weights: use 'reference' or 'auto' with need_weights")
    reason = refusal(call, backend)
    if reason is not None:
        raise ValueError(f"backend={backend!r} cannot compute this call: {reason}. Use backend='auto' or 'reference'")
    return backend


def labelled(call: BiasedCall, name: str) -> str:
    """The backend that computes a call, with the reason if it is tiles and not fused attention."""
    reason = refusal(call, "fused") if name == "tiled" else None
    return name if reason is None else f"{name}: {reason}"


def refusal(call: BiasedCall, name: str) -> str | None:
    """Why a backend cannot compute a call, or None; the reference computes every call."""
    query, value = call.query, call.value
    if name == "tiled" and torch.compiler.is_compiling():
        return "its blocks follow the values of the mask, which torch.compile cannot trace"
    if name in ("fused", "dense"):
        return {"fused": fused, "dense": dense}[name].refusal(call)
    if name != "flex":
        return None
    if query.device.type not in ("cpu", "cuda"):
        return f"FlexAttention compiles for CPU and CUDA, but the tensors are on {query.device.type}"
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors())
    if query.device.type == "cpu" and learns:
        return "FlexAttention has no backward pass on the CPU, but gradients are needed (or use torch.no_grad())"
    if call.dropout:
        return f"FlexAttention cannot drop weights, but dropout is {call.dropout}"
    if call.sinks is not None:
        return "FlexAttention's score function cannot add sinks to the softmax"
    if 0 in query.shape or 0 in value.shape:
        return "FlexAttention needs at least one query, key and channel"
    if query.dtype != value.dtype or query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"query and value must share one of float16, bfloat16, float32, got {query.dtype} and {value.dtype}"
    if query.device.type == "cuda" and min(query.shape[3], value.shape[3]) < _LEAST:
        return f"heads must be at least {_LEAST} wide on a GPU, got {query.shape[3]} and {value.shape[3]}"
    return None


def run_flex(call: BiasedCall) -> Tensor:
    device = call.query.device
    blocks, empty = form_of(call.allow, device)
    output: Tensor = _compiled(device.type)(
        *(call.query, call.key, call.value),
        score_mod=score_mod(call),
        block_mask=blocks,
        scale=call.scale,
        enable_gqa=call.heads_per_kv > 1,
        kernel_options=kernel_options(call),
    )
    output = output if empty is None else output.masked_fill(empty, 0.0)
    return output.to(call.value.dtype)


def kernel_options(call: BiasedCall) -> dict[str, int]:
    """What FlexAttention's kernels need: with three stages, the gradient of a map asks for 262,144 bytes of 232,448."""
    learns = torch.is_grad_enabled() and any(t.requires_grad for term in call.terms for t in term.tensors().values())
    return {"bwd_num_stages": 2} if learns and call.query.device.type == "cuda" else {}


def score_mod(call: BiasedCall) -> ScoreMod:
    """The score function of a call: softcap, then one lookup for each term."""
    lookups = [_lookup(term, call) for term in call.terms]
    softcap = call.softcap

    @no_type_check
    def modify(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        for lookup in lookups:
            score = score + lookup(b, h, q, k)
        return score

    return modify


def form_of(allow: Allow, device: torch.device) -> tuple[BlockMask | None, Tensor | None]:
    form = allow.derived(("flex", str(device)), lambda: _form(allow, device))
    return cast("tuple[BlockMask | None, Tensor | None]", form)


def _lookup(term: Term, call: BiasedCall) -> Lookup:
    """B[b, h, q, k] of one term, from tensors that are captured."""
    per_map = call.num_heads // term.groups
    if isinstance(term, Additive):
        columns, rows = wide(term.columns), None if term.rows is None else wide(term.rows)

        @no_type_check
        def additive(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            result = columns[_element(columns, b), h // per_map, k]
            return result if rows is None else result - rows[_element(rows, b), h // per_map, q]

        return additive
    if isinstance(term, Offset):
        # One number for each distance: the bucket is looked up once, not for every pair.
        by_distance = wide(term.table)[:, term.bucket_of.long()]
        row_positions, column_positions, origin = term.row_positions, term.column_positions, term.origin

        @no_type_check
        def offset(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            column = column_positions[_element(column_positions, b), k]
            distance = column - row_positions[_element(row_positions, b), q] + origin
            return by_distance[h // per_map, distance.clamp(0, by_distance.shape[1] - 1)]

        return offset
    pairs = term.tile(slice(0, call.query.shape[2]), slice(0, call.key.shape[2])).contiguous()

    @no_type_check
    def dense(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return pairs[_element(pairs, b), h // per_map, q, k]

    return dense


@no_type_check
def _element(tensor: Tensor, index: Tensor) -> Tensor:
    """The index along the first dimension, which may be shared; always a tensor, which torch can trace."""
    return index * 0 if tensor.shape[0] == 1 else index


def _form(allow: Allow, device: torch.device) -> tuple[BlockMask | None, Tensor | None]:
    """`form_of`, made by rows of blocks; it holds a bit a pair, and nothing where every pair is allowed."""
    rows = allow.rows(slice(0, min(_BLOCK, allow.num_queries)))
    if rows is None:
        return None, None
    across, down = -(-allow.num_keys // _BLOCK), -(-allow.num_queries // _BLOCK)
    # Made at once: pieces that stay among temporaries a hundred times their size would keep the allocator from
    # giving those back.
    counts = torch.empty(*rows.shape[:2], down, across, dtype=torch.int64, device=device)
    bits = torch.empty(*rows.shape[:2], allow.num_queries, across * _BLOCK // 8, dtype=torch.uint8, device=device)
    empty = torch.empty(*rows.shape[:2], allow.num_queries, 1, dtype=torch.bool, device=device)
    for row in range(down):
        block = slice(row * _BLOCK, min((row + 1) * _BLOCK, allow.num_queries))
        rows = functional.pad(cast("Tensor", allow.rows(block)).to(device), (0, -allow.num_keys % _BLOCK))
        counts[:, :, row] = rows.unflatten(-1, (-1, _BLOCK)).sum(dim=(2, 4))
        bits[:, :, block] = packed(rows)
        empty[:, :, block] = ~rows.any(dim=-1, keepdim=True)
    shape, mask_mod = (allow.num_queries, allow.num_keys), mask_mod_of_bits(bits)
    return block_mask_of_counts(counts, (_BLOCK, _BLOCK), mask_mod, shape), empty


@cache
def _compiled(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # For symbolic sizes, which a second shape would bring, torch writes C++ that does not compile.
    return torch.compile(flex_attention, dynamic=False if device == "cpu" else None)
