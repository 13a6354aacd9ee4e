"""Where the heads of a projection lie inside a stored tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

# Reads a stored tensor by name, or the rows from the first to the last but one of it.
Read = Callable[[str, tuple[int, int] | None], Tensor]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a stored weight that make up the query heads, or the key heads, of one attention module.

    The output rows of the weight are read as [groups, blocks, head_dim]; the heads are the blocks from `start` to
    `stop` of every group, in that order. This one pattern covers every layout in use:

    - separate linears: one group, all blocks;
    - [query | key | value]: one group, with the query heads first;
    - head-interleaved (H, 3, head_dim): a group for each head, of blocks query, key, value;
    - GQA-grouped (num_kv_heads, group + 2, head_dim): a group for each KV head.

    Attributes:
        tensor: name of the stored tensor.
        head_dim: rows of a block.
        blocks: blocks in a group.
        start: the first block taken from each group.
        stop: the block after the last one taken.
        groups: how many groups there are.
        transposed: whether the weight is stored (in, out), as by `Conv1D`.
    """

    tensor: str
    head_dim: int
    blocks: int
    start: int
    stop: int
    groups: int = 1
    transposed: bool = False

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the stored tensors that are read."""
        return (self.tensor,)

    def load(self, read: Read) -> Tensor:
        """The heads as a weight [heads * head_dim, in], reading no other rows where they lie in one run."""
        if self.transposed or self.groups > 1:
            return self.take(read(self.tensor, None))
        whole = self.start == 0 and self.stop == self.blocks
        return read(self.tensor, None if whole else (self.start * self.head_dim, self.stop * self.head_dim))

    def take(self, weight: Tensor) -> Tensor:
        """The heads as a weight [heads * head_dim, in]: a view where they lie in one run, otherwise a copy."""
        return self._blocks(weight).flatten(0, 2)

    def put(self, weight: Tensor, heads: Tensor) -> None:
        """Write `heads`, [heads * head_dim, in], to their place in `weight`."""
        place = self._blocks(weight)
        place.copy_(heads.reshape(place.shape))

    def _blocks(self, weight: Tensor) -> Tensor:
        stored = weight.T if self.transposed else weight
        return stored.unflatten(0, (self.groups, self.blocks, self.head_dim))[:, self.start : self.stop]
