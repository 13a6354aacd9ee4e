"""Embeddings of facts in two halves, of the key and of the value: what a reader learns to read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnflow._core.progress import Progress
from attnflow.knowledge.store import Store
from experiments.reader.encoder import TextEncoder
from experiments.reader.records import SEPARATOR


class Halves:
    """Embeds "key<tab>value" as [key | value]; a text without a value is both. A query is compared with keys alone.

    Attributes:
        version: that of the encoder, marked.
        dim: width of both halves.
    """

    def __init__(self, name: str) -> None:
        self._encoder = TextEncoder(name)
        self.version, self.dim = f"{self._encoder.version}-halves", 2 * self._encoder.dim

    @classmethod
    def of(cls, store: Store) -> Halves:
        """What embedded a store's entries; a ValueError if it has changed."""
        version = next(iter(store.stats().encoders))
        halves = cls(version.rpartition("@")[0])
        if halves.version != version:
            raise ValueError(f"the entries were made by {version}, which is now {halves.version}")
        return halves

    def query(self, text: str) -> Tensor:
        key = self._encoder([text])[0]
        return torch.cat([key, torch.zeros_like(key)])

    def encode(self, texts: Sequence[str], progress: Progress | None = None) -> tuple[Tensor, list[int]]:
        """Embed [key | value], each distinct text once; and which texts were too long."""
        parts = [text.partition(SEPARATOR) for text in texts]
        pairs = [(key, value.strip() or key) for key, _, value in parts]
        distinct = {text: row for row, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
        embeddings, truncated = self._encoder.encode(list(distinct), progress)
        rows = torch.tensor([[distinct[text] for text in pair] for pair in pairs], dtype=torch.int64).view(-1, 2)
        cut = [place for place, pair in enumerate(rows.tolist()) if set(truncated) & set(pair)]
        return embeddings[rows].flatten(1), cut
