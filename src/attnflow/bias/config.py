"""The inputs of every kind of bias: its config, the shape of its layer, and the vectors that it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Literal, TypeVar, cast, get_args

from jaxtyping import Float, Int
from torch import Tensor, nn

from attnflow._core.checks import integer

Reference = Literal["unrotated", "rotated", "per_head", "hidden"]  # which vectors a bias reads
ShareHeads = bool | Literal["kv"]  # which heads share a network
Placement = Literal["every", "every_other", "every_fourth"]
Init = Literal["zero", "kaiming"]

_STEP: Final = {"every": 1, "every_other": 2, "every_fourth": 4}
_CHOICES: Final[Mapping[str, tuple[object, ...]]] = {
    "reference": get_args(Reference),
    "share_heads": (True, False, "kv"),
    "init": get_args(Init),
    "rope": ("keep", "remove"),
}
_POSITIVE: Final = ("hidden_dim", "rank", "max_length", "max_distance")
_Config = TypeVar("_Config", bound="BiasConfig")
KINDS: Final[dict[str, type[BiasConfig]]] = {}  # filled by the definition of each config


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one attention layer.

    Attributes:
        index: the number of the layer in the model.
        num_heads: number of query heads.
        num_kv_heads: number of key-value heads.
        head_dim: width of a head.
        hidden_size: width of the layer's input.
        is_causal: whether queries see earlier keys only.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    is_causal: bool

    def groups(self, share_heads: ShareHeads) -> int:
        if share_heads is True:
            return 1
        return self.num_kv_heads if share_heads == "kv" else self.num_heads

    def widths(self, reference: Reference) -> tuple[int, int]:
        if reference == "hidden":
            return self.hidden_size, self.hidden_size
        if reference == "per_head":
            return self.head_dim, self.head_dim
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim


@dataclass(frozen=True, eq=False)
class Vectors:
    """The vectors of queries or keys that a bias may read in one forward pass; only new tokens, not cached ones.

    Attributes:
        unrotated: projections of all heads side by side, before rotary embedding, [batch, tokens, heads * head_dim].
        rotated: the projections after it, as attention uses them.
        hidden: input of the layer, [batch, tokens, hidden_size].
        positions: positions of the tokens in their sequence, [batch or 1, tokens].
    """

    unrotated: Float[Tensor, "batch tokens width"] | None
    rotated: Float[Tensor, "batch tokens width"] | None
    hidden: Float[Tensor, "batch tokens hidden_size"] | None
    positions: Int[Tensor, "batch_or_1 tokens"]

    def reference(self, name: str) -> Tensor:
        """The vectors that a config's `reference` names; "per_head" reads the unrotated ones."""
        vectors = {"rotated": self.rotated, "hidden": self.hidden}.get(name, self.unrotated)
        if vectors is None:
            raise ValueError(f"the config of this bias must name reference={name!r} to read these vectors")
        return vectors


@dataclass(frozen=True, kw_only=True)
class BiasConfig:
    """The config of one learned bias on attention scores; each kind has its own subclass with its fields.

    A subclass registers itself: its `kind`, by default the class's name in lower case without "Config", is what saved
    files call it. `makes(config, shape)` makes its module for one layer.

    Attributes:
        layers: "every", "every_other" (from the first; the paper's choice), "every_fourth", or the indices.
        rope: "keep" or "remove" the rotary embedding of these layers.
        reference: (kinds that read vectors) "unrotated": full-width projections, all heads side by side, before
            rotary embedding; "rotated": after it; "per_head": each head its own part, the paper's head-specific
            ablation; "hidden": the layer's input, for queries and keys alike.
        share_heads: (kinds with a network or table) True for one map for all heads (with reference="per_head": one
            network, a map per head); "kv" for one network per key-value head; False for one per head.
        init: (kinds with a last layer) "zero", the identity: training starts from the base model exactly; or
            "kaiming", He's normal initialisation of the last layer too, std sqrt(2 / fan_in) (daa, fig. 5).

    Raises:
        ValueError, TypeError: a field out of range, with what was expected.
    """

    kind: ClassVar[str]
    makes: ClassVar[Callable[[Any, LayerShape], nn.Module]]

    layers: Placement | Sequence[int] = "every_other"
    rope: Literal["keep", "remove"] = "keep"

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        is_base = not hasattr(cls, "makes") and cls.module is BiasConfig.module
        if is_base or getattr(cls, "kind", None) == "custom":  # `load` is handed custom configs, which hold code
            return
        if "kind" not in vars(cls):
            cls.kind = cls.__name__.removesuffix("Config").lower()
        # A cell that runs again, or a dataclass with slots, defines the same class once more.
        earlier = KINDS.get(cls.kind, cls)
        if _path(earlier) != _path(cls):
            raise TypeError(
                f"{_path(cls)} would be the kind {cls.kind!r}, which is {_path(earlier)}: rename the class, or give it "
                "a name of its own with kind: ClassVar[str] = ..."
            )
        KINDS[cls.kind] = cls

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            options = _CHOICES.get(field.name)
            if options and not any(value == option and type(value) is type(option) for option in options):
                raise ValueError(f"{field.name} must be one of {', '.join(map(repr, options))}, got {value!r}")
            if field.name in _POSITIVE:
                integer(field.name, value, minimum=1)
        if not isinstance(cast(object, self.layers), Sequence):
            raise TypeError(f"layers must be a name or a list of indices, such as [0], got {self.layers!r}")
        if not isinstance(self.layers, str):
            # A tuple, so that the config is hashable and equal after JSON.
            object.__setattr__(self, "layers", tuple(integer("layers", layer) for layer in self.layers))
            if len(set(self.layers)) != len(self.layers) or not self.layers:
                raise ValueError(f"layers must list at least one layer, each once, got {list(self.layers)}")
        elif self.layers not in _STEP:
            raise ValueError(f"layers must be one of {', '.join(map(repr, _STEP))} or indices, got {self.layers!r}")

    def module(self, shape: LayerShape) -> nn.Module:
        """Make the module of one layer, a `BiasTerm`, freshly initialised.

        Raises:
            ValueError: such a layer cannot have this kind.
        """
        return type(self).makes(self, shape)

    @property
    def reads(self) -> Reference | None:
        """The vectors that the kind reads, or None if it reads only positions."""
        return getattr(self, "reference", None)

    @classmethod
    def is_ours(cls) -> bool:
        """Whether this package defines the class."""
        return cls.__module__.startswith("attnflow.")

    def layer_indices(self, num_layers: int) -> list[int]:
        """The layers of a model with `num_layers` that get this bias.

        Raises:
            ValueError: an index that the model does not have.
        """
        if isinstance(self.layers, str):
            return list(range(0, num_layers, _STEP[self.layers]))
        beyond = [layer for layer in self.layers if layer >= num_layers]
        if beyond:
            raise ValueError(f"layers {beyond} do not exist: the model has layers 0 to {num_layers - 1}")
        return sorted(self.layers)

    def to_dict(self) -> dict[str, object]:
        """The config as plain data for JSON; that of a class of yours also names the class."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        layers = self.layers if isinstance(self.layers, str) else list(self.layers)
        named = {} if self.is_ours() else {"class": _path(type(self))}
        return {"kind": self.kind, **named, **values, "layers": layers}

    @classmethod
    def from_dict(cls: type[_Config], values: Mapping[str, object]) -> _Config:
        """Make the config from the `to_dict()` of this kind.

        Raises:
            ValueError: unknown fields, or values out of range.
        """
        content = {name: value for name, value in values.items() if name not in ("kind", "class")}
        own = {field.name for field in fields(cls)}
        unknown = sorted(set(content) - own)
        if unknown:
            raise ValueError(f"{cls.__name__} has no field {', '.join(map(repr, unknown))}; it has {sorted(own)}")
        return cls(**content)  # pyright: ignore[reportArgumentType]


def config_from_dict(values: Mapping[str, object]) -> BiasConfig:
    """Make a config of any registered kind from its `to_dict`; nothing is imported for one that is not."""
    kind = values.get("kind")
    if isinstance(kind, str) and kind in KINDS:
        return KINDS[kind].from_dict(values)
    if "class" in values:
        raise ValueError(
            f"the kind {kind!r} is not defined here: import its class, {values['class']!r}, before loading"
        )
    raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")


def _path(config: type) -> str:
    return f"{config.__module__}.{config.__qualname__}"


@dataclass(frozen=True, kw_only=True)
class VectorConfig(BiasConfig):
    """The common fields of kinds that read vectors of queries and keys."""

    reference: Reference = "unrotated"
    share_heads: ShareHeads = True
