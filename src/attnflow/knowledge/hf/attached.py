"""The handle of a model that reads a store: entries are written through it, and it takes the store away again."""

from __future__ import annotations

import os
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
from attnflow.knowledge.store.entry import Vectors, matrix


class Attached(Handle):
    """What `attach` changed.

    Attributes:
        store: that the model reads.
        readers: the layers that read it; each has its own `retrieval`, and bounds the error of what it left out.
    """

    encoder = ""  # that made the entries, "" if unknown

    def __init__(
        self,
        model: nn.Module,
        store: Store,
        retrieval: Retrieval | None,
        source: EntrySource,
        undo: ExitStack,  # takes the store away again when it is closed
    ) -> None:
        super().__init__(model)
        self.store, self.source, self.readers, self._undo = store, source, readers(model), undo
        for reader in self.readers:
            undo.callback(setattr, reader, "retrieval", reader.retrieval)
            reader.retrieval = retrieval or reader.retrieval

    def insert(self, *, embeddings: Vectors, **columns: Any) -> Int64[Tensor, " n"]:
        """`Store.insert` with the thresholds that the model's layers give the entries.

        Args:
            embeddings: [n, dim], finite.
            **columns: what else `Store.insert` takes: ids, texts, sources, encoder.

        Raises:
            ValueError: as `Store.insert`.
        """
        rows = torch.from_numpy(matrix("embeddings", embeddings, self.store.dim))
        named: dict[str, Any] = {"encoder": self.encoder or None, **columns}
        return self.store.insert(embeddings=rows, thresholds=self.source.thresholds(rows), **named)

    def upsert(self, *, ids: Indices, embeddings: Vectors, **columns: Any) -> None:
        """`Store.upsert`, likewise."""
        rows = torch.from_numpy(matrix("embeddings", embeddings, self.store.dim))
        self.store.upsert(ids=ids, embeddings=rows, thresholds=self.source.thresholds(rows), **columns)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the readers of a decoder to a folder, safetensors and JSON: our tensors alone, neither model nor store.

        After a kill the folder holds the old readers or the new ones, whole.

        Raises:
            ValueError: a model whose own layers read the store, or NaN or infinity in a reader. Nothing is written.
        """
        raise ValueError(f"{type(self.model).__name__} has no reader that `attach` put into it to save")

    def _restore(self) -> None:
        self._undo.close()

    def _summary(self) -> str:
        kinds = {str(reader.retrieval or "all of them") for reader in self.readers}
        reads = "reads" if len(self.readers) == 1 else "read"
        return (
            f"{plural(len(self.readers), 'layer')} of {type(self.model).__name__} {reads} {len(self.store):,} entries "
            f"of {self.store.uri}: {', '.join(kinds)}"
        )
