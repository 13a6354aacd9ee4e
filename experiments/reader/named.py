"""What makes readers read the entries that a search of the store has named, in place of what tokens ask by."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor

from attnflow._core.checks import preview
from attnflow._core.markup import plural
from attnflow.knowledge.reading.attach import Attached
from attnflow.knowledge.reading.store_reader import StoreReader


@contextmanager
def reading(handle: Attached, ids: Sequence[int]) -> Generator[None]:
    """Within it, each row of a batch reads the entry that is named for it and no other.

    The last token of each pass reads it with all the weight, tokens before it with as much as the entry gets against
    none. So `generate` answers from that entry. Edits of it act on the next token.

    Args:
        handle: of a decoder that has readers.
        ids: one for each row of the batches that follow, padded on the left; beams of a row read the same one.
    """
    readers, store = cast("list[StoreReader]", handle.readers), handle.store
    chosen = [int(one) for one in ids]
    missing = [one for one in chosen if one not in store]
    if missing or not chosen:
        raise ValueError(f"ids must name entries of the store, one for each row, got {preview(missing or chosen)}")

    def named(reader: StoreReader, asked: Tensor) -> Tensor:
        distinct = sorted(set(chosen))
        vectors = store.vectors(distinct)[[distinct.index(one) for one in chosen]]
        return reader.gate * math.sqrt(reader.attention.model_dim) * _read(reader, asked, vectors.to(asked))

    try:
        for reader in readers:
            vars(reader)["forward"] = partial(named, reader)
        yield
    finally:
        for reader in readers:
            del vars(reader)["forward"]


def _read(reader: StoreReader, asked: Tensor, rows: Tensor) -> Tensor:
    """What one entry for each row says: to the last token with all the weight, to others with theirs."""
    if len(asked) % len(rows):
        raise ValueError(
            f"{plural(len(rows), 'entry', 'entries')} to read for {plural(len(asked), 'row')}: give one for each row"
        )
    attention = reader.attention
    scores = attention.score(asked, rows, attention.thresholds(rows))[0]
    own = torch.arange(len(rows), device=asked.device).repeat_interleave(len(asked) // len(rows))  # beams share
    scores = scores[torch.arange(len(asked), device=asked.device), ..., own]
    weights = torch.cat([scores[:, :-1].sigmoid(), torch.ones_like(scores[:, -1:])], dim=1)
    values = torch.einsum("ne,hed->nhd", rows, attention.value)[own]
    return torch.einsum("bth,bhd->btd", weights, values)
