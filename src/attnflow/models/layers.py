"""The layers of one stack of a transformers model, whole: what reads or writes the residual stream goes around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.sites import Site, find_sites

_SAMPLES: Final = 16  # numbers of a matrix by which a model is recognised
_ADAPTERS: Final = (".lora_", "modules_to_save")


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
        """By what the model is recognised: type, sizes, and a few weights of its first, middle and last layer.

        Names of parameters that contain `without`, and adapters, are left out.
        """
        config = self.owner.config
        return {
            "name": str(getattr(config, "_name_or_path", "") or ""),
            "model_type": str(getattr(config, "model_type", "")),
            "num_layers": len(self.layers),
            "width": getattr(cast(Any, config).get_text_config(), "hidden_size", None),
            "samples": weight_samples(self.layers, without),
        }


def weight_samples(layers: Sequence[nn.Module], without: str) -> list[float]:
    """A few weights of the first, middle and last layer, by which a model is recognised in any precision.

    Names of parameters that contain `without`, and adapters, are left out.
    """
    samples: list[float] = []
    for layer in (layers[0], layers[len(layers) // 2], layers[-1]):
        for name, parameter in layer.named_parameters():
            ours = without in name or any(part in name for part in _ADAPTERS)
            if not ours and parameter.is_floating_point() and parameter.ndim == 2:
                flat = parameter.detach().flatten()
                samples += flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].float().tolist()
                break
    return samples


def same_weights(here: Sequence[float], saved: object) -> bool:
    """Whether samples of weights are those that a file holds, in whatever precision.

    Raises:
        TypeError, ValueError, RuntimeError: the file holds something else.
    """
    ours, theirs = torch.tensor(here), torch.tensor(cast(Any, saved))
    scale = float(ours.abs().max()) if ours.numel() else 0.0
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=0.01, atol=2e-3 * scale)


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
