"""The attention layers of a model in memory or in a checkpoint: where they are, their heads, their queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnflow._core.checks import preview
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.checkpoints.weights import Weights, config_of
from attnflow.models.families.find import Place, find, nothing_known, registered
from attnflow.models.families.heads import UnknownHeads
from attnflow.models.families.rows import Read, Rows, Selected
from attnflow.models.families.table import is_query_or_key
from attnflow.models.places import places_of, said_by

_ADAPTER: Final = ".base_layer."  # of PEFT, between the path that the model uses and the weight that it wraps


@dataclass(frozen=True, eq=False)
class AttentionLayer(Place):
    """One attention module with its query and key projections, in one layout for every model.

    Weights are stored (out, in): row `h * head_dim + i` of the query makes component i of the query of head h from the
    token. Query head h scores against KV head `h // (num_heads // num_kv_heads)`. The bilinear form of a head is
    `query_h.T @ key_h`, of which the scores of geometry, sec. 3 are taken. Biases, rotations by position, the gains of
    norms and the factor 1/sqrt(head_dim) have no part in it.
    """

    read: Read
    parameters: Mapping[str, nn.Parameter]  # of a model in memory, which hold query and key, perhaps among other rows

    def query(self) -> Float[Tensor, "out d_query"]:
        """The query's weight, [num_heads * head_dim, d_query].

        Of a model in memory gradients flow to the parameters, and it is a view of the parameter where the heads lie in
        one run; a copy in interleaved and latent layouts. Of a checkpoint it is read now.
        """
        return self.query_rows.load(self.read)

    def key(self) -> Float[Tensor, "kv_out d_key"]:
        """The key's weight, [num_kv_heads * head_dim, d_key], likewise; d_key differs in some cross-attention."""
        return self.key_rows.load(self.read)

    def write(
        self, query: Float[Tensor, "out d_query"] | None = None, key: Float[Tensor, "kv_out d_key"] | None = None
    ) -> None:
        """Replace the weights of a model in memory in place; the rest of a fused parameter stays.

        Raises:
            ValueError: a weight has another shape.
            UnsupportedArchitecture: the weights are products (latent attention), so that there is no one way to.
        """
        for rows, weight in ((self.query_rows, query), (self.key_rows, key)):
            if weight is None:
                continue
            if not isinstance(rows, Rows | Selected):
                raise UnsupportedArchitecture(
                    f"{self.name} has queries or keys that are products (latent attention), which cannot be written"
                )
            with torch.no_grad():
                expected = rows.take(self.parameters[rows.tensor]).shape
                if weight.shape != expected:
                    raise ValueError(
                        f"{self.name}: expected a weight of shape {list(expected)}, got {list(weight.shape)}"
                    )
                rows.put(self.parameters[rows.tensor], weight)


def attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """Every attention module of a model in memory, in the order of its layers.

    What the registry of families cannot read is probed, by one forward pass of 16 tokens when a model is first asked
    for. Layers that share one module (ALBERT) have one entry.

    Raises:
        TypeError: not a module.
        UnsupportedArchitecture: the model has no attention that is known, adapters on its queries or keys, or queries
            and keys that are no linear function of a token.
    """
    if not isinstance(cast(object, model), nn.Module):
        raise TypeError(f"expected a torch module, got {type(model).__name__}")
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}

    def read(tensor: str, rows: tuple[int, int] | None) -> Tensor:
        return parameters[tensor] if rows is None else parameters[tensor][slice(*rows)]

    return [
        AttentionLayer(**vars(place), read=read, parameters={name: parameters[name] for name in place.tensors})
        for place in places_of(model, shapes)
    ]


def attention_places(model: nn.Module) -> dict[str, Place]:
    """Where the projections of every attention module are, by its path, also under adapters and when quantised.

    Names are those that the model's own code uses. Raises `UnsupportedArchitecture` if no attention is known.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        wide, narrow = getattr(module, "out_features", None), getattr(module, "in_features", None)
        if isinstance(wide, int) and isinstance(narrow, int):
            shapes[f"{name}.weight".replace(_ADAPTER, ".")] = (wide, narrow)
    for name, parameter in model.named_parameters():
        if ".lora_" not in name and parameter.is_floating_point():  # a quantised weight is stored in another shape
            shapes[name.replace(_ADAPTER, ".")] = tuple(parameter.shape)
    places: dict[str, Place] = {}
    for stem, place in registered(shapes, config_of(model), said_by(model)):
        if isinstance(place, UnsupportedArchitecture):
            raise place
        places[stem.path] = place
    if not places:
        raise UnsupportedArchitecture(nothing_known(shapes, config_of(model)))
    return places


def stored_layers(weights: Weights, config: Mapping[str, object] | None = None) -> list[AttentionLayer]:
    """Every attention module of what `open_weights` opened, in order; its weights are read when they are asked for.

    Args:
        weights: the checkpoint.
        config: entries that replace those of its config.json.

    Raises:
        UnsupportedArchitecture: no queries and keys are known, they do not fit the config, or they are quantised in a
            format that is not read.
    """
    packed = sorted(name for name in weights.packed if is_query_or_key(name))
    if packed:
        raise UnsupportedArchitecture(
            f"{weights.name}: the weights are quantised in a format that is not read ({preview(packed, 2)}); GGUF and "
            "8-bit floats are"
        )
    try:
        if weights.module is not None:
            places = places_of(weights.module, weights.shapes, config)
        else:
            places = _stored_places(weights, {**weights.config, **(config or {})})
    except UnsupportedArchitecture as error:
        raise UnsupportedArchitecture(f"{weights.name}: {error}") from error
    return [AttentionLayer(**vars(place), read=weights.read, parameters={}) for place in places]


def _stored_places(weights: Weights, config: Mapping[str, object]) -> tuple[Place, ...]:
    try:
        return find(weights.shapes, config)
    except UnknownHeads:
        try:
            from attnflow.models.loader import complete_config
        except ImportError:  # without transformers nobody knows what a config leaves out
            pass
        else:
            return find(weights.shapes, complete_config(config))
        raise
