"""Generalized cross-attention from a layer's tokens to the knowledge base: its activations and evaluation orders."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from attnflow._core.checks import integer

THRESHOLDS: Final = ("mlp", "coordinate")
CONSTANT: Final = "constant"  # a threshold that does not depend on entries; modular models have none
ORDERS: Final = ("query_side", "folded", "naive")
HIDDEN: Final = 64  # width of the threshold network
_CACHED: Final = 1 << 20  # bytes of entries in a block: what a core's L2 cache holds
_POINTWISE: Final = (functional.relu, functional.gelu, functional.silu)  # a weight depends on its own score only
Activation = Callable[[Tensor], Tensor]


def sparsemax(scores: Float[Tensor, "*tokens entries"]) -> Float[Tensor, "*tokens entries"]:
    """max(score - tau, 0), with tau such that the weights sum to 1 (Martins and Astudillo, 2016)."""
    if not scores.shape[-1]:
        return scores
    # Differences to the highest score, in float32 at least: large scores and half precision would swallow the 1.
    kind = torch.promote_types(scores.dtype, torch.float32)
    shifted = scores.to(kind) - scores.detach().amax(dim=-1, keepdim=True).to(kind)
    ordered = shifted.sort(dim=-1, descending=True).values
    count = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=kind)
    total = ordered.cumsum(dim=-1)
    support = (1 + count * ordered > total).sum(dim=-1, keepdim=True)
    tau = (total.gather(-1, support - 1) - 1) / support
    return (shifted - tau).clamp(min=0).to(scores.dtype)


def softmax_one(scores: Float[Tensor, "*tokens entries"]) -> Float[Tensor, "*tokens entries"]:
    """exp(s_i) / (1 + sum of exp(s_j)): what does not match adds nothing (Miller, "Attention is off by one", 2023)."""
    if not scores.shape[-1]:
        return scores
    top = scores.detach().amax(dim=-1, keepdim=True).clamp(min=0)
    exponents = (scores - top).exp()
    return exponents / ((-top).exp() + exponents.sum(dim=-1, keepdim=True))


ACTIVATIONS: Final = MappingProxyType(
    {"relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu, "sparsemax": sparsemax}
)


def named(name: str | Activation) -> Activation:
    if callable(name):
        return name
    if name not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, ACTIVATIONS))} or a function, got {name!r}")
    return ACTIVATIONS[name]


class ThresholdHidden(nn.Linear):
    """First layer of the threshold network; a separate type, so that any model initialises it as `nn.Linear`."""


class ThresholdOut(nn.Linear):
    """Last layer of the threshold network: zero at first, as a random bias may leave a layer without active entries."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


@dataclass(frozen=True, eq=False)
class Folded:
    """Generalized cross-attention folded with its entries into a feed-forward layer of width heads * entries.

    FFN(h) = act(h W_1 + b_1) W_2 + b_2 (knowledge, eq. 21). Here W_1 = W_Q W_K^T E^T / sqrt(d_k), b_1 = B1(E) and W_2 =
    E W_V. Gated: (act(h W_g + b_g) * (h W_u + b_u)) W_2 + b_2. Exact, but stale once E or a projection changes.
    """

    scores: Float[Tensor, "parts heads model_dim entries"]  # W_1 for each part (one, or gate and up)
    thresholds: Float[Tensor, "parts heads entries"]  # b_1 for each part
    values: Float[Tensor, "heads entries model_dim"]  # W_2
    output_bias: Float[Tensor, " model_dim"] | None  # b_2, or None
    activation: Activation  # applied to scores

    def __call__(self, hidden: Float[Tensor, "*tokens model_dim"]) -> Float[Tensor, "*tokens model_dim"]:
        """The layer's output for tokens. Cost: O(tokens * heads * entries * model_dim)."""
        scores = torch.einsum("...d,phde->p...he", hidden, self.scores) + _spread(self.thresholds, hidden.ndim)
        weights = weigh(scores, self.activation)
        return _plus(torch.einsum("...he,hed->...d", weights, self.values), self.output_bias)


class GeneralizedCrossAttention(nn.Module):
    """C = act(Q K^T / sqrt(d_k) + B1(E)) V + b2 with Q = H W_Q, K = E W_K, V = E W_V (knowledge, eq. 1-9).

    Heads are summed, not concatenated: each reads all of E with its own projections. A gated layer has two keys for
    each entry: (act(Q K_g^T / sqrt(d_k) + B_g) * (Q K_u^T / sqrt(d_k) + B_u)) V + b2. It is our extension: gated
    feed-forward networks do not have the paper's form.

    The three orders of evaluation compute the same function:

    - `naive`: first K and V for all entries. O(entries * d_E * (d_k + d) + tokens * entries * (d_k + d)).
    - `folded`: as a feed-forward layer, `fold(entries)(hidden)`. It folds on every call; call `fold` once instead where
      E and the projections do not change. It holds a copy of K and V for this layer.
    - `query_side`: the query is mapped to the entries' space, score = (H W_Q W_K^T / sqrt(d_k)) . e + b1 and output =
      (A E) W_V + b2. O(tokens * entries * d_E). One E serves all layers, and editing an entry changes one row. Without
      gradients it runs in blocks that fit the cache, with memory O(tokens * d_E) beside E.

    Args:
        model_dim: d, width of the tokens.
        key_dim: d_k, width of a head's queries and keys.
        entry_dim: d_E, width of an entry.
        num_heads: number of heads.
        activation: "relu", "gelu", "silu", "sparsemax", or a function of scores [..., entries].
        gated: whether each entry has two keys.
        threshold: B1(E): "mlp" (a small network on the entry), "coordinate" (the entry's last coordinate, or last two
            if gated: gate then up), "constant" (one parameter for each head, the same for all entries).
        bias: whether to add b2.

    Raises:
        ValueError: a size or a name is not allowed.

    >>> layer = GeneralizedCrossAttention(model_dim=8, key_dim=4, entry_dim=6)
    >>> layer(torch.zeros(2, 3, 8), torch.zeros(5, 6)).shape
    torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        model_dim: int,
        key_dim: int,
        entry_dim: int,
        num_heads: int = 1,
        activation: str | Activation = "relu",
        gated: bool = False,
        threshold: str = "mlp",
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.model_dim = integer("model_dim", model_dim, minimum=1)
        self.key_dim = integer("key_dim", key_dim, minimum=1)
        self.entry_dim = integer("entry_dim", entry_dim, minimum=1)
        self.num_heads = integer("num_heads", num_heads, minimum=1)
        self.parts = 2 if gated else 1
        self.activation = named(activation)
        allowed = (*THRESHOLDS, CONSTANT)
        if threshold not in allowed:
            raise ValueError(f"threshold must be one of {', '.join(map(repr, allowed))}, got {threshold!r}")
        if threshold == "coordinate" and entry_dim < self.parts:
            raise ValueError(f"threshold='coordinate' needs an entry_dim of at least {self.parts}, got {entry_dim}")
        self.threshold = threshold
        heads = self.num_heads
        self.query = nn.Parameter(torch.empty(heads, model_dim, key_dim))
        self.key = nn.Parameter(torch.empty(self.parts, heads, entry_dim, key_dim))
        self.value = nn.Parameter(torch.empty(heads, entry_dim, model_dim))
        self.output_bias = nn.Parameter(torch.empty(model_dim)) if bias else None
        if threshold == "mlp":
            self.threshold_network = nn.Sequential(
                ThresholdHidden(entry_dim, HIDDEN), nn.ReLU(), ThresholdOut(HIDDEN, self.parts * heads)
            )
        if threshold == CONSTANT:
            self.constant = nn.Parameter(torch.empty(self.parts, heads))
        self.reset_parameters()

    @property
    def gated(self) -> bool:
        """Whether every entry has two keys."""
        return self.parts == 2

    def reset_parameters(self) -> None:
        """Draw projections with standard deviation fan_in ** -0.5; set biases and thresholds to zero."""
        nn.init.normal_(self.query, std=self.model_dim**-0.5)
        nn.init.normal_(self.key, std=self.entry_dim**-0.5)
        nn.init.normal_(self.value, std=(self.entry_dim * self.num_heads) ** -0.5)
        if self.output_bias is not None:
            nn.init.zeros_(self.output_bias)
        if self.threshold == "mlp":
            for place in (0, 2):
                cast(nn.Linear, self.threshold_network[place]).reset_parameters()
        elif self.threshold == CONSTANT:
            nn.init.zeros_(self.constant)

    def thresholds(self, entries: Float[Tensor, "entries entry_dim"]) -> Float[Tensor, "parts heads entries"]:
        """B1(E) of each part and head (knowledge, eq. 8)."""
        shape = (self.parts, self.num_heads, entries.shape[0])
        if self.threshold == "coordinate":
            return entries[:, -self.parts :].T[:, None].expand(shape)
        if self.threshold == "mlp":
            return self.threshold_network(entries).T.reshape(shape)
        return self.constant.unsqueeze(-1).expand(shape)

    def project_query(
        self, hidden: Float[Tensor, "*tokens model_dim"]
    ) -> Float[Tensor, "parts *tokens heads entry_dim"]:
        """Return the query in the space of entries, H W_Q W_K^T / sqrt(d_k): its product with an entry is the score."""
        query = torch.einsum("...d,hdk->...hk", hidden, self.query) / math.sqrt(self.key_dim)
        return torch.einsum("...hk,phek->p...he", query, self.key)

    def fold(self, entries: Float[Tensor, "entries entry_dim"]) -> Folded:
        """This layer with the entries multiplied in. Cost: O(entries * heads * d_k * (d_E + d)), once."""
        self.check(None, entries)
        key, values = self._project(entries)
        scores = torch.einsum("hdk,phnk->phdn", self.query, key) / math.sqrt(self.key_dim)
        return Folded(scores, self.thresholds(entries), values, self.output_bias, self.activation)

    def forward(
        self,
        hidden: Float[Tensor, "*tokens model_dim"],
        entries: Float[Tensor, "entries entry_dim"],
        order: str = "query_side",
    ) -> Float[Tensor, "*tokens model_dim"]:
        """Return what the entries E add to each token; wrong widths or an unknown order raise `ValueError`."""
        self.check(hidden, entries)
        if order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(map(repr, ORDERS))}, got {order!r}")
        if order == "folded":
            return self.fold(entries)(hidden)
        thresholds = self.thresholds(entries)
        if order == "query_side":
            return self.read_all(hidden, entries, thresholds)
        query = torch.einsum("...d,hdk->...hk", hidden, self.query)
        key, values = self._project(entries)
        scores = torch.einsum("...hk,phnk->p...hn", query, key) / math.sqrt(self.key_dim)
        weights = weigh(scores + _spread(thresholds, hidden.ndim), self.activation)
        return _plus(torch.einsum("...hn,hnd->...d", weights, values), self.output_bias)

    def _project(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [parts, heads, entries, key_dim] and values [heads, entries, model_dim] of entries."""
        return torch.einsum("ne,phek->phnk", entries, self.key), torch.einsum("ne,hed->hnd", entries, self.value)

    def score(
        self,
        hidden: Float[Tensor, "*tokens model_dim"],
        entries: Float[Tensor, "entries entry_dim"],
        thresholds: Float[Tensor, "parts heads entries"],
    ) -> Float[Tensor, "parts *tokens heads entries"]:
        """Return the scores of all entries, query product plus the given thresholds."""
        return self.project_query(hidden) @ entries.T + _spread(thresholds, hidden.ndim)

    def write(self, read: Float[Tensor, "*tokens heads entry_dim"]) -> Float[Tensor, "*tokens model_dim"]:
        """Map sums of weighted entries, one for each head, to the layer's output: times W_V, plus b2."""
        return _plus(torch.einsum("...he,hed->...d", read, self.value), self.output_bias)

    def read_all(
        self,
        hidden: Float[Tensor, "*tokens model_dim"],
        entries: Float[Tensor, "entries entry_dim"],
        thresholds: Float[Tensor, "parts heads entries"],
    ) -> Float[Tensor, "*tokens model_dim"]:
        """Return the layer's output from all entries with the given thresholds, in the "query_side" order."""
        inference = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if inference and self.activation in _POINTWISE:
            return self.write(self._read_in_blocks(hidden, entries, thresholds))
        return self.write(weigh(self.score(hidden, entries, thresholds), self.activation) @ entries)

    def _read_in_blocks(self, hidden: Tensor, entries: Tensor, thresholds: Tensor) -> Tensor:
        """Compute A E in blocks that fit a core's cache: each entry is loaded once for its score and its value."""
        queries = self.project_query(hidden)
        flat = queries.flatten(1, -2)  # [parts, tokens * heads, d_E]
        shape = (self.parts, flat.shape[1] // self.num_heads, self.num_heads)
        size = max(64, _CACHED // (self.entry_dim * entries.element_size()))
        read = torch.zeros_like(flat[0])
        for block, limits in zip(entries.split(size), thresholds.split(size, dim=-1), strict=True):
            scores = (flat @ block.T).view(*shape, len(block)).add_(limits.unsqueeze(1))
            read.addmm_(weigh(scores, self.activation).flatten(0, 1), block)
        return read.view(queries.shape[1:])

    def check(self, hidden: Float[Tensor, "..."] | None, entries: Float[Tensor, "..."] | None = None) -> None:
        """Raise `ValueError` for tokens or entries that do not fit this layer."""
        if hidden is not None and (hidden.ndim == 0 or hidden.shape[-1] != self.model_dim):
            raise ValueError(f"hidden must have width {self.model_dim}, got shape {tuple(hidden.shape)}")
        if entries is not None and (entries.ndim != 2 or entries.shape[1] != self.entry_dim):
            raise ValueError(f"entries must be [entries, {self.entry_dim}], got shape {tuple(entries.shape)}")


def weigh(scores: Float[Tensor, "parts *tokens"], function: Activation) -> Tensor:
    """Return the weights of entries: act(score), or act(gate) * up."""
    return function(scores[0]) if scores.shape[0] == 1 else function(scores[0]) * scores[1]


def _spread(thresholds: Tensor, ndim: int) -> Tensor:
    """Reshape thresholds [parts, heads, entries] to broadcast over scores [parts, *tokens, heads, entries]."""
    parts, heads, count = thresholds.shape
    return thresholds.reshape(parts, *[1] * (ndim - 1), heads, count)


def _plus(written: Tensor, bias: Tensor | None) -> Tensor:
    return written if bias is None else written + bias
