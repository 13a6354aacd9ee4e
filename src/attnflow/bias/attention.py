"""`attention`: scaled dot-product attention with a bias, by the backend that fits or the one asked for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final, Literal, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from attnflow.bias.call import Call, make_call
from attnflow.bias.terms import Term

Backend = Literal["auto", "reference", "tiled", "flex", "triton"]

BACKENDS: Final = ("reference", "tiled", "flex", "triton")
# What "auto" does not choose, and why; `attnflow doctor` says it. A line goes when `make gpu` has passed on a device
# and its results are in benchmarks/results.csv.
UNPROVEN: Final[Mapping[str, str]] = {
    "triton": "its kernels have run in Triton's interpreter alone, never on a GPU; ask for them with backend='triton'"
}
_FEW: Final = 1 << 14  # (query, key) pairs, for which there is nothing to gain over the reference
_log: Final = logging.getLogger("attnflow.bias")
_said: Final[set[tuple[str, str]]] = set()


@runtime_checkable
class _Module(Protocol):
    def refuses(self, call: Call) -> str | None: ...
    def run(self, call: Call) -> tuple[Tensor, Tensor | None]: ...


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
        terms: those of `attnflow.bias.terms`, or objects with `groups` and `tile`.
        mask: a `Mask`, a boolean tensor [queries, keys] or [batch or 1, heads or 1, queries, keys], an `Allow`, or
            None for every pair.
        scale: of q k^T; default head_dim ** -0.5.
        softcap: if set, scores become softcap * tanh(score / softcap) before the bias.
        sinks: a score per head that takes weight without a value.
        dropout: probability with which a weight is dropped.
        backend: "reference" (plain PyTorch, holds every pair), "tiled" (memory-bounded), "flex" (compiled
            FlexAttention), "triton" (fused kernels), or "auto": the fastest that can compute this call, among those
            that are proven on its device. On CUDA that is FlexAttention: the Triton kernels have never run on a GPU
            (`UNPROVEN`), and are used where they are asked for.
        need_weights: also return the post-softmax weights; "reference" alone has them.

    Returns:
        The output, in the type of the values, and the weights or None.

    Raises:
        ValueError: shapes that do not fit, mixed devices, or a backend that cannot compute this call, with the reason.

    >>> from attnflow.bias.terms import Additive
    >>> q = k = v = torch.eye(2)[None, None]
    >>> bias = Additive(columns=torch.tensor([[[0.0, 20.0]]]))
    >>> attention(q, k, v, [bias])[0].round(decimals=3)
    tensor([[[[0., 1.],
              [0., 1.]]]])
    """
    call = make_call(query, key, value, terms, mask, scale, softcap, sinks, dropout)
    output, weights = module_of(choose(call, backend, need_weights)).run(call)
    return output, weights if need_weights else None


def choose(call: Call, backend: str, need_weights: bool = False) -> str:
    """The backend that computes a call: the one asked for, or by "auto" the fastest proven one that can.

    Raises:
        ValueError: an unknown name, or a backend that cannot compute this call.
    """
    if backend == "auto":
        name = next(name for name in _preferred(call, need_weights) if module_of(name).refuses(call) is None)
        if (choice := (name, call.query.device.type)) not in _said and not torch.compiler.is_compiling():
            _said.add(choice)
            _log.info("attention with a bias runs with %r on %s", *choice)
        return name
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of 'auto', {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    if need_weights and backend != "reference":
        raise ValueError(
            f"backend={backend!r} never holds the weights; ask for them with backend='reference' or 'auto'"
        )
    reason = module_of(backend).refuses(call)
    if reason is not None:
        raise ValueError(f"backend={backend!r} cannot compute this call: {reason}; use backend='auto' or 'reference'")
    return backend


def module_of(name: str) -> _Module:
    """The module of a backend, imported on first use; by statements, which a compiler can follow."""
    if name == "reference":
        from attnflow.bias.impl import reference as module
    elif name == "tiled":
        from attnflow.bias.impl import tiled as module
    elif name == "flex":
        from attnflow.bias.impl import flex as module
    else:
        from attnflow.bias.impl import triton as module
    return cast(_Module, module)


def _preferred(call: Call, need_weights: bool) -> tuple[str, ...]:
    if need_weights:
        return ("reference",)
    if call.query.is_cuda:
        return tuple(name for name in ("triton", "flex", "tiled", "reference") if name not in UNPROVEN)
    few = call.query.shape[0] * call.query.shape[2] * call.key.shape[2] <= _FEW
    return ("reference",) if few else ("tiled", "reference")
