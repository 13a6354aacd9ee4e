"""Which keys each query may attend to, asked for a block of queries at a time so that nothing holds every pair."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final

import torch
from jaxtyping import Bool
from torch import Tensor

from attnflow.masks.mask import Mask

Rows = Callable[[slice], Tensor]

_CHUNK: Final = 256  # queries made at once where all of them are needed


class Allow:
    """`allow[q, k]`: query q attends to key k; a boolean relation for each batch element, and head if they differ.

    Attributes:
        num_queries: number of rows.
        num_keys: number of columns.
        batch: batch elements whose relations differ, or 1.
    """

    def __init__(
        self, rows: Rows | None, num_queries: int, num_keys: int, *, batch: int = 1, dense: Tensor | None = None
    ) -> None:
        self.num_queries, self.num_keys, self.batch = num_queries, num_keys, batch
        self._rows = rows
        self._dense = dense
        self._made: dict[Hashable, object] = {}

    @classmethod
    def of(cls, allow: object, num_queries: int, num_keys: int, device: torch.device) -> Allow:
        """The relation behind anything that a caller may pass.

        Args:
            allow: None (every pair), a `Mask`, a boolean tensor [queries, keys] or [batch or 1, heads or 1, queries,
                keys], or an `Allow`.
            num_queries: of the call.
            num_keys: of the call.
            device: where the call's tensors are.

        Raises:
            TypeError: something else, or a tensor that is not boolean.
            ValueError: of another size than the call.
        """
        if isinstance(allow, Allow):
            relation = allow
        elif allow is None:
            relation = cls(None, num_queries, num_keys)
        elif isinstance(allow, Mask):
            mask = allow

            def rows(block: slice) -> Tensor:
                return mask[block.start : block.stop, :].dense().to(device)[None, None]

            relation = cls(rows, mask.num_queries, mask.num_keys)
        elif isinstance(allow, Tensor):
            relation = cls.from_dense(allow)
        else:
            raise TypeError(f"the mask must be a Mask, a boolean tensor or None, got {type(allow).__name__}")
        if (relation.num_queries, relation.num_keys) != (num_queries, num_keys):
            raise ValueError(
                f"the mask has {relation.num_queries} queries and {relation.num_keys} keys, the call {num_queries} and "
                f"{num_keys}; slice it to the rows and columns of this call"
            )
        return relation

    @classmethod
    def from_dense(cls, allow: Tensor) -> Allow:
        """A given boolean tensor, [queries, keys] or [batch or 1, heads or 1, queries, keys]."""
        if allow.dtype != torch.bool:
            raise TypeError(
                f"a mask is boolean, True where a query attends, got {allow.dtype}: of ones and zeros pass mask.bool(),"
                " of zeros and -inf mask == 0; a bias on scores is a term, attnflow.bias.terms.Dense of [batch or 1, "
                "maps, queries, keys]"
            )
        if allow.ndim not in (2, 4):
            raise ValueError(f"a mask is [queries, keys] or [batch, heads, queries, keys], got {tuple(allow.shape)}")
        whole = allow if allow.ndim == 4 else allow[None, None]
        return cls(None, whole.shape[2], whole.shape[3], batch=whole.shape[0], dense=whole)

    def rows(self, block: slice) -> Bool[Tensor, "batch heads queries keys"] | None:
        """Rows `block.start .. block.stop - 1` as booleans (batch and heads may be 1), or None where all are True."""
        if self._dense is not None:
            return self._dense[:, :, block]
        return None if self._rows is None else self._rows(block)

    def dense(self) -> Bool[Tensor, "batch heads queries keys"] | None:
        """All rows, or None where every pair is allowed. Memory: every pair."""
        if self._dense is None and self._rows is not None:
            starts = range(0, self.num_queries, _CHUNK)
            blocks = [self._rows(slice(start, min(start + _CHUNK, self.num_queries))) for start in starts]
            self._dense = torch.cat(blocks, dim=2)
        return self._dense

    def derived(self, key: Hashable, make: Callable[[], object]) -> object:
        """`make()`, kept under `key` for as long as this relation lives: layers share one relation, and its forms."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
