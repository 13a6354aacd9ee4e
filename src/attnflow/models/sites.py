"""Where a transformers model attends, by the attention interface, and what else moves between positions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal, cast

from torch import nn
from transformers import PreTrainedModel

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.addons import identity
from attnflow.models.families.find import CROSS, Kind
from attnflow.models.mixing import INTERFACE, attends, calls_interface, moves_between_positions

Part = Literal["", "encoder", "decoder"]


@dataclass(frozen=True, eq=False)
class Site:
    """One module that calls the attention interface."""

    name: str  # its path in the model
    module: nn.Module
    kind: Kind  # whether its keys are those of its own sequence
    part: Part  # the half of an encoder-decoder model that it lies in; "" in other models
    around: tuple[PreTrainedModel, ...]  # the transformers models that it lies in, the outermost first

    @property
    def owner(self) -> PreTrainedModel:
        """The innermost model around it, whose config names its attention implementation."""
        return self.around[-1]

    @property
    def layers(self) -> str:
        """The path of the list of layers that it lies in."""
        return re.split(r"\.\d+(?:\.|$)", self.name)[0]


def find_sites(model: object) -> tuple[Site, ...]:
    """The modules of `model` that call the attention interface, in the order in which they are registered.

    Raises:
        TypeError: not a module.
        ValueError: a module without a transformers model inside.
        UnsupportedArchitecture: a transformers model of which no module calls the interface, or, where it reads text,
            none that does.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a transformers model, got {type(model).__name__}; see af.load_model")
    owners = {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    if not owners:
        raise ValueError(
            f"expected a transformers model with a config, got {type(model).__name__}; pass the model, not one layer"
        )
    callers = [(name, module) for name, module in model.named_modules() if calls_interface(module)]
    if not callers:
        attention = sorted({type(m).__name__ for m in model.modules() if attends(m)})
        raise UnsupportedArchitecture(
            f"{type(model).__name__} does not take the attention interface of transformers: no module of it calls "
            f"{INTERFACE} (its attention: {', '.join(attention) or 'none'}), so that no mask can be given to it from "
            "outside; af.audit still measures its order"
        )
    parts = {_part(name) for name, _ in callers}
    two = {"encoder", "decoder"} <= parts
    sites = tuple(
        Site(
            name,
            module,
            "cross" if CROSS.search(name) or getattr(module, "is_cross_attention", False) is True else "self",
            _part(name) if two else "",
            tuple(owner for path, owner in owners.items() if _inside(name, path)) or (next(iter(owners.values())),),
        )
        for name, module in callers
    )
    _refuse_other_modality(next(iter(owners.values())), sites)
    return sites


def _refuse_other_modality(model: PreTrainedModel, sites: Sequence[Site]) -> None:
    """Text that passes by every site: what is done to the attention of an image would be taken for that of the text."""
    owners = {type(site.owner).__name__: site.owner.main_input_name for site in sites}
    if model.main_input_name == "input_ids" and "input_ids" not in owners.values():
        names = ", ".join(f"{owner} (reads {reads})" for owner, reads in owners.items())
        raise UnsupportedArchitecture(
            f"{type(model).__name__} reads text by attention that does not call {INTERFACE}; what calls it lies in "
            f"{names}: pass that part if you mean it"
        )


def models_around(sites: Sequence[Site]) -> list[PreTrainedModel]:
    """The transformers models that contain `sites`, the outermost first; each may ask for masks by its config.

    `generate` with a static cache asks by the config of the outermost, forward passes by that of the innermost.
    """
    return list(dict.fromkeys(owner for site in sites for owner in site.around))


def mixers_beside(model: nn.Module, sites: Sequence[Site]) -> list[str]:
    """Paths of what moves information between positions beside the self-attention at `sites`; a mask rules none of it.

    A layer without attention in a list of layers that have it, a module of a known recurrent, state-space or
    convolutional class, and a convolution wider than one position inside a layer.
    """
    mixers: list[str] = []
    covered = [site.name for site in sites]
    for path in dict.fromkeys(site.layers for site in sites):
        layers = model.get_submodule(path)
        if not isinstance(layers, nn.ModuleList):
            continue
        for index, layer in enumerate(layers):
            here = f"{path}.{index}"
            attends = any(_inside(name, here) for name in covered)
            inner = [
                (name, m)
                for name, m in layer.named_modules(prefix=here)
                if m is not layer and moves_between_positions(m)
            ]
            mixers += [f"{name} ({type(m).__name__})" for name, m in inner]
            if not attends and not inner:
                mixers.append(f"{here} ({type(layer).__name__}, without attention)")
    return mixers


@dataclass(frozen=True, eq=False)
class Stack:
    """The list of layers of a model.

    Attributes:
        path: of the list.
        layers: its elements, with attention or without.
        attention: the (first) self-attention of each layer that has any, by the number of the layer.
        owner: the innermost transformers model around it.
        root: what was looked at.
    """

    path: str
    layers: Sequence[nn.Module]
    attention: Mapping[int, Site]
    owner: PreTrainedModel
    root: nn.Module

    def identity(self, without: str) -> dict[str, object]:
        """By what the model is recognised; names of parameters that contain `without`, and adapters, are left out."""
        config = self.owner.config
        width = getattr(cast(Any, config).get_text_config(), "hidden_size", None)
        return identity(config, self.layers, without, width=width)


def stack_of(model: nn.Module) -> Stack:
    """The one list of layers of a transformers model whose self-attention calls the attention interface.

    Raises:
        ValueError: no transformers model, or one with several stacks: an encoder and a decoder, a tower for images.
        UnsupportedArchitecture: attention past the interface, or outside of a list of layers.
    """
    sites = [site for site in find_sites(model) if site.kind == "self"]
    paths = list(dict.fromkeys(site.layers for site in sites))
    if len(paths) != 1:
        parts = f"several stacks of layers: {', '.join(paths)}; pass the one that you mean" if paths else "no layers"
        raise ValueError(f"{type(model).__name__} has {parts}")
    layers = model.get_submodule(paths[0])
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedArchitecture(f"the attention of {type(model).__name__} lies in no list of layers ({paths[0]})")
    attention: dict[int, Site] = {}
    for site in sites:
        attention.setdefault(int(site.name[len(paths[0]) :].split(".")[1]), site)
    return Stack(paths[0], list(layers), attention, sites[0].owner, model)


def eager_kernel(module: nn.Module) -> Callable[..., object]:
    """The `eager` attention of a module: the default that it names when it asks the interface."""
    forward = inspect.unwrap(type(module).forward)
    for name in cast(CodeType, forward.__code__).co_names:
        if name.endswith("eager_attention_forward"):
            return cast(Callable[..., object], forward.__globals__[name])
    raise UnsupportedArchitecture(
        f"{type(module).__name__} names no eager attention; choose backend='sdpa' or 'flex_attention'"
    )


def _part(name: str) -> Part:
    for word in name.split("."):
        if word in ("encoder", "decoder"):
            return word
    return ""


def _inside(name: str, path: str) -> bool:
    return path == "" or name == path or name.startswith(path + ".")
