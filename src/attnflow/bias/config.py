"""`BiasConfig`: which bias, on which layers, from which vectors; frozen, and the same after a trip through JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Final, Literal, get_args

from attnflow._core.checks import integer

Kind = Literal["guidance", "bilinear", "dot", "key", "cumulative", "lowrank", "dense", "alibi", "relative"]
Reference = Literal["unrotated", "rotated", "per_head", "hidden"]
Placement = Literal["every", "every_other", "every_fourth"]

VERSION: Final = 1
_STEP: Final = {"every": 1, "every_other": 2, "every_fourth": 4}


@dataclass(frozen=True)
class BiasConfig:
    """One learned bias on attention scores (daa, table 1, and the controls that it is compared with).

    Attributes:
        kind: "guidance" (the paper's network on query and key), "bilinear", "dot", "key" (the same network on the key
            alone), "cumulative" (forget gates, FoX), "lowrank", "dense" (a learned number per pair of positions),
            "alibi", "relative" (T5 buckets).
        layers: "every", "every_other" (from the first; the paper's choice), "every_fourth", or the indices.
        hidden_dim: width of the network's hidden layer.
        reference: the vectors that the bias reads: "unrotated" (full-width projections, all heads side by side, before
            rotary embedding), "rotated" (after it), "per_head" (each head its own part: the paper's head-specific
            ablation), or "hidden" (the layer's input, for queries and keys alike).
        share_heads: True for one map for all heads (with reference="per_head": one network, a map per head); "kv" for
            one network per key-value head; False for one per head.
        init: "zero" (the identity: training starts from the base model exactly) or "kaiming" (the output layer too,
            for the paper's Fig. 5; gains start at 1).
        rank: of "lowrank"; default `hidden_dim`, which gives the parameter count of "guidance".
        max_length: positions of "dense".
        num_buckets: of "relative".
        max_distance: from which on "relative" puts distances into one bucket.
        rope: "keep", or "remove" the rotary embedding of these layers (ALiBi in its place).
        version: of this format.

    Raises:
        ValueError, TypeError: a field out of range, with what was expected.

    >>> BiasConfig.from_dict(BiasConfig(layers=[0, 3]).to_dict()) == BiasConfig(layers=[0, 3])
    True
    """

    kind: Kind = "guidance"
    layers: Placement | Sequence[int] = "every_other"
    hidden_dim: int = 64
    reference: Reference = "unrotated"
    share_heads: bool | Literal["kv"] = True
    init: Literal["zero", "kaiming"] = "zero"
    rank: int | None = None
    max_length: int = 512
    num_buckets: int = 32
    max_distance: int = 128
    rope: Literal["keep", "remove"] = "keep"
    version: int = VERSION

    def __post_init__(self) -> None:
        for name, options in (
            ("kind", get_args(Kind)),
            ("reference", get_args(Reference)),
            ("share_heads", (True, False, "kv")),
            ("init", ("zero", "kaiming")),
            ("rope", ("keep", "remove")),
        ):
            value = getattr(self, name)
            if not any(value is option or (value == option and type(value) is type(option)) for option in options):
                raise ValueError(f"{name} must be one of {', '.join(map(repr, options))}, got {value!r}")
        for name in ("hidden_dim", "max_length", "max_distance"):
            integer(name, getattr(self, name), minimum=1)
        integer("num_buckets", self.num_buckets, minimum=4)
        if self.rank is not None:
            integer("rank", self.rank, minimum=1)
        if self.max_distance <= self.num_buckets // 4:
            raise ValueError(
                f"max_distance must exceed num_buckets // 4 = {self.num_buckets // 4}, got {self.max_distance}"
            )
        if self.version != VERSION:
            raise ValueError(f"a bias config of version {self.version} was given, this release reads {VERSION}")
        if isinstance(self.layers, int):
            raise TypeError(
                f"layers must be a name or a list of indices, got {self.layers!r}; for one layer, [{self.layers}]"
            )
        if not isinstance(self.layers, str):
            # A tuple, so that the config is hashable and equal after JSON.
            object.__setattr__(self, "layers", tuple(integer("layers", layer) for layer in self.layers))
            if len(set(self.layers)) != len(self.layers) or not self.layers:
                raise ValueError(f"layers must list at least one layer, each once, got {list(self.layers)}")
        elif self.layers not in _STEP:
            raise ValueError(f"layers must be one of {', '.join(map(repr, _STEP))} or indices, got {self.layers!r}")

    def layer_indices(self, num_layers: int) -> list[int]:
        """The layers that get this bias, of a model with `num_layers`.

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
        """As JSON holds it."""
        found: dict[str, object] = asdict(self)
        return found | {"layers": self.layers if isinstance(self.layers, str) else list(self.layers)}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> BiasConfig:
        """From `to_dict()`.

        Raises:
            ValueError: unknown fields, or values out of range.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"a bias config has no field {', '.join(map(repr, unknown))}; it has {sorted(known)}")
        return cls(**values)  # pyright: ignore[reportArgumentType]
