"""`attach`: lets a model read a store, in addition to its weights or in place of its own base; and its handle."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from attnflow._core.checks import Indices
from attnflow._core.handles import Handle
from attnflow._core.markup import plural
from attnflow.knowledge.layered import readers
from attnflow.knowledge.modular import ModularModel, ModularReader
from attnflow.knowledge.reading.store_reader import StoreReader, add_readers, save_readers
from attnflow.knowledge.retrieval import Retrieval
from attnflow.knowledge.store import Store
from attnflow.knowledge.store.entry import StoreStats, Vectors, matrix
from attnflow.knowledge.store.source import EntrySource
from attnflow.models.subject import Loaded, Subject


def attach(
    model: nn.Module | Loaded,
    store: Store,
    *,
    retrieval: Retrieval | None = None,
    write: bool = False,
    reader: str | os.PathLike[str] | None = None,
    layers: Sequence[int] | None = None,
    key_dim: int = 256,
    num_heads: int = 1,
) -> Attached:
    """Let a model read a store of entries; edits of the store act from the next token on.

    How it reads depends on the model:

    - A modular model reads the store instead of its own entries.
    - Any other decoder gets readers after some of its layers: cross-attention from the layer's tokens to the entries,
      added behind a gate. The gate starts at 0, which leaves outputs unchanged bit for bit. The readers must be
      trained; `handle.save` saves them, and `reader=` loads them for any store of the same encoder.

    `save_pretrained` writes the weights of readers, but not the store and `retrieval`.

    Args:
        model: a transformers model, one of its stacks (`model.get_decoder()`), or what `af.load_model` returned.
        store: for readers, a store of texts; for a modular model, a store of width entry_dim with
            `config.threshold_columns` threshold columns.
        retrieval: which entries each layer reads, found by the store's search; by default all, or the reader's own.
        write: overwrite stored thresholds that differ from those of a modular model.
        reader: the folder of a saved reader; by default a new, untrained one.
        layers: after which layers a new reader reads; by default every second one of the last third.
        key_dim: the width of a new reader's queries and keys.
        num_heads: the heads of a new reader; they are summed.

    Returns:
        A handle: insert entries through it; `remove()` restores the model.

    Raises:
        FileNotFoundError: the folder has no saved reader.
        ValueError: the store is empty, or its encoder or width is not the reader's; the reader was saved for another
            model; there are several stacks of layers; stored thresholds are not this model's; or the model already
            reads a store or was converted by `from_ffn` (edit the entries in its base).
        UnsupportedArchitecture: the model has no known layers. The model stays unchanged.

    Cost: a copy of the entries in the model's precision and place, made again after an edit. Each token, layer and head
        reads all of them or makes a search. A modular model computes the thresholds of all entries once.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2))
    >>> store = Store.open("memory", dim=8)
    >>> _ = store.insert(embeddings=torch.eye(8))
    >>> with attach(model, store) as handle:
    ...     print(handle)
    1 layer of LlamaForCausalLM reads all of the 8 entries of memory
    """
    subject = Subject.of(model)
    if not isinstance(cast(object, store), Store):
        raise TypeError(f"store must be an open store, af.knowledge.Store.open(uri), got {type(store).__name__}")
    modular = next((module for module in subject.model.modules() if isinstance(module, ModularModel)), None)
    if modular is None or reader is not None or layers is not None:
        added = add_readers(subject, store, reader, layers, key_dim, num_heads)
        return Attached(subject.model, store, retrieval, *added)
    return Attached(subject.model, store, retrieval, *_read_instead(modular, store, write))


def _read_instead(modular: ModularModel, store: Store, write: bool) -> tuple[ExitStack, EntrySource]:
    width = modular.config.entry_dim
    if modular.source is not None:
        raise ValueError(f"{type(modular).__name__} reads a store already: remove that handle first")
    if store.dim != width:
        raise ValueError(f"the model reads entries of width {width}, but the store has width {store.dim}")
    layers = [module for module in modular.modules() if isinstance(module, ModularReader)]

    def thresholds(entries: Float[Tensor, "entries entry_dim"]) -> Float[Tensor, "entries columns"]:
        moved = entries.to(modular.knowledge.entries)
        return torch.cat([layer.threshold_columns(moved) for layer in layers], dim=1).cpu()

    source = EntrySource(store, thresholds)
    if write:
        source.write_thresholds()
    elif len(stale := source.stale()):
        raise ValueError(
            f"the stored thresholds of {len(stale):,} of {len(store):,} entries differ from this model's: pass "
            "write=True to overwrite them"
        )
    modular.source, undo = source, ExitStack()
    undo.callback(setattr, modular, "source", None)
    return undo, source


class Attached(Handle):
    """The handle of `attach`: the model reads a store until it is removed.

    Attributes:
        store: the store that the model reads.
        readers: the layers that read it; each has its own `retrieval` and can bound the error of leaving entries out.
    """

    def __init__(
        self,
        model: nn.Module,
        store: Store,
        retrieval: Retrieval | None,
        undo: ExitStack,  # detaches the store when it is closed
        source: EntrySource,
        encoder: str = "",  # of the entries, "" if unknown
    ) -> None:
        super().__init__(model)
        self.store, self.source, self.readers, self._undo, self.encoder = store, source, readers(model), undo, encoder
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
        added = [reader for reader in self.readers if isinstance(reader, StoreReader)]
        if not added:
            raise ValueError(
                f"expected readers that attach added, but {self.kind}'s own layers read the store: save the model"
            )
        return save_readers(folder, self.model, added, self.encoder)

    def results(self) -> Sequence[StoreStats]:
        """The store in numbers."""
        return (self.store.stats(),)

    def _restore(self) -> None:
        self._undo.close()

    def _summary(self) -> str:
        chosen = {reader.retrieval for reader in self.readers}
        read = {
            "all" if choice is None else f"the best {choice.k}" if choice.k else f"those above {choice.threshold:g}"
            for choice in chosen
        }
        reads = "reads" if len(self.readers) == 1 else "read"
        return (
            f"{plural(len(self.readers), 'layer')} of {self.kind} {reads} {' or '.join(sorted(read))} "
            f"of the {plural(len(self.store), 'entry', 'entries')} of {self.store.uri}"
        )
