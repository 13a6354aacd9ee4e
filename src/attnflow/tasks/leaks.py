"""`check`: proves that no label of a task can be read off its inputs, or shows the path along which it leaks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import numpy as np

from attnflow._core.checks import IntArray, integer, preview
from attnflow._core.errors import LeakFound
from attnflow._core.markup import plural
from attnflow._core.results import Result
from attnflow.masks.intervals import IntervalRows, ragged
from attnflow.order.flow import analyze
from attnflow.tasks.merging import MergedTask
from attnflow.tasks.task import Label, Task

_CHUNK: Final = 1 << 22  # (label, carrier) pairs that are looked at at a time
_SHOWN: Final = 8  # leaks and positions that a text names before it counts the rest


@dataclass(frozen=True)
class Leak:
    """A label that its own position can read.

    Attributes:
        position: the labelled position.
        label: the label.
        carrier: a position that it can read (or itself) whose input was made of the label's data token.
        witness: a shortest path of the information, from the carrier `witness[0]` to the labelled position;
            `witness[l]` is the position it has reached after layer l.
    """

    position: int
    label: Label
    carrier: int
    witness: tuple[int, ...]

    @property
    def route(self) -> str:
        """The witness in words: "layer 1: 9 -> 17, layer 2: 17 -> 5"."""
        if len(self.witness) == 1:
            return f"position {self.position} holds it before layer 1"
        steps = zip(self.witness, self.witness[1:], strict=False)
        return ", ".join(f"layer {layer}: {here} -> {there}" for layer, (here, there) in enumerate(steps, start=1))

    def __str__(self) -> str:
        what = f"token {self.label.data_index} (id {self.label.target_id})"
        return (
            f"the label of position {self.position}, {what}, is in the input of position {self.carrier}: {self.route}"
        )

    def to_dict(self) -> dict[str, object]:
        return {**vars(self), "label": self.label.to_dict(), "witness": list(self.witness), "route": self.route}


@dataclass(frozen=True)
class LeakReport(Result):
    """Whether the labels of a task leak, and how.

    Attributes:
        leaks: every pair of a label and a position that carries it, by labelled position; empty if proved clean.
        dead: positions that no labelled position can read: they cost compute and train nothing.
        unsupervised: data tokens in the task that no label predicts.
        depth: layers until all information has flowed.
        density: share of allowed pairs; with a mask per layer, the mean over layers.
        num_positions: length of the sequence.
        num_labels: number of labels.
        layers: the number of layers checked; None for any number.
    """

    leaks: tuple[Leak, ...]
    dead: tuple[int, ...]
    unsupervised: tuple[int, ...]
    depth: int
    density: float
    num_positions: int
    num_labels: int
    layers: int | None = None

    @property
    def ok(self) -> bool:
        """Whether no label leaks."""
        return not self.leaks

    def raise_if_leaks(self) -> None:
        """Raise `LeakFound`, with the first leak's witness, if a label leaks."""
        for leak in self.leaks[:1]:
            more = f" ({len(self.leaks)} leaks in all)" if len(self.leaks) > 1 else ""
            raise LeakFound(f"{leak}{more}", witness=leak.witness)

    def to_dict(self) -> dict[str, object]:
        """The report as plain data, with the route of each leak."""
        return {**super().to_dict(), "leaks": [leak.to_dict() for leak in self.leaks]}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> LeakReport:
        """The report that `to_dict` described."""
        leaks = [
            Leak(each["position"], Label.from_dict(each["label"]), each["carrier"], tuple(each["witness"]))
            for each in cast(list[Any], values.get("leaks", []))
        ]
        return replace(super().from_dict({**values, "leaks": []}), leaks=tuple(leaks))

    def rows(self) -> list[dict[str, object]]:
        """One row for each leak."""
        return [
            {
                "position": leak.position,
                "task": leak.label.task,
                "data_index": leak.label.data_index,
                "target_id": leak.label.target_id,
                "carrier": leak.carrier,
                "route": leak.route,
            }
            for leak in self.leaks
        ]

    def __str__(self) -> str:
        within = "any number of layers" if self.layers is None else plural(self.layers, "layer")
        leaking = len({(leak.position, leak.label) for leak in self.leaks})
        verdict = f"{leaking} of {self.num_labels} labels leak{'s' * (leaking == 1)}" if leaking else "no label leaks"
        size = f"{plural(self.num_positions, 'position')}, {plural(self.num_labels, 'label')}"
        lines = [
            f"{verdict} within {within}",
            *(f"  {leak}" for leak in self.leaks[:_SHOWN]),
            *[f"  ... and {len(self.leaks) - _SHOWN} more"] * (len(self.leaks) > _SHOWN),
            f"{size}, depth {self.depth}, density {self.density:.3f}",
            f"dead positions: {preview(self.dead, _SHOWN) if self.dead else 'none'}",
            f"unsupervised data tokens: {preview(self.unsupervised, _SHOWN) if self.unsupervised else 'none'}",
        ]
        return "\n".join(lines)


def check(task: Task | MergedTask, layers: int | None = None) -> LeakReport:
    """Prove that no label of a task can leak, or show how it does; also list dead positions and missing labels.

    A label leaks iff a position whose provenance holds the label's data token is at or below the labelled position.
    Provenance counts: an averaged token carries all that it averages. The answer is exact for the mask; a model that
    mixes positions elsewhere (a scan, a convolution, a normalisation over the sequence) is for `af.audit`.

    Args:
        task: any task, dense or not; or what `merge` returned.
        layers: number of layers of the model; by default the closure, which holds for every depth. For a task with a
            mask per layer, how many of its layers to check, by default all. There the product of their relations
            decides, and a witness says where the information is after each layer.

    Cost: for a dense task, such as a merged one, O(log intervals) for each pair of a label and an input made of its
    token; otherwise one row of the closure per labelled position. Each leak takes a search for its path.

    >>> import attnflow as af
    >>> tokens = [af.tasks.Token(id, i) for i, id in enumerate([5, 6, 7])]
    >>> labels = [af.tasks.Label(0, target=tokens[2])]
    >>> report = af.tasks.check(af.tasks.Task(tokens, labels, af.masks.from_edges([(0, 1), (1, 2)], 3)))
    >>> report.leaks[0].route
    'layer 1: 2 -> 1, layer 2: 1 -> 0'
    >>> af.tasks.check(af.tasks.merge(af.tasks.butterfly([5, 6, 7, 8]))).ok
    True
    """
    if isinstance(task, MergedTask):
        task = task.task
    if not isinstance(task, Task):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"expected a Task or a MergedTask, got {type(task).__name__}; check each task of a family, or "
            "af.tasks.merge(family)"
        )
    if layers is not None:
        layers = integer("layers", layers, 0, task.num_layers)
    report, pairs = survey(task, layers)
    return replace(report, leaks=tuple(witnesses(task, pairs, report.layers)))


def survey(task: Task, layers: int | None = None) -> tuple[LeakReport, IntArray]:
    """(the report of `check` without its leaks, the leaks as (label, carrier), int64[leaks, 2]), by position."""
    layers = task.num_layers if layers is None else layers
    data, carrier = task.sequence.carriers()
    asked = task.targets.table["data_index"]
    alive = np.zeros(task.size, dtype=np.bool_)
    pairs = [np.zeros((2, 0), dtype=np.int64)]
    for rows, rank, labels, row in _readable(task, layers):
        read = rows.cover() > 0
        alive |= read if rank is None else read[rank]
        first, last = np.searchsorted(data, asked[labels]), np.searchsorted(data, asked[labels], "right")
        total = np.cumsum(last - first)
        cuts = np.searchsorted(total, np.arange(_CHUNK, int(total[-1]) if len(total) else 0, _CHUNK))
        for part in np.split(np.arange(len(labels)), cuts):
            owner, places = ragged(first[part], last[part] - first[part])
            owner, place = part[owner], carrier[places]
            inside = rows.holds(row[owner], place if rank is None else rank[place])
            pairs.append(np.stack([labels[owner[inside]], place[inside]]))
    report = LeakReport(
        (),
        tuple(np.flatnonzero(~alive).tolist()),
        tuple(np.setdiff1d(data, asked).tolist()),
        task.depth,
        sum(mask.density for mask in task.masks) / len(task.masks),
        task.size,
        len(task.targets),
        layers,
    )
    return report, np.concatenate(pairs, axis=1).T


def witnesses(task: Task, pairs: IntArray, layers: int | None) -> Iterator[Leak]:
    flow = task.flow if task.num_layers is None or not layers else analyze(task.masks[:layers])
    for number, carrier in pairs.tolist():
        (label,) = task.targets.part(number, number + 1)
        if task.is_dense:
            witness = [carrier, label.position][carrier == label.position :]
        else:
            witness = flow.path(carrier, label.position)
        assert 0 < len(witness) <= (task.size if layers is None else layers + 1)
        yield Leak(label.position, label, carrier, tuple(witness))


def _readable(task: Task, layers: int | None) -> Iterator[tuple[IntervalRows, IntArray | None, IntArray, IntArray]]:
    """What labelled positions read, in parts: rows over keys that `rank` numbers, labels, the row of each label."""
    place = task.targets.table["position"]
    labels = np.argsort(place, kind="stable")
    labelled, row = np.unique(place[labels], return_inverse=True)
    if not len(labels):
        return
    if layers != 0 and task.is_dense:  # then the mask, with its diagonal, is all that can ever be read
        rows, rank = task.mask.relabelled()
        own = labelled if rank is None else rank[labelled]
        yield rows.with_diagonal().take(own), rank, labels, row
        return
    for start, table in task.flow.reachability_by_rows(max(1, (1 << 23) // task.size), layers):
        first, last = np.searchsorted(labelled, [start, start + len(table)])
        part = slice(*np.searchsorted(row, [first, last]))
        rows = IntervalRows.from_bool(table.numpy()[labelled[first:last] - start])
        yield rows, None, labels[part], row[part] - first
