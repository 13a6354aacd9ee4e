"""The layers of one stack of a transformers model, whole: what reads or writes the residual stream goes around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.addons import identity
from attnflow.models.sites import Site, find_sites


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
