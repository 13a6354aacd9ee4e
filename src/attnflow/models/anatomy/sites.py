"""Where a transformers model calls the attention interface, and what else moves information between positions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Any, Literal, cast

from torch import nn
from transformers import PreTrainedModel

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.anatomy.mixing import INTERFACE, attends, calls_interface, moves_between_positions
from attnflow.models.loading.addons import identity
from attnflow.models.weights.families.find import CROSS, Kind, inside

Part = Literal["", "encoder", "decoder"]


@dataclass(frozen=True, eq=False)
class Site:
    name: str  # its path in the model
    module: nn.Module
    kind: Kind  # whether its keys are those of its own sequence
    part: Part  # the half of an encoder-decoder model that it lies in; "" in other models
    around: tuple[PreTrainedModel, ...]  # the transformers models that it lies in, the outermost first

    @property
    def owner(self) -> PreTrainedModel:
        return self.around[-1]

    @property
    def layers(self) -> str:
        return re.split(r"\.\d+(?:\.|$)", self.name)[0]


def find_sites(model: object) -> tuple[Site, ...]:
    """List the modules that call the attention interface, in order of registration; raises if it finds nothing."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a transformers model, got {type(model).__name__}: load one with af.load_model")
    owners = {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    if not owners:
        raise ValueError(f"expected a transformers model, got {type(model).__name__}: pass the model, not one layer")
    callers = [(name, module) for name, module in model.named_modules() if calls_interface(module)]
    if not callers:
        attention = sorted({type(m).__name__ for m in model.modules() if attends(m)})
        raise UnsupportedArchitecture(
            f"{type(model).__name__} does not take the attention interface of transformers: no module of it calls "
            f"{INTERFACE} (its attention: {', '.join(attention) or 'none'}), so that no mask can be given to it from "
            "outside; af.audit still measures its order"
        )
    parts: dict[str, Part] = {name: _part(name) for name, _ in callers}
    if not {"encoder", "decoder"} <= set(parts.values()):
        parts = {name: half(model, name) for name in parts}
    sites = tuple(
        Site(
            name,
            module,
            "cross" if CROSS.search(name) or getattr(module, "is_cross_attention", False) is True else "self",
            parts[name],
            tuple(owner for path, owner in owners.items() if inside(name, path)) or (next(iter(owners.values())),),
        )
        for name, module in callers
    )
    outermost = next(iter(owners.values()))
    reads = {type(site.owner).__name__: site.owner.main_input_name for site in sites}
    if outermost.main_input_name == "input_ids" and "input_ids" not in reads.values():  # the sites attend to an image
        names = ", ".join(f"{owner} (reads {what})" for owner, what in reads.items())
        raise UnsupportedArchitecture(
            f"{type(outermost).__name__} reads text by attention that does not call {INTERFACE}; what calls it lies in "
            f"{names}: pass that part if you mean it"
        )
    return sites


def one_owner(sites: Sequence[Site]) -> list[Site]:
    """Return the sites of the model that reads tokens: the outermost, unless an inner one holds its embeddings."""
    owners = {site.owner: site for site in sites}
    own = [site for site in sites if len(owners) == 1 or site.owner is site.around[0]]
    own = [site for site in own if not _reads_pixels(site)] or own
    inner = [_embeddings(owner) for owner in owners if own and owner is not own[0].owner]
    if not own or any(one is not None and one is _embeddings(own[0].owner) for one in inner):
        names = ", ".join(f"{type(owner).__name__} ({site.layers})" for owner, site in owners.items())
        raise ValueError(f"the model has several stacks of self-attention: {names}; pass the one that you mean")
    return own


def _embeddings(model: PreTrainedModel) -> object:
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


def _reads_pixels(site: Site) -> bool:
    path = next(name for name, module in site.owner.named_modules() if module is site.module).split(".")
    above = (site.owner.get_submodule(".".join(path[:end])) for end in range(1, len(path)))
    forwards = (getattr(module, "forward", None) for module in above if not isinstance(module, nn.ModuleList))
    return any("pixel_values" in inspect.signature(one).parameters for one in forwards if one is not None)


def models_around(sites: Sequence[Site]) -> list[PreTrainedModel]:
    """List the models around `sites`, outermost first: `generate` asks the first config, a pass the last one."""
    return list(dict.fromkeys(owner for site in sites for owner in site.around))


def mixers_beside(model: nn.Module, sites: Sequence[Site]) -> list[str]:
    """List paths of mixers beside the attention at `sites`, which no mask controls, and layers without attention."""
    mixers: list[str] = []
    covered = [site.name for site in sites]
    for path in dict.fromkeys(site.layers for site in sites):
        layers = model.get_submodule(path)
        if not isinstance(layers, nn.ModuleList):
            continue
        for index, layer in enumerate(layers):
            here = f"{path}.{index}"
            attends = any(inside(name, here) for name in covered)
            parts = layer.named_modules(prefix=here)
            inner = [(name, m) for name, m in parts if m is not layer and moves_between_positions(m)]
            mixers += [f"{name} ({type(m).__name__})" for name, m in inner]
            if not attends and not inner:
                mixers.append(f"{here} ({type(layer).__name__}, without attention)")
    return mixers


@dataclass(frozen=True, eq=False)
class Stack:
    sites: Sequence[Site]
    layers: Sequence[nn.Module]  # the attention module itself, where it lies in no list

    @property
    def path(self) -> str:
        return self.sites[0].layers

    @property
    def owner(self) -> PreTrainedModel:
        return self.sites[0].owner

    @cached_property
    def attention(self) -> Mapping[int, Site]:
        if self.sites[0].name == self.path:
            raise UnsupportedArchitecture(
                f"the attention of {type(self.owner).__name__} lies in no list of layers ({self.path})"
            )
        first: dict[int, Site] = {}
        for site in self.sites:
            first.setdefault(int(site.name[len(self.path) :].split(".")[1]), site)
        return first

    def identity(self, without: str) -> dict[str, object]:
        """Identify the model by weights, leaving out adapters and parameters whose name contains `without`."""
        config = self.owner.config
        width = getattr(cast(Any, config).get_text_config(), "hidden_size", None)
        return identity(config, self.layers, without, width=width)


def stack_of(model: nn.Module) -> Stack:
    """Find the one list of layers whose self-attention calls the attention interface; raises if there are several."""
    sites = [site for site in find_sites(model) if site.kind == "self"]
    if not sites:
        raise UnsupportedArchitecture(f"{type(model).__name__} has no self-attention on the attention interface")
    sites = one_owner(sites)
    if len(paths := dict.fromkeys(site.layers for site in sites)) > 1:
        raise UnsupportedArchitecture(
            f"{type(sites[0].owner).__name__} has self-attention in several lists of layers ({', '.join(paths)}); "
            "expected one list. No part of it can be passed instead"
        )
    path, first = sites[0].layers, sites[0]
    inside = model.get_submodule(path)._modules.values()  # a layer that is there twice counts twice
    return Stack(sites, [first.module] if first.name == path else [one for one in inside if one is not None])


def eager_kernel(module: nn.Module) -> Callable[..., object]:
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


def half(model: nn.Module, path: str) -> Part:
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return ""
    encoder, decoder = (getattr(model, f"get_{part}", lambda: None)() for part in ("encoder", "decoder"))
    names = {module: name for name, module in model.named_modules()}
    if encoder is decoder or names.get(encoder, "") == "" or names.get(decoder, "") == "":
        return ""
    return "encoder" if inside(path, names[encoder]) else "decoder" if inside(path, names[decoder]) else ""
