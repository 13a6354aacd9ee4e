"""Which attention layers of a model can carry a bias, and how to reach their projections."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.bias.shape import LayerShape
from attnflow.models.attention import attention_places
from attnflow.models.families.find import Place
from attnflow.models.families.rows import Rows
from attnflow.models.sites import Site, find_sites


@dataclass(frozen=True, eq=False)
class Layer:
    """One self-attention layer.

    Attributes:
        site: where it is.
        shape: its sizes.
        depth: layers of its stack, of whatever kind: as many as a key-value cache has.
        projections: path of each projection below the module, the side that it makes, and where the heads lie; empty
            if they cannot be reached, with the reason in `missing`.
        missing: why not.
    """

    site: Site
    shape: LayerShape
    depth: int
    projections: tuple[tuple[str, str, Rows], ...]
    missing: str = ""

    def place(self) -> tuple[torch.device, torch.dtype]:
        """Device and type for parameters that live beside the layer's own."""
        parameters = [p for p in self.site.module.parameters() if p.is_floating_point()]
        if not parameters:  # quantised: the config names the type that it computes in
            device = next((p.device for p in self.site.module.parameters()), torch.device("cpu"))
            return device, getattr(self.site.owner, "dtype", torch.get_default_dtype())
        return parameters[0].device, parameters[0].dtype


def layers_of(model: nn.Module) -> list[Layer]:
    """The self-attention layers of one stack of a transformers model, in order.

    Raises:
        ValueError: not a transformers model, or several stacks of self-attention.
        UnsupportedArchitecture: no layer calls the attention interface of transformers.
    """
    sites = [site for site in find_sites(model) if site.kind == "self"]
    if not sites:
        raise UnsupportedArchitecture(f"{type(model).__name__} has no self-attention on the attention interface")
    stacks = {site.layers: type(site.owner).__name__ for site in sites}
    if len(stacks) > 1:
        names = ", ".join(f"{owner} ({path})" for path, owner in stacks.items())
        raise ValueError(f"the model has several stacks of self-attention: {names}; pass the one that you mean")
    try:  # where their projections are, by the registry that `geometry` reads checkpoints with
        places, missing = attention_places(model), "its projections are not in the registry"
    except UnsupportedArchitecture as error:
        places, missing = dict[str, Place](), str(error)
    stack = model.get_submodule(sites[0].layers)
    depth = len(stack) if isinstance(stack, nn.ModuleList) else len(sites)
    return [_layer(index, site, depth, places.get(site.name), missing) for index, site in enumerate(sites)]


def _layer(index: int, site: Site, depth: int, place: Place | None, missing: str) -> Layer:
    config = site.owner.config
    numbers: dict[str, int] = {**_numbers(config), **_own(site.module)}
    if place is None:
        heads = numbers.get("num_heads", numbers.get("num_attention_heads", 0))
        if not heads:
            raise UnsupportedArchitecture(f"{site.name} does not say how many heads it has; {missing}")
        kv_heads = numbers.get("num_key_value_heads") or heads
        head_dim = numbers.get("head_dim") or numbers["hidden_size"] // heads
    else:
        heads, kv_heads, head_dim = place.num_heads, place.num_kv_heads, place.head_dim
    causal = getattr(site.module, "is_causal", None)
    causal = bool(getattr(config, "is_decoder", True)) if causal is None else bool(causal)
    shape = LayerShape(index, heads, kv_heads, head_dim, numbers["hidden_size"], causal)
    if place is None or not isinstance(place.query_rows, Rows) or not isinstance(place.key_rows, Rows):
        latent = "its queries or keys are products of two projections (latent attention)"
        return Layer(site, shape, depth, (), latent if place is not None else missing)
    projections = tuple(
        (rows.tensor.removeprefix(place.name).strip(".").removesuffix(".weight"), side, rows)
        for side, rows in (("query", place.query_rows), ("key", place.key_rows))
    )
    return Layer(site, shape, depth, projections)


def _numbers(config: object) -> dict[str, int]:
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
    return {name: value for name in names if isinstance(value := getattr(config, name, None), int)}


def _own(module: nn.Module) -> dict[str, int]:
    names = ("num_heads", "num_key_value_heads", "head_dim")
    return {name: value for name in names if isinstance(value := getattr(module, name, None), int)}
