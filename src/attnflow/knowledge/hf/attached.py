"""The handle of a model that reads a store: it inserts entries, and detaches the store again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from attnflow._core.checks import Indices
from attnflow._core.handles import Handle
from attnflow._core.markup import plural
from attnflow.knowledge.layered import readers
from attnflow.knowledge.retrieval import Retrieval
from attnflow.knowledge.source import EntrySource
from attnflow.knowledge.store import Store
from attnflow.knowledge.store.entry import StoreStats, Vectors, matrix


class Attached(Handle):
    """The handle of `attach`: the model reads a store until it is removed.

    Attributes:
        store: the store that the model reads.
        readers: the layers that read it; each has its own `retrieval` and can bound the error of leaving entries out.
    """

    encoder = ""  # of the entries, "" if unknown

    def __init__(
        self,
        model: nn.Module,
        store: Store,
        retrieval: Retrieval | None,
        source: EntrySource,
        undo: ExitStack,  # detaches the store when it is closed
    ) -> None:
        super().__init__(model)
        self.store, self.source, self.readers, self._undo = store, source, readers(model), undo
        for reader in self.readers:
            undo.callback(setattr, reader, "retrieval", reader.retrieval)
            reader.retrieval = retrieval or reader.retrieval

    def insert(self, *, embeddings: Vectors, **columns: Any) -> Int64[Tensor, " n"]:
        """Insert entries into the store (`Store.insert`), with the thresholds that the model's layers compute for them.

        Args:
            embeddings: [n, dim], finite.
            **columns: the other arguments of `Store.insert`: ids, texts, sources, encoder.

        Raises:
            ValueError: as `Store.insert`.
        """
        rows = torch.from_numpy(matrix("embeddings", embeddings, self.store.dim))
        named: dict[str, Any] = {"encoder": self.encoder or None, **columns}
        return self.store.insert(embeddings=rows, thresholds=self.source.thresholds(rows), **named)

    def upsert(self, *, ids: Indices, embeddings: Vectors, **columns: Any) -> None:
        """Replace or add entries (`Store.upsert`), with the thresholds that the model's layers compute for them."""
        rows = torch.from_numpy(matrix("embeddings", embeddings, self.store.dim))
        self.store.upsert(ids=ids, embeddings=rows, thresholds=self.source.thresholds(rows), **columns)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Save the readers of a decoder to a folder as safetensors and JSON, without the model and the store.

        If the process is killed, the folder holds either the old readers or the new ones.

        Raises:
            ValueError: the model's own layers read the store, or a reader holds NaN or infinity. Nothing is written.
        """
        raise ValueError(
            f"expected readers that attach added, but {type(self.model).__name__}'s own layers read the store: save "
            "the model"
        )

    def results(self) -> Sequence[StoreStats]:
        """The store in numbers."""
        return (self.store.stats(),)

    def _restore(self) -> None:
        self._undo.close()

    def _summary(self) -> str:
        chosen = {reader.retrieval for reader in self.readers}
        read = {
            "all" if one is None else f"the best {one.k}" if one.k else f"those above {one.threshold:g}"
            for one in chosen
        }
        reads = "reads" if len(self.readers) == 1 else "read"
        return (
            f"{plural(len(self.readers), 'layer')} of {type(self.model).__name__} {reads} {' or '.join(sorted(read))} "
            f"of the {plural(len(self.store), 'entry', 'entries')} of {self.store.uri}"
        )
