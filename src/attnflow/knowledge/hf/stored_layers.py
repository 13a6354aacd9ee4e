"""A converted model whose entries are in a store: written there, and taken from there as they are edited."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnflow._core.checks import integer, preview
from attnflow._core.progress import Progress
from attnflow._core.threads import Turns, untraced
from attnflow.knowledge.base import LayeredKnowledge
from attnflow.knowledge.hf.attached import Attached
from attnflow.knowledge.store import Store

MADE_BY: Final = "from_ffn"  # where an entry of a store says which encoder made it
OTHER_LAYER: Final = -1e9  # finite: of an infinite score GELU and SiLU are no numbers
_BATCH: Final = 4096
_FOLLOWED: Final = "followed"  # of a base, the store that it follows


class StoredLayers(Attached):
    """A converted model that copies the entries of a store before each forward pass that follows an edit."""

    def __init__(self, model: nn.Module, store: Store, write: bool) -> None:
        base = self._base = _base(model)
        if followed(base) is not None:
            raise ValueError(f"{type(model).__name__} reads a store already: remove that one first")
        if write:
            save_entries(model, store)
        self.store, self._revision, self._turns = store, None, Turns()
        with ExitStack() as undo:
            undo.callback(base.put, base.entries, base.ids, base.counts.clone(), base.experts)
            base.entries = nn.Parameter(base.entries.detach().clone(), requires_grad=base.entries.requires_grad)
            self._copy()
            base.__dict__[_FOLLOWED] = self
            before = model.register_forward_pre_hook(self._follow)
            self._hooks = before, model.register_forward_hook(self._after, always_call=True)
            undo.callback(self.stop)
            super().__init__(model, store, None, None, undo.pop_all())

    def stop(self) -> None:
        """Stop following the store; the entries stay as they are."""
        for hook in self._hooks:
            hook.remove()
        del self._base.__dict__[_FOLLOWED]

    def _thresholds(
        self, rows: Tensor, layers: Sequence[int] | None, experts: Sequence[int | None] | None
    ) -> Tensor | None:
        """Return the threshold columns that assign new entries to layers and experts."""
        if layers is None:
            raise ValueError("each entry of a converted model belongs to one layer: give layers, one for each entry")
        return layer_thresholds(layers, self._base.num_layers, self._base.checked_experts(layers, experts))

    @untraced
    def _follow(self, *_: object) -> None:
        """Before a call: copy the entries if they were edited, once no other thread is in a call that reads them."""
        if not self._turns.mine and self._revision != self.store.revision:
            with self._turns.alone():
                self._copy()
        self._turns.enter()

    @untraced
    def _after(self, *_: object) -> None:
        self._turns.leave()

    def _copy(self) -> None:
        """Replace the entries of the model by those of an edited store, bit for bit; after an error they are unchanged.

        Entries that stay keep their order, so an unedited store gives the same bits. The parameter is a new one if the
        number of entries changed.
        """
        base, revision = self._base, self.store.revision
        if self._revision == revision:
            return
        _check_widths(base, self.store)
        ids = self.store.ids()
        layers, experts = _stored_layers(self.store, ids, base)
        counts = torch.bincount(layers, minlength=base.num_layers)
        if not bool(counts.all()):
            raise ValueError(f"layer {int(counts.argmin())} would be left without entries")
        now = _layers_of(base), torch.full_like(base.ids, -1) if base.experts is None else base.experts
        places = {key: row for row, key in enumerate(_keys(base.ids, *now))}
        at = [places.get(key, len(places)) for key in _keys(ids, layers, experts)]  # new, or moved: behind
        order = np.lexsort((ids, torch.tensor(at), experts, layers))
        ids = ids[order]
        rows = torch.as_tensor(self.store.vectors(ids)).to(base.entries)
        if rows.shape == base.entries.shape:  # in place: then the parameter, which optimisers hold, stays the same
            with torch.no_grad():
                rows = base.entries.copy_(rows)
        tags = None if base.experts is None else experts[order].to(base.ids)
        base.put(rows, ids.to(base.ids.device), counts.to(base.counts), tags)
        self._revision = revision  # an edit that is refused is refused again


def followed(base: LayeredKnowledge) -> StoredLayers | None:
    """Return the link to the store that a base follows, if any."""
    return base.__dict__.get(_FOLLOWED)


def layer_thresholds(
    layers: Sequence[int], num_layers: int, experts: Sequence[int | None] | None = None
) -> Float[Tensor, "entries columns"]:
    """Build threshold columns that assign entries to layers: 0 in the layer's own column, -1e9 in all others.

    A search with `threshold_column=layer` then finds only that layer's entries. With experts, a last column holds the
    expert's number (-1 for None) and is not a threshold.

    >>> layer_thresholds([1], 2, experts=[7]).tolist()
    [[-1000000000.0, 0.0, 7.0]]
    """
    columns = torch.full((len(layers), num_layers), OTHER_LAYER)
    for row, layer in enumerate(layers):
        columns[row, integer("layer", layer, 0, num_layers - 1)] = 0.0
    if experts is None:
        return columns
    numbers = [-1 if expert is None else expert for expert in experts]
    return torch.cat([columns, torch.tensor(numbers, dtype=columns.dtype)[:, None]], dim=1)


def save_entries(model: nn.Module, store: Store, *, name: str | None = None, progress: Progress | None = None) -> None:
    """Make a store hold the entries of a converted model, bit for bit, under the same ids.

    An embedding is a whole row. To find the entries of a layer that a hidden state h activates, search for [h | 0 | ...
    | 1 | 0], with 1 at the threshold of the first part, and `threshold_column=layer`. Each batch is written atomically,
    and a call after an interruption continues. A ValueError reports float64 entries, other widths, or a store of texts.
    """
    base = _base(model)
    if base.entries.dtype == torch.float64:
        raise ValueError("a store holds float32 numbers, and the entries are float64: convert model.float()")
    _check_widths(base, store)
    foreign = [version for version in store.stats().encoders if not version.startswith(MADE_BY)]
    if foreign:
        raise ValueError(f"the store holds entries made by {preview(foreign)}, which would be lost: use another one")
    encoder = f"{MADE_BY}:{name or getattr(getattr(model, 'config', None), 'name_or_path', '') or type(model).__name__}"
    ids, held, layers = base.ids.cpu(), store.ids(), _layers_of(base)
    for start in range(0, len(ids), _BATCH):
        batch, rows = ids[start : start + _BATCH], base.entries.detach()[start : start + _BATCH].float().cpu()
        present = torch.isin(batch, held)
        changed = ~present
        changed[present] = store.vectors(batch[present]).ne(rows[present]).any(dim=1)
        if bool(changed.any()):
            where: list[int] = layers[start : start + _BATCH][changed].tolist()
            experts = None if base.experts is None else base.expert_of(batch[changed])
            store.upsert(
                ids=batch[changed],
                embeddings=rows[changed],
                sources=[
                    f"layer {layer}" if expert is None else f"layer {layer}, expert {expert}"
                    for layer, expert in zip(where, experts or [None] * len(where), strict=True)
                ],
                thresholds=layer_thresholds(where, base.num_layers, experts),
                encoder=encoder,
            )
        if progress is not None:
            progress(start + len(batch), len(ids), "entries")
    store.delete(held[~torch.isin(held, ids)])


def _base(model: nn.Module) -> LayeredKnowledge:
    base = getattr(model, "knowledge", None)
    if not isinstance(base, LayeredKnowledge):
        raise ValueError(f"{type(model).__name__} is not converted: af.knowledge.from_ffn(model) opens its entries")
    return base


def _check_widths(base: LayeredKnowledge, store: Store) -> None:
    if (store.dim, store.num_thresholds) != (base.entry_dim, base.num_thresholds):
        raise ValueError(
            f"the entries of this model need a store with dim={base.entry_dim} and "
            f"num_thresholds={base.num_thresholds}, got dim={store.dim} and num_thresholds={store.num_thresholds}"
        )


def _layers_of(base: LayeredKnowledge) -> Tensor:
    return torch.arange(base.num_layers).repeat_interleave(base.counts.cpu())


def _keys(*columns: Tensor) -> Iterator[tuple[int, ...]]:
    return zip(*(column.tolist() for column in columns), strict=True)


def _stored_layers(store: Store, ids: Tensor, base: LayeredKnowledge) -> tuple[Tensor, Tensor]:
    """Decode the layer of each entry, and its expert, -1 without, from the threshold columns."""
    columns, experts = store.thresholds(ids), torch.full_like(ids, -1)
    if base.experts is not None:
        columns, experts = columns[:, :-1], columns[:, -1].round().long()
    own = columns == 0
    bad = (own.sum(dim=1) != 1) | (columns.masked_fill(own, OTHER_LAYER) != OTHER_LAYER).any(dim=1)
    if bool(bad.any()):
        raise ValueError(
            f"entry {int(ids[bad][0])} does not say which one layer it belongs to: its thresholds must be those of "
            "attnflow.knowledge.hf.stored_layers.layer_thresholds"
        )
    layers = own.int().argmax(dim=1)
    numbers = torch.tensor([base.num_experts(layer) for layer in range(base.num_layers)])[layers]
    bad = torch.where(numbers > 0, (experts < 0) | (experts >= numbers), experts != -1)
    if bool(bad.any()):
        entry, layer, number, expert = (int(one[bad][0]) for one in (ids, layers, numbers, experts))
        raise ValueError(
            f"entry {entry} belongs to expert {expert} of layer {layer}, which has {number} experts: the last "
            "threshold column must be an expert's number, -1 in layers without (see layer_thresholds)"
        )
    return layers, experts
