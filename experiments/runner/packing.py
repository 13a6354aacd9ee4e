"""Documents packed into rows of one length, and drawn by (seed, step) so that a resumed run reads the same rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from attnflow._core.checks import integer

IGNORED = -100  # the label that transformers leaves out of the loss


class Packed(Dataset[dict[str, Tensor]]):
    """Rows of `length` tokens, cut from documents laid end to end.

    Documents in one row are kept apart: positions start at 0 in each. By this transformers recognises them, and forbids
    attention between them unless it keeps a key-value cache (`Trainer` sets `use_cache=False`). The first token of
    a document, or of a row, is predicted from nothing: its label is ignored.

    Attributes:
        tokens: int64[rows, length].
        positions: likewise.
        labels: likewise.

    >>> rows = Packed([[5, 6, 7], [8, 9]], length=5)
    >>> rows[0]["position_ids"].tolist(), rows[0]["labels"].tolist()
    ([0, 1, 2, 0, 1], [-100, 6, 7, -100, 9])
    """

    def __init__(self, documents: Iterable[Sequence[int]], length: int) -> None:
        integer("length", length, minimum=2)
        parts = [torch.as_tensor(document, dtype=torch.long) for document in documents if len(document)]
        total = sum(part.numel() for part in parts)
        if total < length:
            raise ValueError(
                f"the documents have {total} tokens, which is not one row of {length}: give more text, or "
                "a smaller length"
            )
        first = torch.zeros(total, dtype=torch.bool)
        first[torch.tensor([0, *(part.numel() for part in parts[:-1])]).cumsum(0)] = True
        # Whole rows; the rest, less than a row, is left out.
        self.tokens, first = (flat[: total // length * length].view(-1, length) for flat in (torch.cat(parts), first))
        place = torch.arange(length).expand(first.shape)
        self.positions = place - torch.where(first, place, 0).cummax(dim=1).values
        self.labels = self.tokens.masked_fill(self.positions == 0, IGNORED)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def __getitem__(self, index: int | slice | Sequence[int]) -> dict[str, Tensor]:
        """Arguments of a causal language model for one row, or for several at once."""
        return {
            "input_ids": self.tokens[index],
            "position_ids": self.positions[index],
            "labels": self.labels[index],
        }


class Drawn(Dataset[dict[str, Tensor]]):
    """A given number of draws from other rows, each a function of (seed, draw) alone: every row once, then again.

    A shuffling data loader resumes exactly only if its random state was saved; this needs no state.
    """

    def __init__(self, rows: Dataset[dict[str, Tensor]], draws: int, seed: int) -> None:
        self.rows, self.draws, self.seed = rows, integer("draws", draws, minimum=1), integer("seed", seed)
        self.size = len(rows)  # pyright: ignore[reportArgumentType]

    def __len__(self) -> int:
        return self.draws

    def index(self, draw: int) -> int:
        epoch, place = divmod(draw, self.size)
        return int(_order(self.seed, epoch, self.size)[place])

    def __getitem__(self, draw: int) -> dict[str, Tensor]:
        if not 0 <= draw < self.draws:
            raise IndexError(draw)
        return self.rows[self.index(draw)]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(size)
