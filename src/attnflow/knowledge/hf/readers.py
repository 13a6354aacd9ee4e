"""What reads entries in a model, layer by layer: converted feed-forward layers and modular blocks look the same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attnflow.knowledge.base import KnowledgeBase
from attnflow.knowledge.hf.modular.model import ModularModel
from attnflow.knowledge.layered import EntryScores, EntryValues, LayeredKnowledge
from attnflow.knowledge.memory_layer.reader import KnowledgeReader, Observer, Reading
from attnflow.knowledge.memory_layer.retrieval import Retrieval
from attnflow.knowledge.memory_layer.source import Source, StoredKnowledge


class LayerReader(ABC):
    """One layer that reads entries.

    Attributes:
        layer: its number, from 0.
    """

    def __init__(self, module: EntryValues | KnowledgeReader) -> None:
        self.layer, self._module = module.layer, module

    @property
    def retrieval(self) -> Retrieval | None:
        """Which entries are read (of a converted layer, those of the largest weights); None: all."""
        return self._module.retrieval

    @retrieval.setter
    def retrieval(self, retrieval: Retrieval | None) -> None:
        self._module.retrieval = retrieval

    @property
    @abstractmethod
    def observer(self) -> Observer | None:
        """Called with each `Reading`; None."""

    @observer.setter
    @abstractmethod
    def observer(self, observer: Observer | None) -> None: ...

    @property
    @abstractmethod
    def num_entries(self) -> int:
        """How many entries this layer may read."""

    def every(self) -> Int[Tensor, " entries"]:
        """What `Reading.ids` would hold if it listed all entries, in order."""
        return torch.arange(self.num_entries)

    @abstractmethod
    def ids(self, positions: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """The ids of entries at positions of a `Reading` (of what `Reading.ids` holds, or of all in order)."""

    @abstractmethod
    def values(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "heads entries model_dim"]:
        """What entries at such positions write into the residual stream at weight 1, for each head."""

    @abstractmethod
    def thresholds(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "parts heads entries"]:
        """Their thresholds, which scores contain."""

    @property
    @abstractmethod
    def output_bias(self) -> Tensor | None:
        """b2, [model_dim], or None."""

    @abstractmethod
    def error_bound(self, reading: Reading) -> Float[Tensor, " tokens"]:
        """How far this layer's output of each token (flattened) can be from that of reading all entries.

        In Euclidean norm; 0 where all were read, infinite after an approximate search.
        """


class ConvertedReader(LayerReader):
    """A feed-forward layer that `from_ffn` opened."""

    def __init__(self, base: LayeredKnowledge, scores: list[EntryScores], values: EntryValues) -> None:
        super().__init__(values)
        self._base, self._scores, self._values = base, scores, values
        self._observer: Observer | None = None
        self._hooks: list[RemovableHandle] = []
        self._seen: dict[str, Tensor] = {}

    @property
    def observer(self) -> Observer | None:
        """Called with each `Reading`; None. Installed as forward hooks."""
        return self._observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._seen, self._observer = [], {}, observer
        if observer is not None:
            self._hooks = [module.register_forward_hook(self._scored) for module in self._scores]
            self._hooks.append(self._values.register_forward_pre_hook(self._weighed))

    @property
    def num_entries(self) -> int:
        """How many entries belong to this layer."""
        return int(self._base.counts[self.layer])

    def ids(self, positions: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Ids in the base."""
        ids = self._base.ids[self._base.rows(self.layer)][positions.clamp(min=0)]
        return ids.masked_fill(positions < 0, -1)

    def values(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "1 entries model_dim"]:
        """The values of entries."""
        return self._values.weight.T[positions].unsqueeze(0)

    def thresholds(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "parts 1 entries"]:
        """The thresholds of entries."""
        layout = self._base.layout
        rows = self._base.entries[self._base.rows(self.layer)]
        return torch.stack([rows[positions, layout.threshold(part)] for part in layout.parts]).unsqueeze(1)

    @property
    def output_bias(self) -> Tensor | None:
        """b2."""
        return self._values.bias

    def error_bound(self, reading: Reading) -> Float[Tensor, " tokens"]:
        """The sum of the sizes of weights that were left out is bounded, whatever the activation, gated or not."""
        if reading.certificate is None:
            return reading.weights.new_zeros(reading.weights.shape[:-2].numel())
        return reading.certificate.error_bound(self._values.weight.detach().norm(dim=0).amax())

    def _scored(self, module: nn.Module, _: object, output: Tensor) -> None:
        parts = cast(EntryScores, module).parts
        self._seen.update(zip(parts, output.detach().chunk(len(parts), dim=-1), strict=True))

    def _weighed(self, _: nn.Module, inputs: tuple[Tensor]) -> None:
        weights = inputs[0].detach()
        scores = torch.stack([self._seen[part] for part in self._base.layout.parts])
        self._seen = {}
        rows = certificate = None
        if not self._values.reads_all(weights):
            rows, certificate = self._values.keep(weights)
            weights = weights.gather(-1, rows.clamp(min=0)).masked_fill(rows < 0, 0)
            scores = scores.gather(-1, rows.clamp(min=0).expand(len(scores), *rows.shape))
            rows = rows.unsqueeze(-2)
        reading = Reading(self.layer, rows, scores.unsqueeze(-2), weights.unsqueeze(-2), certificate)
        cast(Observer, self._observer)(reading)


class ModularReader(LayerReader):
    """A block of a modular model, on its own base or on a source, such as a store; `Reading.ids` are then its ids."""

    def __init__(self, reader: KnowledgeReader, base: KnowledgeBase, source: Source | None) -> None:
        super().__init__(reader)
        self._reader, self._base, self._source = reader, base, source

    @property
    def observer(self) -> Observer | None:
        """Called with each `Reading`; None."""
        return self._reader.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._reader.observer = observer

    @property
    def num_entries(self) -> int:
        """Rows of E, or of the source."""
        return self._base.num_entries if self._source is None else self._source.num_entries

    def every(self) -> Int[Tensor, " entries"]:
        """All ids of a store, or all rows."""
        return self._source.store.ids() if isinstance(self._source, StoredKnowledge) else super().every()

    def ids(self, positions: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Rows of E are their own ids, and what is read of a source has ids already."""
        return positions

    def values(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "heads entries model_dim"]:
        """E W_V of each head."""
        attention = self._reader.attention
        return torch.einsum("ne,hed->hnd", self._rows(positions)[:, : attention.entry_dim], attention.value)

    def thresholds(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "parts heads entries"]:
        """B1(E), of a source those that are stored beside the entries."""
        attention, width = self._reader.attention, self._reader.columns
        if self._source is None:
            return attention.thresholds(self._base.entries)[..., positions]
        columns = self._rows(positions)[:, attention.entry_dim :][:, self.layer * width :][:, :width]
        return columns.T.reshape(attention.parts, attention.num_heads, len(positions))

    @property
    def output_bias(self) -> Tensor | None:
        """b2, a parameter of the block."""
        return self._reader.attention.output_bias

    def error_bound(self, reading: Reading) -> Float[Tensor, " tokens"]:
        """See `KnowledgeReader.error_bound`."""
        return self._reader.error_bound(reading, self._base.entries if self._source is None else self._source)

    def _rows(self, positions: Tensor) -> Tensor:
        if self._source is None:
            return self._base.entries[positions]
        source, wanted = self._source, positions.cpu()
        rows = source.store.rows(wanted) if isinstance(source, StoredKnowledge) else source.rows()[wanted]
        return rows.to(self._reader.attention.value)


def reads_entries(model: nn.Module) -> bool:
    """Whether a model reads entries: converted, or modular."""
    return any(isinstance(module, EntryValues | ModularModel) for module in model.modules())


def readers(model: nn.Module) -> list[LayerReader]:
    """What reads entries in a model, in the order of layers.

    Args:
        model: converted by `from_ffn`, or a `ModularForCausalLM` (or `ModularModel`).

    Raises:
        ValueError: neither.
    """
    modular = next((m for m in model.modules() if isinstance(m, ModularModel)), None)
    if modular is not None:
        blocks = [module for module in modular.modules() if isinstance(module, KnowledgeReader)]
        return [ModularReader(block, modular.knowledge, modular.source) for block in blocks]
    values = [module for module in model.modules() if isinstance(module, EntryValues)]
    if not values:
        raise ValueError(
            f"{type(model).__name__} reads no knowledge base; af.knowledge.from_ffn opens feed-forward layers"
        )
    base = cast(LayeredKnowledge, model.get_submodule("knowledge"))
    scores = [module for module in model.modules() if isinstance(module, EntryScores)]
    return [ConvertedReader(base, [s for s in scores if s.layer == v.layer], v) for v in values]
