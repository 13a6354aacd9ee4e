"""`live_query_keys`: the queries and keys of a model in memory, to read with gradients and to write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.families.find import Place, find
from attnflow.models.families.rows import Rows
from attnflow.models.query_key import Kind, QueryKey

_STATED: Final = ("num_attention_heads", "num_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads")


@dataclass(frozen=True, eq=False)
class LiveQueryKey:
    """The query and key of one attention module of a model in memory; attributes are those of `QueryKey`.

    Attributes:
        place: where the weights lie in the model's parameters.
        parameters: the parameters that hold them, by name; other rows of a fused one are not part of query or key.
    """

    place: Place
    parameters: Mapping[str, nn.Parameter]

    @property
    def layer(self) -> int:
        """Number of the layer in its tower."""
        return self.place.layer

    @property
    def name(self) -> str:
        """Path of the attention module."""
        return self.place.name

    @property
    def tower(self) -> str:
        """The part of a model of several."""
        return self.place.tower

    @property
    def kind(self) -> Kind:
        """Whether the keys are made from the same sequence as the queries."""
        return self.place.kind

    @property
    def num_heads(self) -> int:
        """Heads of the query."""
        return self.place.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Heads of the key."""
        return self.place.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.place.head_dim

    def query(self) -> Float[Tensor, "out d_query"]:
        """The query's weight, [num_heads * head_dim, d_query], through which gradients flow to the parameters.

        A view of the parameter where the heads lie in one run; a copy in interleaved and latent layouts.
        """
        return self.place.query.load(self._read)

    def key(self) -> Float[Tensor, "kv_out d_key"]:
        """The key's weight, [num_kv_heads * head_dim, d_key], likewise."""
        return self.place.key.load(self._read)

    def read(self) -> QueryKey:
        """Both weights as they are now, detached."""
        place = self.place
        with torch.no_grad():
            query, key = self.query().detach(), self.key().detach()
        return QueryKey(
            place.layer, place.name, place.tower, place.kind, query, key, place.num_heads, place.num_kv_heads,
            place.head_dim,
        )  # fmt: skip

    def write(
        self, query: Float[Tensor, "out d_query"] | None = None, key: Float[Tensor, "kv_out d_key"] | None = None
    ) -> None:
        """Replace the weights in place; the rest of a fused parameter stays.

        Raises:
            ValueError: a weight has another shape.
            UnsupportedArchitecture: the weights are products (latent attention), so that there is no one way to.
        """
        for rows, weight in ((self.place.query, query), (self.place.key, key)):
            if weight is None:
                continue
            if not isinstance(rows, Rows):
                raise UnsupportedArchitecture(f"{self.name} has latent attention, whose weights cannot be written")
            with torch.no_grad():
                expected = rows.take(self.parameters[rows.tensor]).shape
                if weight.shape != expected:
                    raise ValueError(
                        f"{self.name}: expected a weight of shape {list(expected)}, got {list(weight.shape)}"
                    )
                rows.put(self.parameters[rows.tensor], weight)

    def _read(self, tensor: str, rows: tuple[int, int] | None) -> Tensor:
        parameter = self.parameters[tensor]
        return parameter if rows is None else parameter[slice(*rows)]


def live_query_keys(model: nn.Module) -> list[LiveQueryKey]:
    """The query and key of every attention module of a model, in the order of its layers.

    Layers that share one module (ALBERT) have one entry.

    Raises:
        TypeError: not a module.
        UnsupportedArchitecture: the model has no attention that is known.
    """
    if not isinstance(cast(object, model), nn.Module):
        raise TypeError(f"expected a torch module, got {type(model).__name__}")
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    return [
        LiveQueryKey(place, {name: parameters[name] for name in (*place.query.tensors, *place.key.tensors)})
        for place in find(shapes, config_of(model), lambda path: stated_by(model, path))
    ]


def config_of(model: nn.Module) -> Mapping[str, object]:
    """The config that a model carries, as in config.json; empty if it carries none."""
    config = getattr(model, "config", None)
    as_dict = getattr(config, "to_dict", None)
    if callable(as_dict):
        return cast(Mapping[str, object], as_dict())
    return cast(Mapping[str, object], config) if isinstance(config, Mapping) else {}


def stated_by(model: nn.Module, path: str) -> Mapping[str, object]:
    """What the attention module at a path says of its heads."""
    module = model.get_submodule(path)
    return {word: getattr(module, word) for word in _STATED if isinstance(getattr(module, word, None), int)}
