"""What a bias sees of one attention layer: its shape when it is built, its vectors when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

Reference = Literal["unrotated", "rotated", "per_head", "hidden"]  # which vectors a bias reads
ShareHeads = bool | Literal["kv"]  # which heads share a network


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one attention layer.

    Attributes:
        index: its number in the model.
        num_heads: query heads.
        num_kv_heads: key-value heads.
        head_dim: width of a head.
        hidden_size: width of the layer's input.
        is_causal: whether queries see earlier keys only.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    is_causal: bool

    def groups(self, share_heads: ShareHeads) -> int:
        """Number of networks of this layer."""
        if share_heads is True:
            return 1
        return self.num_kv_heads if share_heads == "kv" else self.num_heads

    def widths(self, reference: Reference) -> tuple[int, int]:
        """(width of a query's vector, width of a key's vector) as one network reads them."""
        if reference == "hidden":
            return self.hidden_size, self.hidden_size
        if reference == "per_head":
            return self.head_dim, self.head_dim
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim


@dataclass(frozen=True, eq=False)
class Vectors:
    """What one side, queries or keys, shows to a bias in one forward pass; only the new tokens, not cached ones.

    Attributes:
        unrotated: projections of all heads side by side, before rotary embedding, [batch, tokens, heads * head_dim].
        rotated: the same after it, as attention uses them.
        hidden: input of the layer, [batch, tokens, hidden_size].
        positions: of the tokens in their sequence, [batch or 1, tokens].
    """

    unrotated: Float[Tensor, "batch tokens width"] | None
    rotated: Float[Tensor, "batch tokens width"] | None
    hidden: Float[Tensor, "batch tokens hidden_size"] | None
    positions: Int[Tensor, "batch_or_1 tokens"]

    def reference(self, name: str) -> Tensor:
        """The vectors that a config's `reference` names; "per_head" reads the unrotated ones."""
        vectors = {"rotated": self.rotated, "hidden": self.hidden}.get(name, self.unrotated)
        if vectors is None:
            raise ValueError(f"this layer was not asked for its {name} vectors")
        return vectors
