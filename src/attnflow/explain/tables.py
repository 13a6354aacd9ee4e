"""Rows of a table that a layer reads by the token itself: the per-layer embeddings of Gemma 3n and 4, as entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from torch import Tensor, nn

from attnflow.models.anatomy.feed_forward import PER_LAYER, FeedForward
from attnflow.models.passes.watching import Call, Watch
from attnflow.models.subject import Subject

_TABLE: Final = "embed_tokens_per_layer"

Look = tuple[Tensor, Tensor] | None  # token ids, and act(gate) * row of each, [*tokens, width]; None without a look-up


@dataclass(frozen=True, eq=False)
class TableRows:
    """One layer's part of a table: its row E_v of token v adds P (act(g) * E_v), with a gate g of the stream.

    The layer multiplies the gate by E_v + p, where p is computed from the embedding. What p adds is the "projection".
    """

    subject: Subject
    table: nn.Embedding
    gate: nn.Module
    act: nn.Module
    number: int  # of the layer
    scale: float  # of E_v + p

    letter = "T"

    @property
    def num_entries(self) -> int:
        return self.table.num_embeddings

    @staticmethod
    def of(subject: Subject, site: FeedForward) -> TableRows | None:
        """The table that a feed-forward part multiplies its neurons by, if it is one of those."""
        for path, owner in subject.model.named_modules() if site.first == PER_LAYER else ():
            table = getattr(owner, _TABLE, None)
            if isinstance(table, nn.Embedding) and f".{site.name}.".startswith(f".{path}."):
                layer, number = cast(Any, subject.model.get_submodule(site.name)), int(site.name.rpartition(".")[2])
                scale = float(cast(Any, owner).per_layer_input_scale)
                return TableRows(subject, table, layer.per_layer_input_gate, layer.act_fn, number, scale)
        return None

    def watch(self, looks: list[Look]) -> Sequence[Watch]:
        """Note what each call of the layer looks up."""
        rows: list[tuple[Tensor, Tensor]] = []

        def look(call: Call, output: Tensor) -> None:
            rows[:] = [(call.first, output.detach())]

        def gated(call: Call, output: Tensor) -> None:
            if not rows:  # the model got embeddings, or rows that were looked up before
                looks.append(None)
                return
            ids, every = rows[0]
            row = every.unflatten(-1, (-1, output.shape[-1]))[..., self.number, :]
            looks.append((ids, self.act(output.detach()) * row * self.scale))

        return Watch({_TABLE: self.table}, leave=look), Watch({PER_LAYER: self.gate}, leave=gated)
