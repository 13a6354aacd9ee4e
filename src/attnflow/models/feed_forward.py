"""Where the feed-forward layers of a transformers model are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attnflow._core.errors import UnsupportedArchitecture

# (paths of the maps into the neurons, path of the map out of them), below a common parent.
_PLAIN: Final = (
    ("c_fc", "c_proj"),
    ("fc1", "fc2"),
    ("fc_in", "fc_out"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("intermediate.dense", "output.dense"),
    ("lin1", "lin2"),
    ("ffn", "ffn_output"),
    ("wi", "wo"),
    ("up_proj", "down_proj"),
)
_GATED: Final = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("wi_0", "wi_1"), "wo"),
    (("w1", "w3"), "w2"),
)
# One map whose output is gate and up side by side.
_FUSED: Final = (("gate_up_proj", "down_proj"), ("Wi", "Wo"))


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
    found = [site for name, module in model.named_modules() if (site := _match(name, module)) is not None]
    if not found:
        near = sorted({type(m).__name__ for m in model.modules() if "mlp" in type(m).__name__.lower()})
        raise UnsupportedArchitecture(
            f"{type(model).__name__} has no feed-forward layers that are known (modules that may be: "
            f"{', '.join(near) or 'none'}); experts that are stored together are not supported"
        )
    return found


def linear(module: nn.Module, path: str) -> nn.Module | None:
    """The linear map at a path below a module, if there is one."""
    try:
        found = module.get_submodule(path)
    except AttributeError:
        return None
    return found if isinstance(found, nn.Linear | Conv1D) else None


def stored(module: nn.Module) -> Tensor:
    """A linear map's weight as (out, in), a view."""
    weight = module.weight
    if not isinstance(weight, Tensor):
        raise UnsupportedArchitecture(f"{type(module).__name__} has no weight")
    return weight.T if isinstance(module, Conv1D) else weight


def _match(name: str, module: nn.Module) -> FeedForward | None:
    for first, last in _GATED:
        if _fits(module, first, last, 1):
            return FeedForward(name, first, last, True)
    for one, last in _FUSED:
        if _fits(module, (one,), last, 2):
            return FeedForward(name, (one,), last, True)
    for one, last in _PLAIN:
        if _fits(module, (one,), last, 1):
            return FeedForward(name, (one,), last, False)
    return None


def _fits(module: nn.Module, first: tuple[str, ...], last: str, fused: int) -> bool:
    """Whether the maps are there and lead from the model's width to the neurons and back."""
    maps, out = [linear(module, path) for path in first], linear(module, last)
    if out is None or any(one is None for one in maps):
        return False
    width, neurons = stored(out).shape
    return all(one is not None and stored(one).shape == (fused * neurons, width) for one in maps)
