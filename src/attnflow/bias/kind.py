"""Kinds of bias: the protocol, user-defined kinds, the parts of our kinds, and the sum on one layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar, cast, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from attnflow.bias.call import BiasedCall
from attnflow.bias.config import BiasConfig, Init, LayerShape, Reference, VectorConfig, Vectors
from attnflow.bias.terms import Dense, Term, wide

_Config = TypeVar("_Config", bound=BiasConfig)


@runtime_checkable
class BiasTerm(Protocol):
    """The protocol of one bias of one attention layer; its features of keys, `columns`, are cached with the keys."""

    def columns(self, keys: Vectors) -> Float[Tensor, "batch tokens width"]:
        """Return the features of each new key that the bias needs, in float32; the width is fixed."""
        ...

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Term:
        """Return the term for new queries and all keys.

        Args:
            queries: vectors of the new tokens.
            columns: `columns` of all keys, cached ones first; slots of a static cache not written yet are zero.
            slots: where the new tokens lie among the keys, int64[tokens], if each of them is a key.
        """
        ...

    def is_zero(self) -> bool:
        """Whether B is exactly 0 for every input, so that attention may run without it."""
        ...


@dataclass(frozen=True, kw_only=True)
class CustomConfig(BiasConfig):
    """The config of a user-defined bias.

    Attributes:
        build: makes the module of one layer from its `LayerShape`. The module may have the methods of `BiasTerm`.
            Otherwise it is called with (query, key), [batch, queries, width] and [batch, keys, width] as `reference`
            says, and returns B as [batch or 1, maps, queries, keys], which holds every pair.
        name: written into saved files; loading needs the config again, since it never imports code by name.
    """

    kind: ClassVar[str] = "custom"
    build: Callable[[LayerShape], nn.Module] = field(kw_only=False)
    reference: Reference = "unrotated"
    name: str = "custom"

    def module(self, shape: LayerShape) -> nn.Module:
        """Make the module of one layer.

        Raises:
            TypeError: `build` does not return a module.
        """
        module = cast(object, self.build(shape))
        if not isinstance(module, nn.Module):
            raise TypeError(f"{self.name}: build must return an nn.Module, got {type(module).__name__}")
        return module if isinstance(module, BiasTerm) else Pairwise(module, self.reference)

    def to_dict(self) -> dict[str, object]:
        """The fields to compare with the config that is passed on loading: all but the code."""
        return {name: value for name, value in super().to_dict().items() if name != "build"}


class Pairwise(nn.Module):
    """A module on (all query vectors, all key vectors) as a bias; the key's vector is what the cache keeps."""

    def __init__(self, network: nn.Module, reference: Reference) -> None:
        super().__init__()
        self.network, self.name = network, reference

    def columns(self, keys: Vectors) -> Float[Tensor, "batch tokens width"]:
        return wide(keys.reference(self.name))

    def term(self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None) -> Dense:
        rows = queries.reference(self.name)
        bias = self.network(rows, columns.to(rows.dtype))
        expected = (rows.shape[1], columns.shape[1])
        if not isinstance(bias, Tensor) or bias.ndim != 4 or tuple(bias.shape[2:]) != expected:
            got = tuple(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
            raise ValueError(
                f"{type(self.network).__name__} must return [batch or 1, maps, {expected[0]}, {expected[1]}], got {got}"
            )
        return Dense(bias)

    def is_zero(self) -> bool:
        return False


class LayerBias(nn.Module):
    """Lives as a child of an attention module, so that optimisers, checkpoints and parallel wrappers find it."""

    def __init__(
        self, kinds: Sequence[nn.Module], shape: LayerShape, references: Sequence[str], backend: str = "auto"
    ) -> None:
        super().__init__()
        self.kinds = nn.ModuleList(kinds)
        self.shape = shape
        # Names of the vectors that the summands read.
        self.references = frozenset("unrotated" if name == "per_head" else name for name in references)
        self.backend, self.ran = backend, ""  # what was asked for, and what computed the last call
        self.enabled = True  # whether attention uses it
        # Called with every attention call, before it runs; the call is without our terms while the bias is disabled.
        self.observer: Callable[[BiasedCall], None] | None = None
        self.hooks: Any = None  # what reads the vectors of the layer
        self._trained = False
        self._widths: list[int] = []

    def columns(self, keys: Vectors) -> Float[Tensor, "batch tokens width"]:
        """What all summands must know of each new key, side by side."""
        parts = [cast(BiasTerm, kind).columns(keys) for kind in self.kinds]
        batch = max(part.shape[0] for part in parts)
        self._widths = [part.shape[-1] for part in parts]
        return parts[0] if len(parts) == 1 else torch.cat([part.expand(batch, -1, -1) for part in parts], dim=-1)

    def terms(
        self, queries: Vectors, columns: Float[Tensor, "batch keys width"], slots: Tensor | None = None
    ) -> tuple[Term, ...]:
        parts = (columns,) if len(self.kinds) == 1 else columns.split(self._widths, dim=-1)
        return tuple(
            cast(BiasTerm, kind).term(queries, part, slots) for kind, part in zip(self.kinds, parts, strict=True)
        )

    def is_zero(self) -> bool:
        """Whether B is known to be 0, looked up until it is not; a compiler cannot know, as values decide."""
        if self._trained or torch.compiler.is_compiling():
            return False
        self._trained = not all(cast(BiasTerm, kind).is_zero() for kind in self.kinds)
        return not self._trained


def layer_biases(model: nn.Module) -> Iterator[tuple[str, LayerBias]]:
    for name, module in model.named_modules():
        if isinstance(module, LayerBias):
            yield name, module


class BiasKind(nn.Module, Generic[_Config]):
    """Base of our kinds, zero where the parameters named in `last` are; `maps` counts the distinct maps."""

    last: ClassVar[tuple[str, ...]]

    def __init__(self, config: _Config, shape: LayerShape) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        if isinstance(config, VectorConfig):
            self.maps = shape.num_heads if config.reference == "per_head" else shape.groups(config.share_heads)

    def columns(self, keys: Vectors) -> Float[Tensor, "batch tokens width"]:
        """The position of each key: exact in float32 up to 16 million."""
        last: Tensor = getattr(self, self.last[0])
        return keys.positions.to(torch.float64 if last.dtype == torch.float64 else torch.float32)[..., None]

    def is_zero(self) -> bool:
        return not any(bool(attrgetter(name)(self).any()) for name in self.last)


class Projection(nn.Module):
    """A linear map from a layer's vectors to `out` numbers per network: full-width, or from each head's own part."""

    def __init__(self, config: VectorConfig, shape: LayerShape, side: Literal["query", "key"], out: int) -> None:
        super().__init__()
        width = shape.widths(config.reference)[0 if side == "query" else 1]
        self.networks = shape.groups(config.share_heads)
        self.heads = shape.num_heads if side == "query" else shape.num_kv_heads
        self.num_heads = shape.num_heads
        self.reference = config.reference
        self.weight = nn.Parameter(torch.empty(self.networks, out, width))

    def forward(self, side: Vectors) -> Float[Tensor, "batch groups tokens out"]:
        """One result per map, in float32: `networks` of them, or one per query head where heads are read apart."""
        vectors = side.reference(self.reference)
        batch, tokens, _ = vectors.shape
        weight = self.weight.to(vectors.dtype)
        if self.reference != "per_head":
            flat = functional.linear(vectors, weight.flatten(0, 1))
            return wide(flat.view(batch, tokens, self.networks, -1).transpose(1, 2))
        heads = vectors.view(batch, tokens, self.heads, -1).transpose(1, 2)
        heads = heads.repeat_interleave(self.num_heads // self.heads, dim=1)
        return wide(heads @ weight.repeat_interleave(self.num_heads // self.networks, dim=0).mT)


class GroupedNorm(nn.Module):
    """Gain and bias of a layer norm per network, [networks, width]; named so that optimisers find them as a norm's."""

    def __init__(self, networks: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(networks, width))
        self.bias = nn.Parameter(torch.zeros(networks, width))


def as_linear(parameter: Tensor, fan_in: int) -> None:
    """Initialise as `nn.Linear` does: uniform within 1 / sqrt(fan_in)."""
    nn.init.uniform_(parameter, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))


def as_last(parameter: Tensor, fan_in: int, init: Init) -> None:
    """Initialise the layer that decides whether the bias is zero: zero, or He's normal with std sqrt(2 / fan_in)."""
    if init == "zero":
        nn.init.uniform_(parameter, 0.0, 0.0)  # drawn, so that the layers behind it get the numbers of their seed
    else:
        nn.init.normal_(parameter, std=math.sqrt(2 / fan_in))


def spread(parameter: Tensor, maps: int) -> Tensor:
    """A parameter [networks, ...] as one per map, [maps, ...], in float32."""
    return wide(parameter if len(parameter) == maps else parameter.repeat_interleave(maps // len(parameter), dim=0))


def flatten(features: Float[Tensor, "batch groups tokens out"]) -> Float[Tensor, "batch tokens width"]:
    return features.transpose(1, 2).flatten(2)


def unflatten(columns: Float[Tensor, "batch keys width"], maps: int) -> Float[Tensor, "batch groups keys out"]:
    return columns.unflatten(-1, (maps, -1)).transpose(1, 2)
