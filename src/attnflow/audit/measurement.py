"""The measured order: where information really flows, per layer or from inputs to outputs; also as a golden file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.plain import as_list
from attnflow._core.progress import Progress
from attnflow._core.results import Result
from attnflow.audit.inputs import Inputs, read
from attnflow.audit.passes import Event, Runner, on_ranks, refuse_nan
from attnflow.audit.replay import Outputs, ReplayedLayer, layer_calls, replayed
from attnflow.audit.rounding import computed_otherwise, other_precision, recurs, rounding_bound, row_change, unit
from attnflow.audit.survey import survey
from attnflow.masks.build import from_dense
from attnflow.models.passes.evaluation import REFUSALS, evaluating, precision, unchanged
from attnflow.models.passes.processes import shared
from attnflow.models.subject import Loaded, Subject
from attnflow.order.flow import Flow, analyze
from attnflow.order.hasse import OrderDifference

SAMPLES: Final = 2  # replacements tried for each position
By = Literal["layer", "output"]


def measure(
    model: nn.Module | Loaded,
    inputs: str | Sequence[int] | Tensor | Mapping[str, Any],
    *,
    by: By = "layer",
    seed: int = 0,
    progress: Progress | None = None,
) -> Flow | list[Flow]:
    """Measure the order of a model by changing its inputs, for models without a mask (recurrent, hybrid).

    Args:
        model: any module that takes token ids or embeddings, or a result of `af.load_model`; it is restored afterwards.
        inputs: as for `check`. A cache is switched off if forward has `use_cache`.
        by: "layer" measures whether each layer's output at i depends on its own input at j, and returns the flow of
            that stack (so `flow.masks[l]` shows the window of a convolution, and `flow.hasse` the order).
            "output" measures the model's output against its inputs, as a single relation.
        seed: seed of the replacement tokens or vectors.
        progress: called as `progress(done, total, what)`.

    Returns:
        One flow for the whole batch, or a list with one for each sequence if the inputs make them differ (padding,
        positions, documents, places of images).

    Raises:
        UnsupportedArchitecture: with by="layer", the model has no list of layers, or information bypasses them.

    Cost: about 2 n forward passes ("layer": each layer is replayed alone).
    """
    if by not in ("layer", "output"):
        raise ValueError(f"by must be 'layer' or 'output', got {by!r}")
    subject = Subject.of(model).inside
    with (
        shared(subject.model, "audit.measure", subject.named(inputs)) as processes,
        unchanged(subject.model),
        evaluating(subject.model),
    ):
        whole = on_ranks(survey(read(subject, inputs).without_cache()).inputs, processes)
        end_to_end = _of_samples(_by_change(_Whole(whole, seed), whole, progress), whole)
        if by == "output":
            flows = [analyze(from_dense(row, "measured")) for row in end_to_end]
            return flows if len(flows) > 1 else flows[0]
        calls = layer_calls(whole)
        if not calls:
            raise UnsupportedArchitecture(f"{subject.kind} has no list of layers: measure it with by='output'")
        layers: list[Tensor] = []
        generator = torch.Generator().manual_seed(seed)
        for number, call in enumerate(calls):
            if progress is not None:
                progress(number, len(calls), "measure layers")
            parts = [_by_change(part, whole) for part in replayed(whole, call, generator)]
            layers.append(_of_samples(torch.stack(parts).any(0), whole))
        names = [f"measured layer {number}" for number in range(len(calls))]
        flows: list[Flow] = []
        for row, whole_row in enumerate(end_to_end):
            flow = analyze([from_dense(layer[row], name) for layer, name in zip(layers, names, strict=True)])
            flows.append(flow)
            outside = whole_row & ~flow.reachability()
            if outside.any():
                target, source = outside.nonzero()[0].tolist()
                raise UnsupportedArchitecture(
                    f"position {target} of {subject.kind} depends on {source}, which no layer passes on: "
                    "something flows outside of the layers. Measure it with by='output'"
                )
        return flows if len(flows) > 1 else flows[0]


@dataclass(frozen=True, eq=False, repr=False)
class MeasuredOrder(Result):
    """The measured order of a model together with the inputs it was measured on, for a golden file.

    Attributes:
        model: class of the model.
        parameters: number of its parameters.
        inputs: the token ids and other integers of the call, by name, as nested lists.
        flows: one flow for the batch, or one for each sequence if they differ.
        backend: the attention implementation of the model; "" if unknown.
        versions: versions of the libraries that computed it.
    """

    model: str
    parameters: int
    inputs: Mapping[str, object]
    flows: tuple[Flow, ...]
    backend: str
    versions: Mapping[str, str]

    def difference(self, other: MeasuredOrder) -> OrderDifference:
        """Compare with another measured order: pairs only in this one are extra, pairs only in `other` missing.

        Raises:
            ValueError: the model or the inputs differ; the message says how.
        """
        other.require(self.model, self.parameters)
        if self.inputs != other.inputs:
            names = [n for n in {**self.inputs, **other.inputs} if self.inputs.get(n) != other.inputs.get(n)]
            raise ValueError(
                f"other inputs: {', '.join(names)} differ from those of the saved order; measure both on the same ones"
            )
        longest = max(len(self.flows), len(other.flows))  # sequences may agree in one of them only
        new, old = (flows * (longest // len(flows)) for flows in (self.flows, other.flows))
        parts = [flow.difference(before) for flow, before in zip(new, old, strict=True)]
        layers = tuple(layer for part in parts for layer in part.layers)
        return OrderDifference(layers, sum(part.compared for part in parts))

    def require(self, model: str, parameters: int) -> None:
        """Raise `ValueError` unless the order was measured on this class of model with this many parameters."""
        if (self.model, self.parameters) != (model, parameters):
            raise ValueError(
                f"another model: the saved order is of {self.model} with {self.parameters:,} parameters, this is "
                f"{model} with {parameters:,}"
            )

    def arguments(self) -> dict[str, Any]:
        """The inputs as keyword arguments of the model."""
        return {name: torch.tensor(value) if isinstance(value, list) else value for name, value in self.inputs.items()}

    def to_dict(self) -> dict[str, object]:
        """All fields; flows as their own `to_dict` writes them."""
        head: dict[str, object] = {"attnflow": type(self).__name__, "version": self.version}
        return {**head, **vars(self), "flows": [flow.to_dict() for flow in self.flows]}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> MeasuredOrder:
        """Rebuild it from what `to_dict` returned."""
        content = cls._content(values)
        missing = [name for name in cls.__dataclass_fields__ if name not in content]
        if missing:
            raise ValueError(f"a saved MeasuredOrder is damaged: it has no {missing[0]}")
        flows = as_list(content.pop("flows"), "flows")
        return cls(**cast(dict[str, Any], content), flows=tuple(Flow.from_dict(cast(Any, flow)) for flow in flows))

    def __repr__(self) -> str:
        return f"<MeasuredOrder of {self.model}, {self.flows[0].size} positions>"

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        backend = f", {self.backend}" if self.backend else ""
        return f"measured order of {self.model}, {self.parameters:,} parameters{backend} ({versions}): {self.flows[0]}"


def record(
    model: nn.Module | Loaded,
    inputs: Sequence[int] | Tensor | Mapping[str, Any],
    progress: Progress | None = None,
) -> MeasuredOrder:
    """Measure the order of a model's layers, for a golden file: `record(model, ids).save("order.json")`.

    Args:
        model: any module that takes token ids, or a result of `af.load_model`; it is restored afterwards.
        inputs: token ids, or keyword arguments that are tensors of integers or plain values.
        progress: called as `progress(done, total, what)`.

    Raises:
        TypeError: a file cannot hold the inputs exactly, as with embeddings.

    Cost: that of `measure`.
    """
    module = Subject.of(model).inside.model
    call: dict[str, Any] = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": torch.as_tensor(inputs)}
    saved: dict[str, object] = {}
    for name, value in call.items():
        if isinstance(value, Tensor) and not value.is_floating_point():
            saved[name] = value.tolist()
        elif isinstance(value, bool | int | str) or value is None:
            saved[name] = value
        else:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name} is {kind}: a golden file holds integers exactly; pass token ids")
    measured = measure(model, call, progress=progress)
    versions: dict[str, str] = {}
    for name in ("attnflow", "torch", "transformers"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return MeasuredOrder(
        model=type(module).__name__,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        inputs=saved,
        flows=(measured,) if isinstance(measured, Flow) else tuple(measured),
        backend=str(getattr(getattr(module, "config", None), "_attn_implementation", None) or ""),
        versions=versions,
    )


def _of_samples(relation: Tensor, inputs: Inputs) -> Tensor:
    slots = {slot.name for slot in inputs.slots}
    marks = [value for name, value in inputs.kwargs.items() if isinstance(value, Tensor) and name not in slots]
    marks = [mark for mark in marks if not mark.is_floating_point() and mark.ndim > 1 and len(mark) == inputs.batch]
    named = [inputs.values(slot) for slot in inputs.slots if slot.name is not None and len(inputs.pool)]
    marks += [torch.isin(ids, inputs.pool.to(ids)) for ids in named if not ids.is_floating_point()]
    alike = all(bool((mark == mark[:1]).all()) for mark in marks)
    return relation.any(0, keepdim=True) if alike else relation


class _Whole:
    def __init__(self, inputs: Inputs, seed: int) -> None:
        self.module = inputs.model
        self.columns = range(inputs.size)
        self.depth = max(1, len(inputs.layers))
        self._inputs = inputs
        self._runner = Runner(inputs, "layers", seed)
        self.dtype = self._runner.dtype
        generator = torch.Generator().manual_seed(seed)
        self._drawn = [inputs.draw(generator) for _ in range(SAMPLES)]

    def outputs(self, dtype: torch.dtype | None, column: int | None = None, sample: int = 0) -> Outputs:
        inputs = self._inputs.in_precision(dtype)
        selected = torch.zeros(inputs.batch, inputs.size, dtype=torch.bool)
        if column is not None:
            selected[:, column] = True
        outputs: Outputs = {}

        def visit(event: Event) -> None:
            if event.key.side == "out" and not event.pooled:
                outputs[event.offset, event.values.shape[1]] = event.values

        with torch.no_grad():
            self._runner.run(inputs.changed(selected, self._drawn[sample]), visit)
        if not outputs:
            raise UnsupportedArchitecture(f"{type(self.module).__name__} returned nothing with a sequence axis")
        for (offset, _), values in outputs.items():
            refuse_nan(inputs, "", offset, values)
        return outputs


def _by_change(subject: ReplayedLayer | _Whole, inputs: Inputs, progress: Progress | None = None) -> Tensor:
    """bool [batch, n, n]: output i moves with input j; another precision judges changes that may be rounding."""
    relation = torch.eye(inputs.size, dtype=torch.bool).repeat(inputs.batch, 1, 1)
    base = subject.outputs(None)
    doubtful: dict[tuple[int, int], Outputs] = {}
    eps = max(map(unit, base.values()))
    small = math.sqrt(eps)
    for column in subject.columns:
        if progress is not None:
            progress(column, inputs.size, "measure")
        for sample in range(SAMPLES):
            after = subject.outputs(None, column, sample)
            for (offset, rows), values in base.items():
                change = row_change(after[offset, rows], values)
                border = small * values.double().abs().amax(-1).cpu()
                moved = relation[:, offset : offset + rows, column]
                moved |= change > border
                unsure = torch.where((change > border) | moved, 0.0, change)
                if unsure.any():
                    doubtful.setdefault((column, sample), {})[offset, rows] = unsure
    if not doubtful:
        return relation
    other = other_precision(subject.dtype)
    try:
        with precision(subject.module, other):
            exact = subject.outputs(other)
            for (column, sample), unsure in doubtful.items():
                if all(relation[:, o : o + rows, column][u > 0].all() for (o, rows), u in unsure.items()):
                    continue
                after = subject.outputs(other, column, sample)
                for (offset, rows), change in unsure.items():
                    place = offset, rows
                    leak = recurs(change, base[place], exact[place], after[place], subject.dtype)
                    if subject.dtype != torch.float64:
                        leak |= change > subject.depth * rounding_bound(base[place], eps)
                        leak |= subject.depth == 1 and computed_otherwise(exact[place], base[place], eps)
                    relation[:, offset : offset + rows, column] |= leak & (change > 0)
    except REFUSALS as error:
        raise UnsupportedArchitecture(
            f"{type(subject.module).__name__} does not run in {other}, so small changes may be rounding "
            f"({error}): measure it where it runs in both"
        ) from error
    return relation
