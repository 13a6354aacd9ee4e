"""Where the feed-forward layers of a transformers model are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.families.table import FEED_FORWARD, FeedForwardNames


@dataclass(frozen=True, eq=False)
class FeedForward:
    """One feed-forward layer.

    Attributes:
        name: path of the parent module.
        first: paths below it of the maps into the neurons: one; or gate and up; or one with both side by side.
        last: path of the map out of them.
        gated: whether neurons have a gate.
    """

    name: str
    first: tuple[str, ...]
    last: str
    gated: bool

    @property
    def fused(self) -> bool:
        """Whether one map makes gate and up."""
        return self.gated and len(self.first) == 1


def find_feed_forward(model: nn.Module) -> list[FeedForward]:
    """The feed-forward layers of a model, in the order in which they are registered.

    Raises:
        UnsupportedArchitecture: none whose linear maps are known by name, with what there is.
    """
    layers = [
        FeedForward(name, names.first, names.last, names.gated)
        for name, module in model.named_modules()
        if (names := next((names for names in FEED_FORWARD if _fits(module, names)), None)) is not None
    ]
    if not layers:
        near = sorted({type(m).__name__ for m in model.modules() if "mlp" in type(m).__name__.lower()})
        raise UnsupportedArchitecture(
            f"{type(model).__name__} has no feed-forward layers that are known (modules that may be: "
            f"{', '.join(near) or 'none'}); experts that are stored together are not supported"
        )
    return layers


def linear(module: nn.Module, path: str) -> nn.Module | None:
    """The linear map at a path below a module, if there is one."""
    try:
        inner = module.get_submodule(path)
    except AttributeError:
        return None
    return inner if isinstance(inner, nn.Linear | Conv1D) else None


def stored(module: nn.Module) -> Tensor:
    """A linear map's weight as (out, in), a view."""
    weight = module.weight
    if not isinstance(weight, Tensor):
        raise UnsupportedArchitecture(f"{type(module).__name__} has no weight")
    return weight.T if isinstance(module, Conv1D) else weight


def _fits(module: nn.Module, names: FeedForwardNames) -> bool:
    """Whether the maps are there and lead from the model's width to the neurons and back."""
    maps, out = [linear(module, path) for path in names.first], linear(module, names.last)
    if out is None or any(each is None for each in maps):
        return False
    width, neurons = stored(out).shape
    rows = 2 * neurons if names.gated and len(maps) == 1 else neurons
    return all(each is not None and stored(each).shape == (rows, width) for each in maps)
