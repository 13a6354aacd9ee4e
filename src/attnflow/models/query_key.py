"""`QueryKey`: the query and key projections of one attention module, in one layout for every model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

Kind = Literal["self", "cross"]


@dataclass(frozen=True, eq=False)
class QueryKey:
    """The query and key projections of one attention module, whatever way the checkpoint stores them.

    Both weights are stored (out, in): row `h * head_dim + i` of `query` makes component i of the query of head h from
    the token. Query head h scores against KV head `h // (num_heads // num_kv_heads)`. The bilinear form of a head is
    `query_h.T @ key_h`, of which the scores of geometry, sec. 3 are taken. Biases, rotations by position, the gains of
    norms and the factor 1/sqrt(head_dim) have no part in it.

    Attributes:
        layer: number of the layer in its tower, from 0, as the model counts.
        name: path of the attention module or of the tensors' common stem in the file.
        tower: the part of a model of several: "encoder", "decoder", "vision", "text", "audio", ...; "" if it has one.
        kind: whether the keys are made from the same sequence as the queries.
        query: [num_heads * head_dim, d_query].
        key: [num_kv_heads * head_dim, d_key]; d_key differs from d_query in some cross-attention.
        num_heads: heads of the query.
        num_kv_heads: heads of the key, a divisor of `num_heads`.
        head_dim: width of a head.
    """

    layer: int
    name: str
    tower: str
    kind: Kind
    query: Float[Tensor, "out d_query"]
    key: Float[Tensor, "kv_out d_key"]
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.name}: {self.num_heads} query heads cannot share {self.num_kv_heads} KV heads")
        for what, weight, heads in (("query", self.query, self.num_heads), ("key", self.key, self.num_kv_heads)):
            if weight.ndim != 2 or weight.shape[0] != heads * self.head_dim:
                raise ValueError(
                    f"{self.name}: {what} must be [{heads} heads x {self.head_dim}, width], got {list(weight.shape)}"
                )
