"""Edits in force on a model: kept in files, stacked in any order, and taken back one by one, bit for bit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor, nn

from attnflow._core.errors import WrongBase
from attnflow._core.handles import Handle
from attnflow._core.markup import plural
from attnflow.knowledge.base import LayeredKnowledge
from attnflow.knowledge.editing.edit_targets import Moments
from attnflow.knowledge.editing.facts import EditReport
from attnflow.knowledge.editing.stack import Patch, ValueChange, add, fingerprint, in_force, take
from attnflow.knowledge.layered import EntryValues, model_layers, readers
from attnflow.models.loading.addons import Addon, read_addon, same_weights, save_addon
from attnflow.models.subject import Loaded, Subject

_KIND: Final = "edit"
_CHILD: Final = "knowledge"
_PARTS: Final = {"ids": torch.int64, "left": torch.float64, "right": torch.float64}
_NOTABLE: Final = 0.01  # of the norm of a change: rounding that is worth a line


def load_edit(model: nn.Module | Loaded, folder: str | os.PathLike[str], *, strict: bool = True) -> Edited:
    """Apply an edit that `handle.save(folder)` wrote to the model that it was made for, which must be converted.

    The model then has the bits that it had under the edit itself. Several edits may be loaded, in any order: the values
    are those without edits plus all changes, summed in float64 and rounded once to the model's precision.

    Args:
        model: converted by `from_ffn`, or a `Loaded` with such a model.
        folder: the folder that `save` wrote.
        strict: refuse a model whose sizes fit but whose weights are not those that the edit was saved with. Attention
            is compared by samples; the feed-forward layers that the edit changes are compared as they are without
            edits, bit for bit in the precision of the edit, and by samples in another.

    Returns:
        The handle, as `edit` returns it. Its `.report` holds what was measured when the edit was made, on a model of
        that time; `.rounding` says how much of the change a lower precision loses.

    Raises:
        FileNotFoundError: the folder has no saved edit.
        WrongBase: the edit was saved for another model; the message says what differs.
        ValueError: a file is damaged, has another version, or holds NaN or infinity; a layer is not converted; the edit
            is in force already; or a value would be too large for the model's precision.
        RuntimeError: entries with an earlier edit were changed since, or cast. The model stays unchanged in each case.

    Cost: entries x model_dim x rank float64 operations for each layer; an edit of one fact has rank 1.
    """
    subject = Subject.of(model).inside
    subject.require_weights("load_edit")
    plain = editable(subject.model, "load_edit")
    saved = read_addon(folder, _KIND)
    saved.check_base(_identity(subject.model), strict)
    base = next(iter(plain.values())).base
    numbers = model_layers(subject.model)
    changes, report = _changes(saved, base, plain, numbers), saved.config.get("report")
    if strict:
        _check_entries(saved, base, changes, numbers)
    if report is not None and not isinstance(report, Mapping):
        raise ValueError(f"{saved.path} is damaged: its report cannot be read")
    said = None if report is None else EditReport.from_dict(cast("Mapping[str, object]", report))
    return Edited(subject.model, changes, report=said)


class Edited(Handle):
    """The handle of `edit` and `load_edit`: the model gives the new answers until it is removed.

    Edits may be removed in any order. Those that stay then give the model the bits that they give it alone, and the
    last one to go leaves the bits that were there before the first.

    Attributes:
        report: the model's answers now and before; of a loaded edit, when it was made.
        moments: the second moments on the text; pass them as `text` of the next edit. None for a loaded edit.
        count: the number of entries with changed values.
        relative_change: for each feed-forward module that it changes, the norm of the change over that of the values.
        rounding: the norm of what the model's precision rounds off, over that of the change; the largest of any layer.
    """

    report: EditReport

    def __init__(
        self,
        model: nn.Module,
        changes: Mapping[int, Tensor | ValueChange],
        moments: Moments | None = None,
        report: EditReport | None = None,
    ) -> None:
        super().__init__(model)
        self.moments = moments
        if report is not None:
            self.report = report
        self._base = base = cast(LayeredKnowledge, getattr(model, _CHILD))
        self._patch = patch = Patch(
            {
                layer: ValueChange.of(base, layer, change) if isinstance(change, Tensor) else change
                for layer, change in sorted(changes.items())
            },
            model_layers(model),
        )
        norms = [_norm(base.entries[base.rows(layer), base.layouts[layer].value]) for layer in patch.layers]
        moves = add(base, patch)
        self.count = sum(int((move.now != move.before).any(dim=1).sum()) for move in moves)
        self.relative_change = tuple(
            _norm(move.now.double() - move.before.double()) / norm for move, norm in zip(moves, norms, strict=True)
        )
        wanted = [_norm(patch.layers[move.layer].left @ patch.layers[move.layer].right) for move in moves]
        lost = [_norm(move.now.double() - move.exact) for move in moves]
        self.rounding = max((part / whole for part, whole in zip(lost, wanted, strict=True) if whole), default=0.0)

    @property
    def shared(self) -> dict[int, int]:
        """For each of the model's layers, how many of these entries other edits in force change, too, if any."""
        others = [patch for patch in in_force(self._base) if patch is not self._patch]
        counts: dict[int, int] = {}
        for layer, change in self._patch.layers.items():
            theirs = [other.layers[layer].ids for other in others if layer in other.layers]
            if theirs and (count := int(torch.isin(change.ids, torch.cat(theirs)).sum())):
                number = self._patch.numbers[layer]
                counts[number] = counts.get(number, 0) + count
        return counts

    def overlap(self) -> str:
        """Say in words what `shared` holds; "" if no other edit in force changes these entries."""
        entries, layers = plural(sum(self.shared.values()), "entry", "entries"), ", ".join(map(str, self.shared))
        return f"other edits in force change {entries} of these, too, in layers {layers}" if layers else ""

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the edit to a folder, which is returned: its changes as safetensors, its report and its base as JSON.

        For each layer it holds the ids of the changed entries and two factors of the change, in float64: 90 kB for one
        fact in three layers of SmolLM2-135M. If the process is killed, the folder holds an older edit or this one.

        Raises:
            UnsupportedArchitecture: the model has no one list of layers by which it could be recognised.
        """
        Subject(self.model).require_whole("saving an edit", "save it before you shard the model")
        tensors = {
            f"layers.{layer}.{name}": cast(Tensor, getattr(change, name))
            for layer, change in self._patch.layers.items()
            for name in _PARTS
        }
        report = getattr(self, "report", None)
        prints = {f"entries.{layer}": fingerprint(self._base, layer) for layer in self._patch.layers}
        config = {"report": None if report is None else report.to_dict(), **prints}
        return save_addon(folder, _KIND, tensors, config, _identity(self.model))

    def results(self) -> Sequence[EditReport]:
        """The report of the edit."""
        return (self.report,) if hasattr(self, "report") else ()

    def _restore(self) -> None:
        take(self._base, self._patch)

    def _summary(self) -> str:
        layers = ", ".join(dict.fromkeys(str(self._patch.numbers[layer]) for layer in self._patch.layers))
        lines = [str(getattr(self, "report", f"changed values of {self.count:,} entries in layers {layers}"))]
        if self.active and (overlap := self.overlap()):
            lines.append(overlap)
        if self.rounding > _NOTABLE:
            dtype = str(self._base.entries.dtype).removeprefix("torch.")
            lines.append(f"rounding to {dtype} moves the values by {self.rounding:.0%} of the change: float32 keeps it")
        return "\n".join(lines)


def editable(model: nn.Module, what: str) -> dict[int, EntryValues]:
    """Return the converted layers without experts; `ValueError` for another model says what needs it."""
    plain = {reader.layer: reader for reader in readers(model) if isinstance(reader, EntryValues)}
    if not plain or not isinstance(getattr(model, _CHILD, None), LayeredKnowledge):
        raise ValueError(
            f"{what} needs a converted model, got {type(model).__name__}: call af.knowledge.from_ffn(model)"
        )
    return plain


def _changes(
    saved: Addon, base: LayeredKnowledge, plain: Mapping[int, EntryValues], numbers: Mapping[int, int]
) -> dict[int, ValueChange]:
    named: dict[int, dict[str, Tensor]] = {}
    for name, tensor in saved.tensors.items():
        match = re.fullmatch(rf"layers\.(\d+)\.({'|'.join(_PARTS)})", name, re.ASCII)
        if match is None or tensor.dtype != _PARTS[match[2]]:
            raise ValueError(f"{saved.path} is damaged: it holds {name} of {tensor.dtype}")
        named.setdefault(int(match[1]), {})[match[2]] = tensor
    changes: dict[int, ValueChange] = {}
    for layer, parts in sorted(named.items()):
        if layer not in plain:
            raise ValueError(
                f"{saved.path} changes module {layer} of those that read entries, but those without experts are "
                f"{sorted(plain)}: load the model that it was made for"
            )
        width, shapes = base.layouts[layer].model_dim, {name: tuple(tensor.shape) for name, tensor in parts.items()}
        count, rank = len(parts.get("ids", ())), len(parts.get("right", ()))
        if shapes != {"ids": (count,), "left": (count, rank), "right": (rank, width)}:
            raise ValueError(
                f"{saved.path} does not fit the model: layer {numbers[layer]} has shapes {shapes}, expected ids "
                f"[entries], left [entries, rank] and right [rank, {width}]"
            )
        ids = parts["ids"]
        if not bool((ids.diff() > 0).all()) or not torch.isin(ids, base.ids[base.rows(layer)].cpu()).all():
            raise ValueError(f"{saved.path} changes entries that layer {numbers[layer]} of this model does not have")
        changes[layer] = ValueChange(**parts)
    if not changes:
        raise ValueError(f"{saved.path} is damaged: it changes nothing")
    return changes


def _check_entries(saved: Addon, base: LayeredKnowledge, layers: Iterable[int], numbers: Mapping[int, int]) -> None:
    """Raise `WrongBase` if the entries of the edited layers, as they are without edits, are not those of the file."""
    for layer in layers:
        here, there = fingerprint(base, layer), saved.config.get(f"entries.{layer}")
        there = cast("Mapping[str, object]", there) if isinstance(there, Mapping) else {}
        exact = there.get("dtype") == here["dtype"]
        if there.get("sha256") != here["sha256"] if exact else not same_weights(here["samples"], there.get("samples")):
            raise WrongBase(
                f"the edit in {saved.path.parent} was made for other feed-forward weights in layer {numbers[layer]}: "
                "load those, or pass strict=False if this model was trained on from there"
            )


def _identity(model: nn.Module) -> dict[str, object]:
    return Subject(model).stack.identity(_CHILD)


def _norm(values: Tensor) -> float:
    return float(values.detach().cpu().double().norm())
