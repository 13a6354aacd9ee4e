"""A model in memory."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from attnflow.models.attention import config_of, stated_by
from attnflow.models.checkpoints.files import BadCheckpoint
from attnflow.models.checkpoints.weights import Weights, as_float


class ModuleWeights(Weights):
    """The parameters of a torch module; shared ones appear once."""

    def __init__(self, model: nn.Module) -> None:
        self.config = config_of(model)
        said = self.config.get("_name_or_path")
        self.name = said if isinstance(said, str) and said else type(model).__name__
        self._model = model
        self._parameters = dict(model.named_parameters())
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        self.packed = frozenset(name for name, p in self._parameters.items() if not p.is_floating_point())

    def stated(self, path: str) -> Mapping[str, object]:
        """What the attention module at a path says of its heads."""
        return stated_by(self._model, path)

    def read(self, tensor: str, rows: tuple[int, int] | None) -> Tensor:
        """A parameter, or a run of its rows, in float32 on the CPU."""
        parameter = self._parameters[tensor].detach()
        if parameter.is_meta:
            raise BadCheckpoint(f"{tensor} is on the meta device, which holds no numbers: load the weights first")
        if hasattr(parameter, "full_tensor"):  # a DTensor
            raise BadCheckpoint(f"{tensor} is sharded over devices, which are not asked for it: score a checkpoint")
        return as_float(parameter if rows is None else parameter[slice(*rows)])
