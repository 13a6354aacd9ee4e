"""The measured order: what really flows where, layer by layer or from inputs to outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.progress import Progress
from attnflow.audit.gradients import Graph, record_graph
from attnflow.audit.inputs import Inputs, read
from attnflow.audit.passes import Runner, refuse_nan
from attnflow.audit.perturb import is_leak, other_precision, row_change
from attnflow.audit.replay import Replay, invocations
from attnflow.audit.survey import survey
from attnflow.audit.trace import Event
from attnflow.masks.build import from_dense
from attnflow.models.evaluation import REFUSALS, evaluating, precision
from attnflow.models.loaded import Loaded, split
from attnflow.order.flow import Flow, analyze

SAMPLES: Final = 2  # replacements tried for each position
Outputs = dict[int, Tensor]  # {joint position of the first row: [batch, positions, features]}


@runtime_checkable
class Subject(Protocol):
    """Something with inputs at positions and outputs at positions: a model, or one call of a layer."""

    module: nn.Module
    dtype: torch.dtype
    columns: range

    def outputs(self, dtype: torch.dtype | None, column: int | None = None, sample: int = 0) -> Outputs:
        """The outputs with inputs in `dtype`, those at `column` replaced by sample number `sample`."""
        ...


def measure(
    model: nn.Module | Loaded,
    inputs: str | Sequence[int] | Tensor | Mapping[str, Any],
    mode: Literal["perturb", "vjp"] = "perturb",
    *,
    by: Literal["layer", "output"] = "layer",
    seed: int = 0,
    progress: Progress | None = None,
) -> Flow | list[Flow]:
    """The order of a model that has no mask to read it from (recurrent, hybrid), by asking the model.

    Args:
        model: any module that takes token ids or embeddings, or what `af.load_model` returned; left as it was.
        inputs: as for an audit. A cache is switched off where forward has `use_cache`.
        mode: "perturb", or "vjp" for the exact support of the Jacobian.
        by: "layer" measures what each layer's output at i takes from the layer's own input at j and returns the flow
            of that stack (so `flow.masks[l]` shows the window of a convolution, and `flow.hasse` the order);
            "output" measures the model's output against its inputs, as a single relation.
        seed: of the replaced tokens or vectors.
        progress: called as `progress(done, total, what)`.

    Returns:
        One flow of the whole batch; a list with one for each sequence where the inputs say that they differ (padding,
        positions, documents, places of images).

    Raises:
        UnsupportedArchitecture: by="layer" without layers, or with flow that bypasses them.

    Cost: about 2 n forward passes ("layer": each layer is replayed alone).
    """
    if mode not in ("perturb", "vjp"):
        raise ValueError(f"mode must be 'perturb' or 'vjp', got {mode!r}")
    if by not in ("layer", "output"):
        raise ValueError(f"by must be 'layer' or 'output', got {by!r}")
    model, tokenizer = split(model)
    with evaluating(model):
        call = survey(model, read(model, inputs, tokenizer).without_cache(model)).inputs
        return _measured(model, call, mode, by, seed, progress)


def _measured(
    model: nn.Module, inputs: Inputs, mode: str, by: Literal["layer", "output"], seed: int, progress: Progress | None
) -> Flow | list[Flow]:
    end_to_end = _of_samples(_whole(model, inputs, mode, seed, progress), inputs)
    if by == "output":
        flows = [analyze(from_dense(row, "measured")) for row in end_to_end]
        return flows if len(flows) > 1 else flows[0]
    calls = invocations(model, inputs)
    if not calls:
        raise UnsupportedArchitecture(f"{type(model).__name__} has no list of layers: measure it with by='output'")
    layers: list[Tensor] = []
    generator = torch.Generator().manual_seed(seed)
    for number, call in enumerate(calls):
        if progress is not None:
            progress(number, len(calls), "measure layers")
        replay = Replay(inputs, call, generator)
        layers.append(_diagonal(inputs))
        for part in replay.parts():
            layers[-1] |= _by_gradient(part.graph(), inputs) if mode == "vjp" else _by_change(part, inputs)
    named = [(number, _of_samples(layer, inputs)) for number, layer in enumerate(layers)]
    flows = [
        analyze([from_dense(layer[row], f"measured layer {i}") for i, layer in named]) for row in range(len(end_to_end))
    ]
    for row, flow in enumerate(flows):
        outside = end_to_end[row] & ~flow.reachability()
        if outside.any():
            target, source = outside.nonzero()[0].tolist()
            raise UnsupportedArchitecture(
                f"position {target} of {type(model).__name__} depends on {source}, which no layer passes on: something "
                "flows outside of the layers. Measure it with by='output'"
            )
    return flows if len(flows) > 1 else flows[0]


def _of_samples(relation: Tensor, inputs: Inputs) -> Tensor:
    """A relation per sample, or their union where nothing tells the samples apart: what one shows holds for all."""
    slots = {slot.name for slot in inputs.slots}
    marks = [value for name, value in inputs.kwargs.items() if isinstance(value, Tensor) and name not in slots]
    marks = [mark for mark in marks if not mark.is_floating_point() and mark.ndim > 1 and len(mark) == inputs.batch]
    ids = [inputs.values(slot) for slot in inputs.slots if slot.name is not None and len(inputs.pool)]
    marks += [torch.isin(each, inputs.pool.to(each)) for each in ids if not each.is_floating_point()]
    alike = all(bool((mark == mark[:1]).all()) for mark in marks)
    return relation.any(0, keepdim=True) if alike else relation


def _diagonal(inputs: Inputs) -> Tensor:
    return torch.eye(inputs.size, dtype=torch.bool).repeat(inputs.batch, 1, 1)


def _whole(model: nn.Module, inputs: Inputs, mode: str, seed: int, progress: Progress | None) -> Tensor:
    def say(done: int) -> None:
        if progress is not None:
            progress(done, inputs.size, "measure")

    if mode == "vjp":
        graph = record_graph(Runner(model, inputs, "layers", seed))
        last = {event.offset: event for event in graph.events if event.key.side == "out"}
        return _by_gradient(Graph(list(last.values()), graph.leaves), inputs, say)
    return _by_change(_Whole(model, inputs, seed), inputs, say)


class _Whole:
    """The model from its inputs to its last output for each sequence."""

    def __init__(self, model: nn.Module, inputs: Inputs, seed: int) -> None:
        self.module = model
        self.columns = range(inputs.size)
        self._inputs = inputs
        self._runner = Runner(model, inputs, "layers", seed)
        self.dtype = self._runner.dtype
        generator = torch.Generator().manual_seed(seed)
        self._drawn = [inputs.draw(generator) for _ in range(SAMPLES)]

    def outputs(self, dtype: torch.dtype | None, column: int | None = None, sample: int = 0) -> Outputs:
        """See `Subject.outputs`."""
        inputs = self._inputs.in_precision(dtype)
        selected = torch.zeros(inputs.batch, inputs.size, dtype=torch.bool)
        if column is not None:
            selected[:, column] = True
        outputs: Outputs = {}

        def visit(event: Event) -> None:
            if event.key.side == "out":
                outputs[event.offset] = event.values

        with torch.no_grad():
            self._runner.run(inputs.changed(selected, self._drawn[sample]), visit)
        if not outputs:
            raise UnsupportedArchitecture(f"{type(self.module).__name__} returned nothing with a sequence axis")
        for offset, values in outputs.items():
            refuse_nan(inputs, "", offset, values)
        return outputs


def _by_change(subject: Subject, inputs: Inputs, say: Callable[[int], None] | None = None) -> Tensor:
    """bool [batch, n, n]: the output at i moves when the input at j changes.

    Changes below the root of the precision, relative to their row, may be rounding: `is_leak` decides.
    """
    relation = _diagonal(inputs)
    base = subject.outputs(None)
    doubtful: dict[tuple[int, int], dict[int, Tensor]] = {}
    small = math.sqrt(torch.finfo(subject.dtype).eps)
    for column in subject.columns:
        if say is not None:
            say(column)
        for sample in range(SAMPLES):
            after = subject.outputs(None, column, sample)
            for offset, values in base.items():
                change = row_change(after[offset], values)
                border = small * values.double().abs().amax(-1).cpu()
                moved = relation[:, offset : offset + change.shape[1], column]
                moved |= change > border
                unsure = torch.where((change > border) | moved, 0.0, change)
                if unsure.any():
                    doubtful.setdefault((column, sample), {})[offset] = unsure
    if doubtful:
        _settle(subject, base, doubtful, relation)
    return relation


def _settle(
    subject: Subject, own: Outputs, doubtful: dict[tuple[int, int], dict[int, Tensor]], relation: Tensor
) -> None:
    """Add to `relation` what of the doubtful changes is no rounding."""
    other = other_precision(subject.dtype)
    try:
        with precision(subject.module, other):
            base = subject.outputs(other)
            for (column, sample), unsure in doubtful.items():
                if all(relation[:, o : o + u.shape[1], column][u > 0].all() for o, u in unsure.items()):
                    continue
                after = subject.outputs(other, column, sample)
                for offset, change in unsure.items():
                    leak = is_leak(change, own[offset], base[offset], after[offset], subject.dtype)
                    relation[:, offset : offset + change.shape[1], column] |= leak & (change > 0)
    except REFUSALS as error:
        raise UnsupportedArchitecture(
            f"{type(subject.module).__name__} does not run in {other}, so small changes cannot be told from rounding "
            f"({error}): measure it with mode='vjp'"
        ) from error


def _by_gradient(graph: Graph, inputs: Inputs, say: Callable[[int], None] | None = None) -> Tensor:
    """bool [batch, n, n]: the Jacobian block of output i and input j is not zero; one backward pass for each output."""
    generator = torch.Generator().manual_seed(0)
    relation = _diagonal(inputs)
    for event in graph.events:
        for position in range(event.values.shape[1]):
            if say is not None:
                say(event.offset + position)
            cotangent = torch.zeros_like(event.values)
            cotangent[:, position] = torch.randn(cotangent[:, position].shape, generator=generator).to(cotangent)
            relation[:, event.offset + position] |= graph.pull([(event, cotangent)], inputs.size) != 0
    return relation
