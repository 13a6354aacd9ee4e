"""`MeasuredOrder`: the order that a model has for some inputs, in a file that others are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from attnflow._core.plain import as_list, read_json
from attnflow._core.progress import Progress
from attnflow._core.results import Result
from attnflow.audit.measurement import measure
from attnflow.models.loaded import Loaded, split
from attnflow.order.difference import OrderDifference
from attnflow.order.flow import Flow

By = Literal["layer", "output"]


@dataclass(frozen=True, eq=False, repr=False)
class MeasuredOrder(Result):
    """The order that `measure` saw in a model, with what it was measured on: a golden file.

    Attributes:
        model: the class of the model.
        parameters: how many it has.
        inputs: token ids and other integers that it was called with, by name, as nested lists.
        by: "layer" or "output", as of `measure`.
        flows: of the batch, one for each sequence where they differ.
        backend: the attention that the model ran with; "" where it does not say.
        versions: of what computed it.
    """

    model: str
    parameters: int
    inputs: Mapping[str, object]
    by: By
    flows: tuple[Flow, ...]
    backend: str
    versions: Mapping[str, str]

    def difference(self, other: MeasuredOrder) -> OrderDifference:
        """The pairs that this one has and `other` has not (extra), and the other way round.

        Raises:
            ValueError: of another model, other inputs, or measured in another way; says in what they differ.
        """
        other.require(self.model, self.parameters)
        if self.by != other.by:
            raise ValueError(f"the saved order is by {other.by}, this one by {self.by}")
        if self.inputs != other.inputs:
            names = [n for n in {**self.inputs, **other.inputs} if self.inputs.get(n) != other.inputs.get(n)]
            raise ValueError(
                f"other inputs: {', '.join(names)} differ from those of the saved order; measure both on the same ones"
            )
        longest = max(len(self.flows), len(other.flows))  # sequences may agree in one of them only
        new, old = (flows * (longest // len(flows)) for flows in (self.flows, other.flows))
        parts = [one.difference(another) for one, another in zip(new, old, strict=True)]
        return OrderDifference(
            tuple(layer for part in parts for layer in part.layers), sum(part.compared for part in parts)
        )

    def require(self, model: str, parameters: int) -> None:
        """Raise `ValueError` if this is not of that class of model, with so many parameters."""
        if (self.model, self.parameters) != (model, parameters):
            raise ValueError(
                f"another model: the saved order is of {self.model} with {self.parameters:,} parameters, this is "
                f"{model} with {parameters:,}"
            )

    def arguments(self) -> dict[str, Any]:
        """The inputs as the model takes them."""
        return {name: torch.tensor(value) if isinstance(value, list) else value for name, value in self.inputs.items()}

    def to_dict(self) -> dict[str, object]:
        """All fields; flows as their own `to_dict` writes them."""
        head: dict[str, object] = {"attnflow": type(self).__name__, "version": self.version}
        fields = {name: value for name, value in vars(self).items() if name != "flows"}
        return {**head, **fields, "flows": [flow.to_dict() for flow in self.flows]}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> MeasuredOrder:
        """What `to_dict` described."""
        content = cls._content(values)
        missing = [name for name in cls.__dataclass_fields__ if name not in content]
        if missing:
            raise ValueError(f"a saved MeasuredOrder is damaged: it has no {missing[0]}")
        flows = as_list(content.pop("flows"), "flows")
        return cls(**cast(dict[str, Any], content), flows=tuple(Flow.from_dict(cast(Any, flow)) for flow in flows))

    def rows(self) -> list[dict[str, object]]:
        """One row for each sequence: its positions, layers and depth."""
        return [{"positions": flow.size, "layers": flow.num_layers, "depth": flow.depth} for flow in self.flows]

    def __repr__(self) -> str:
        return f"<MeasuredOrder of {self.model}, {self.flows[0].size} positions>"

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        backend = f", {self.backend}" if self.backend else ""
        return f"measured order of {self.model}, {self.parameters:,} parameters{backend} ({versions}): {self.flows[0]}"


def record(
    model: nn.Module | Loaded,
    inputs: Sequence[int] | Tensor | Mapping[str, Any],
    *,
    by: By = "layer",
    seed: int = 0,
    progress: Progress | None = None,
) -> MeasuredOrder:
    """Measure the order of a model, for a golden file: `record(model, ids).save("order.json")`.

    Args:
        model: any module that takes token ids, or what `af.load_model` returned; left as it was.
        inputs: token ids, or keyword arguments that are tensors of integers or plain values.
        by: "layer" or "output", as of `measure`.
        seed: of the replaced tokens.
        progress: called as `progress(done, total, what)`.

    Raises:
        TypeError: inputs that a file cannot hold exactly, such as embeddings.

    Cost: that of `measure`.
    """
    module, _ = split(model)
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
    measured: object = measure(model, call, by=by, seed=seed, progress=progress)
    flows = cast(Sequence[Flow], measured if isinstance(measured, list) else [measured])
    return MeasuredOrder(
        model=type(module).__name__,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        inputs=saved,
        by=by,
        flows=tuple(flows),
        backend=str(getattr(getattr(module, "config", None), "_attn_implementation", None) or ""),
        versions=_versions(),
    )


def load_order(path: Path) -> MeasuredOrder:
    """A golden file.

    Raises:
        ValueError: it cannot be read, or is none; says what it is.
    """
    values = read_json(path)
    try:
        return MeasuredOrder.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; make one with attnflow audit MODEL --save {path}") from error


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in ("attnflow", "torch", "transformers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
