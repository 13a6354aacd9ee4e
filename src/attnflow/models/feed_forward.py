"""Where the feed-forward layers of a transformers model are, and which matrices of its layers they do not cover."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.experts import PackedExperts, packed_experts
from attnflow.models.families.table import FEED_FORWARD, FeedForward
from attnflow.models.mixing import attends, moves_between_positions

_BESIDE: Final = re.compile(r"Norm|Embedding|Router|HyperConnection", re.IGNORECASE)
_ROUTER: Final = re.compile(r"Router")
_LAYER: Final = re.compile(r"\.\d+(?=\.|$)")


def find_feed_forward(model: nn.Module) -> list[FeedForward | PackedExperts]:
    """The feed-forward layers of a model, in order: linear maps that are known by name, and experts, by what they do.

    Raises:
        UnsupportedArchitecture: there are none.
    """
    layers: list[FeedForward | PackedExperts] = []
    routers: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if _ROUTER.search(type(module).__name__):
            routers += (f"{name}.",)
        if f"{name}.".startswith(routers):  # what chooses may have layers of its own (Zaya)
            continue
        kind = next((kind for kind in FEED_FORWARD if _fits(module, kind)), None)
        layer = packed_experts(module, name) if kind is None else replace(kind, name=name)
        if layer is not None:
            layers.append(layer)
    if not layers:
        near = sorted({type(m).__name__ for m in model.modules() if "mlp" in type(m).__name__.lower()})
        raise UnsupportedArchitecture(
            f"{type(model).__name__} has no feed-forward layers that are known (modules that may be: "
            f"{', '.join(near) or 'none'}), and nothing was converted"
        )
    return layers


def uncovered(model: nn.Module, sites: Sequence[FeedForward | PackedExperts]) -> dict[str, Tensor]:
    """The matrices, by name, of layers with attention or feed-forward sites that belong to neither.

    What moves information between positions (attention, recurrence, convolutions), norms, embeddings, connections that
    mix residual streams, and what chooses among experts (one row for each of them) is no part of a feed-forward layer.
    All else is, whatever its name.
    """
    covered = {id(parameter) for site in sites for parameter in _parameters(model, site)}
    rest: dict[str, Tensor] = {}
    for path, layer in _layers(model, sites):
        beside = tuple(_beside(layer, path, sites))
        here = {
            name: parameter
            for name, parameter in layer.named_parameters(prefix=path)
            if parameter.ndim > 1 and id(parameter) not in covered and not name.startswith(beside)
        }
        rows = set(_choices(here, [site for site in sites if site.name.startswith(f"{path}.")]))
        rest |= {
            name: p
            for name, p in here.items()
            if not (p.ndim == 2 and (len(p) == 1 or any(len(p) == n and name.startswith(at) for at, n in rows)))
        }
    return rest


def stored(module: nn.Module) -> Tensor:
    """A linear map's weight as (out, in), a view."""
    weight = module.weight
    if not isinstance(weight, Tensor):
        raise UnsupportedArchitecture(f"{type(module).__name__} has no weight")
    return weight.T if isinstance(module, Conv1D) else weight


def _parameters(model: nn.Module, site: FeedForward | PackedExperts) -> Iterator[Tensor]:
    """What a conversion takes over."""
    if isinstance(site, PackedExperts):
        yield from site.parameters(model.get_submodule(site.name))
        return
    for path in (*site.first, site.last):
        yield from model.get_submodule(f"{site.name}.{path}".strip(".")).parameters()


def _choices(rest: Mapping[str, Tensor], sites: Sequence[FeedForward | PackedExperts]) -> Iterator[tuple[str, int]]:
    """Where what chooses among experts may be, beside them, and how many they are: it has one row for each."""

    def beside(path: str) -> str:
        return f"{path.rpartition('.')[0]}.".lstrip(".")

    lists = Counter(site.name.rpartition(".")[0] for site in sites)
    yield from ((beside(path), count) for path, count in lists.items())
    yield from ((beside(site.name), site.num_experts) for site in sites if isinstance(site, PackedExperts))
    yield from ((beside(name.rpartition(".")[0]), len(p)) for name, p in rest.items() if p.ndim > 2)


def _layers(model: nn.Module, sites: Sequence[FeedForward | PackedExperts]) -> Iterator[tuple[str, nn.Module]]:
    """The elements of the outermost lists of modules that hold attention or a site, by path."""
    names = [name for name, module in model.named_modules() if attends(module)] + [site.name for site in sites]
    for path in dict.fromkeys(name[: match.start()] for name in names if (match := _LAYER.search(name))):
        for name, layer in model.get_submodule(path).named_children():
            yield f"{path}.{name}", layer


def _beside(layer: nn.Module, path: str, sites: Sequence[FeedForward | PackedExperts]) -> Iterator[str]:
    """Where a name begins that belongs to attention, another mixer, a norm, an embedding or a router."""
    if attends(layer) and sum(attends(module) for module in layer.modules()) == 1:  # a list of attention modules
        yield f"{path}."
    for name, module in layer.named_modules(prefix=path):
        inside = module is not layer and not any(f"{site.name}.".startswith(f"{name}.") for site in sites)
        if inside and (attends(module) or _BESIDE.search(type(module).__name__)):
            yield f"{name}."
        elif inside and moves_between_positions(module):
            convolution = isinstance(module, nn.Conv1d | nn.Conv2d)
            yield f"{name.rpartition('.')[0] if convolution else name}."


def _fits(module: nn.Module, layer: FeedForward) -> bool:
    """Whether the maps are there and lead from the model's width to the neurons and back."""
    maps, out = [_linear(module, path) for path in layer.first], _linear(module, layer.last)
    if out is None or any(each is None for each in maps):
        return False
    width, neurons = stored(out).shape
    rows = 2 * neurons if layer.fused else neurons
    return all(each is not None and stored(each).shape == (rows, width) for each in maps)


def _linear(module: nn.Module, path: str) -> nn.Module | None:
    """The linear map at a path below a module, if there is one."""
    try:
        inner = module.get_submodule(path)
    except AttributeError:
        return None
    return inner if isinstance(inner, nn.Linear | Conv1D) else None
