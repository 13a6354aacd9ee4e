"""The knowledge base: one matrix of entries, read by all layers or holding the neurons of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnflow._core.checks import index_array, integer, preview
from attnflow.knowledge.attention import Activation, GeneralizedCrossAttention

PARTS: Final = {False: ("up",), True: ("gate", "up")}


class KnowledgeBase(nn.Module):
    """E, a trainable matrix of entries shared by all layers (knowledge, sec. 3.2).

    Attributes:
        entries: E, [num_entries, entry_dim].

    Args:
        num_entries: number of rows.
        entry_dim: number of columns.

    >>> KnowledgeBase(4, 8)
    KnowledgeBase(num_entries=4, entry_dim=8)
    """

    def __init__(self, num_entries: int, entry_dim: int) -> None:
        super().__init__()
        rows, columns = integer("num_entries", num_entries, minimum=1), integer("entry_dim", entry_dim, minimum=1)
        self.entries = nn.Parameter(torch.empty(rows, columns))
        self.reset_parameters()

    @property
    def num_entries(self) -> int:
        """Number of entries."""
        return self.entries.shape[0]

    @property
    def entry_dim(self) -> int:
        """Width of an entry."""
        return self.entries.shape[1]

    def reset_parameters(self) -> None:
        """Draw rows from a normal distribution, of length about 1."""
        nn.init.normal_(self.entries, std=self.entry_dim**-0.5)

    def forward(self) -> Float[Tensor, "entries entry_dim"]:
        """Return E."""
        return self.entries

    def extra_repr(self) -> str:
        """The sizes, for printing."""
        return f"num_entries={self.num_entries}, entry_dim={self.entry_dim}"


@dataclass(frozen=True)
class EntryLayout:
    """The columns of a neuron: [w_up | w_down | b_up], or gated [w_gate | w_up | w_down | b_gate | b_up]."""

    model_dim: int  # d
    gated: bool  # whether there are two keys
    padding: int = 0  # columns of zeros before the thresholds, where a wider layer shares the base

    @property
    def parts(self) -> tuple[str, ...]:
        return PARTS[self.gated]

    @property
    def entry_dim(self) -> int:
        return len(self.parts) * (self.model_dim + 1) + self.model_dim + self.padding

    def key(self, part: str) -> slice:
        return self._block(self.parts.index(part))

    @property
    def value(self) -> slice:
        return self._block(len(self.parts))

    def threshold(self, part: str) -> int:
        return self.entry_dim - len(self.parts) + self.parts.index(part)

    def split(self, rows: Tensor) -> EntryColumns:
        """The columns of rows as views, by one operator, whose gradient is made once."""
        count = len(self.parts)
        *keys, values, _, thresholds = rows.split([self.model_dim] * (count + 1) + [self.padding, count], dim=1)
        numbers = dict(zip(self.parts, thresholds.unbind(1), strict=True))
        return EntryColumns(dict(zip(self.parts, keys, strict=True)), values, numbers)

    @property
    def unread(self) -> slice:
        return slice(self.value.stop, self.entry_dim - len(self.parts))

    def _block(self, index: int) -> slice:
        return slice(index * self.model_dim, (index + 1) * self.model_dim)


@dataclass(frozen=True, eq=False)
class EntryColumns:
    keys: dict[str, Tensor]  # by part, [rows, model_dim]
    values: Tensor  # [rows, model_dim]
    thresholds: dict[str, Tensor]  # by part, [rows]


class LayeredKnowledge(KnowledgeBase):
    """The neurons of all feed-forward layers as rows of one matrix, ordered by layer; each row has a permanent id.

    Its layers are the modules that read it, from 0 (`reader` in a trace): a layer of the model may have several.

    A layer of experts has the entries of all its experts, ordered by expert. A token reads the entries of the experts
    that the model's router chooses, with their weights times the router's.

    Attributes:
        layouts: the column layout of each layer's entries.
        ids: the id of each row, int64[num_entries].
        counts: the number of rows of each layer, int64[layers].
        experts: the expert of each row, int64[num_entries], -1 in layers without experts; None if no layer has any.
    """

    ids: Tensor
    counts: Tensor
    experts: Tensor | None

    def __init__(
        self,
        entries: Float[Tensor, "entries entry_dim"],
        counts: Sequence[int | Sequence[int]],
        layouts: EntryLayout | Sequence[EntryLayout],
    ) -> None:
        """`counts`: for each layer the number of its rows, or a number for each of its experts."""
        nn.Module.__init__(self)
        self.layouts = (layouts,) * len(counts) if isinstance(layouts, EntryLayout) else tuple(layouts)
        self._next_id = 0
        self._num_experts = [0 if isinstance(count, int) else len(count) for count in counts]
        self._views: tuple[object, dict[object, Any]] = None, {}  # of the entries in a certain state
        for name in ("ids", "counts", "experts"):
            self.register_buffer(name, None)
        layers = [[count] if isinstance(count, int) else list(count) for count in counts]
        experts = torch.cat(
            [
                torch.arange(len(rows)).repeat_interleave(torch.tensor(rows)) - int(not number)
                for rows, number in zip(layers, self._num_experts, strict=True)
            ]
        )
        total = torch.tensor([sum(rows) for rows in layers], dtype=torch.int64)
        self.put(nn.Parameter(entries), torch.arange(len(entries)), total, experts if any(self._num_experts) else None)

    @property
    def num_layers(self) -> int:
        """Layers that read this base."""
        return len(self._rows)

    @property
    def layout(self) -> EntryLayout:
        """The column layout of entries; layers with different layouts raise `ValueError`."""
        if len(set(self.layouts)) > 1:
            raise ValueError("the layers have different layouts: read .layouts[layer]")
        return self.layouts[0]

    def num_experts(self, layer: int) -> int:
        """Number of experts of a layer; 0 for a layer without experts."""
        return self._num_experts[layer]

    def rows(self, layer: int, expert: int | None = None) -> slice:
        """Rows of a layer, or of one of its experts."""
        return self._rows[layer] if expert is None else self._expert_rows[layer][expert]

    def block(self, layer: int, expert: int | None = None) -> Float[Tensor, "rows entry_dim"]:
        """The entries of a layer, or of one of its experts, as a view.

        The gradient of a slice is as large as what was sliced; those of a split are joined once. So all layers read one
        split of the matrix, forward pass after forward pass, until the matrix changes.
        """
        if (shared := self._shared()) is None:
            return self.entries[self.rows(layer, expert)]
        if expert is None:
            return shared[None][layer]
        if (blocks := shared.get(layer)) is None:
            blocks = shared[None][layer].split([rows.stop - rows.start for rows in self._expert_rows[layer]])
            if blocks[0]._base is self.entries:
                shared[layer] = blocks
        return blocks[expert]

    def columns(self, layer: int, expert: int | None = None) -> EntryColumns:
        """The parts of `block`, shared in the same way."""
        shared, key = self._shared(), (layer, expert)
        if shared is not None and key in shared:
            return shared[key]
        columns = self.layouts[layer].split(self.block(layer, expert))
        if shared is not None and columns.values._base is self.entries:  # else a transformation made it, for itself
            shared[key] = columns
        return columns

    def _shared(self) -> dict[object, Any] | None:
        """Views of the current entries; None if they are not a plain parameter, or while a graph is traced."""
        entries = cast(object, self.entries)
        if type(entries) is not nn.Parameter or torch.compiler.is_compiling() or entries.is_inference():
            return None
        state = id(entries), entries.data_ptr(), entries._version, entries.requires_grad, torch.is_grad_enabled()
        views = self._views  # once, as another thread may replace it
        if views[0] != state:
            split = entries.split([rows.stop - rows.start for rows in self._rows])
            if split[0]._base is not entries:
                return None
            shared: dict[object, Any] = {None: split}
            self._views = views = state, shared
        return views[1]

    def _apply(self, fn: Any, recurse: bool = True) -> LayeredKnowledge:
        self._views = None, {}  # or they would keep the matrix in the memory that it leaves
        return cast(LayeredKnowledge, super()._apply(fn, recurse))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_views": (None, {})}  # views that have a gradient are not copied

    def layer_of(self, ids: Int[Tensor, " ids"] | Sequence[int]) -> list[int]:
        """Return the layer of each id; an unknown id raises `KeyError`."""
        ends = self.counts.cumsum(0)
        return cast("list[int]", torch.searchsorted(ends, self._find(ids), right=True).tolist())

    def expert_of(self, ids: Int[Tensor, " ids"] | Sequence[int]) -> list[int | None]:
        """Return the expert of each id, None in layers without experts; an unknown id raises `KeyError`."""
        rows = self._find(ids)
        if self.experts is None:
            return [None] * len(rows)
        return [None if expert < 0 else expert for expert in cast("list[int]", self.experts[rows].tolist())]

    def get(self, ids: Int[Tensor, " ids"] | Sequence[int]) -> Float[Tensor, "ids entry_dim"]:
        """Return a copy of the entries with these ids; an unknown id raises `KeyError`."""
        return self.entries.detach()[self._find(ids)]

    def insert(
        self, layer: int, entries: Float[Tensor, "new entry_dim"], *, expert: int | None = None
    ) -> Int[Tensor, " new"]:
        """Append entries to a layer and return their new ids. The parameter is replaced: create optimisers anew.

        Args:
            layer: number of the layer.
            entries: rows.
            expert: the expert that reads them; only for a layer of experts, and required there.

        Raises:
            ValueError: no such layer or expert, a wrong width, NaN or infinity. The base stays unchanged.
        """
        number = self.num_experts(integer("layer", layer, 0, self.num_layers - 1))
        if number and expert is None:
            raise ValueError(f"layer {layer} has {number} experts: pass expert=0 to {number - 1}, the reader")
        if number:
            integer("expert", expert, 0, number - 1)
        elif expert is not None:
            raise ValueError(f"layer {layer} has no experts, got expert={expert}: leave it out")
        self._check(entries, [layer] * len(entries))
        where, counts = self.rows(layer, expert).stop, self.counts.clone()
        ids = torch.arange(len(entries), device=self.ids.device) + self._next_id
        counts[layer] += len(entries)

        def joined(old: Tensor, new: Tensor) -> Tensor:
            return torch.cat([old[:where], new.to(old), old[where:]])

        tags = torch.full_like(ids, -1 if expert is None else expert)
        tags = None if self.experts is None else joined(self.experts, tags)
        self.put(joined(self.entries.detach(), entries), joined(self.ids, ids), counts, tags)
        return ids

    def update(self, ids: Int[Tensor, " ids"] | Sequence[int], entries: Float[Tensor, "ids entry_dim"]) -> None:
        """Overwrite entries in place.

        Raises:
            KeyError, ValueError: an unknown id; a wrong shape, NaN or infinity. The base stays unchanged.
        """
        rows = self._find(ids)
        if len(entries) != len(rows):
            raise ValueError(f"expected an entry for each of the {len(rows)} ids, got {len(entries)} entries")
        self._check(entries, self.layer_of(ids))
        with torch.no_grad():
            self.entries[rows] = entries.to(self.entries)

    def delete(self, ids: Int[Tensor, " ids"] | Sequence[int]) -> None:
        """Remove entries; each layer must keep at least one, but an expert may lose all of its entries.

        The parameter is replaced: create optimisers anew.

        Raises:
            KeyError, ValueError: an unknown id; a layer would be left empty. The base stays unchanged.
        """
        rows = self._find(ids)
        keep = torch.ones(len(self.ids), dtype=torch.bool, device=self.ids.device)
        keep[rows] = False
        counts = torch.stack([keep[self.rows(layer)].sum() for layer in range(self.num_layers)])
        if bool((counts == 0).any()):
            raise ValueError(f"layer {int((counts == 0).nonzero()[0])} would be left without entries: keep one")
        tags = None if self.experts is None else self.experts[keep]
        self.put(self.entries.detach()[keep], self.ids[keep], counts, tags)

    def put(self, entries: Tensor, ids: Tensor, counts: Tensor, experts: Tensor | None = None) -> None:
        """Replace all entries, ordered by layer and expert; `entries` becomes a new parameter unless it is one."""
        if not isinstance(entries, nn.Parameter):
            entries = nn.Parameter(entries, requires_grad=self.entries.requires_grad)
        self.entries, self.ids, self.counts, self.experts = entries, ids, counts, experts
        self._views = None, {}
        self._rows = _consecutive(counts)
        self._expert_rows = [
            _consecutive(experts[rows].bincount(minlength=number), rows.start) if number and experts is not None else []
            for number, rows in zip(self._num_experts, self._rows, strict=True)
        ]
        self._next_id = max(self._next_id, int(ids.max()) + 1)

    def attention(
        self, layer: int, activation: str | Activation, output_bias: Float[Tensor, " model_dim"] | None = None
    ) -> GeneralizedCrossAttention:
        """Express a layer as the paper's cross-attention (eq. 1-9): `attention(hidden,
        base.entries[base.rows(layer)])`.

        W_Q is sqrt(d_k) times the identity. W_K and W_V consist of zeros and ones that select an entry's keys and
        value, and B1 reads its last coordinates. The model's own code computes the same function up to rounding, by
        slicing the rows. For the rows of one expert it is that expert's output before the router's weight.

        Args:
            layer: number of the layer.
            activation: the layer's: "relu", "gelu", "silu", or a function of scores [..., entries].
            output_bias: b2, if the layer has one (`EntryValues.bias`).
        """
        integer("layer", layer, 0, self.num_layers - 1)
        layout, width = self.layouts[layer], self.layouts[layer].model_dim
        form: dict[str, Any] = {"gated": layout.gated, "threshold": "coordinate", "bias": output_bias is not None}
        attention = GeneralizedCrossAttention(width, width, layout.entry_dim, activation=activation, **form)
        attention.to(self.entries)
        identity = torch.eye(width, dtype=self.entries.dtype, device=self.entries.device)
        with torch.no_grad():
            for parameter in attention.parameters():
                parameter.zero_()
            attention.query[0] = identity * width**0.5
            for index, part in enumerate(layout.parts):
                attention.key[index, 0, layout.key(part)] = identity
            attention.value[0, layout.value] = identity
            if attention.output_bias is not None:
                attention.output_bias.copy_(cast(Tensor, output_bias))
        return attention

    def _find(self, ids: object) -> Tensor:
        wanted = torch.from_numpy(index_array("ids", ids)).to(self.ids.device)
        order = self.ids.argsort()
        place = torch.searchsorted(self.ids[order], wanted).clamp(max=len(self.ids) - 1)
        rows = order[place]
        unknown = wanted[self.ids[rows] != wanted]
        if len(unknown):
            raise KeyError(f"no entries with ids {preview(unknown.tolist())}")
        return rows

    def _check(self, entries: Tensor, layers: Sequence[int]) -> None:
        if entries.ndim != 2 or entries.shape[1] != self.entry_dim:
            raise ValueError(f"entries must be [entries, {self.entry_dim}], got shape {tuple(entries.shape)}")
        finite = torch.isfinite(entries).all(dim=1)
        if not bool(finite.all()):
            raise ValueError(f"entry {int((~finite).nonzero()[0])} holds NaN or infinity")
        for layer in {layer for layer in layers if self.layouts[layer].padding}:
            unread = self.layouts[layer].unread
            if bool(entries[torch.tensor(layers) == layer, unread].any()):
                raise ValueError(
                    f"layer {layer} does not read columns {unread.start} to {unread.stop - 1} of its entries: set them "
                    "to 0"
                )


def _consecutive(counts: Tensor, start: int = 0) -> list[slice]:
    ends = [start, *cast("list[int]", (counts.cumsum(0) + start).tolist())]
    return [slice(first, last) for first, last in pairwise(ends)]
