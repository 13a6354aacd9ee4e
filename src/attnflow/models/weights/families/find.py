"""Finds the queries and keys of a checkpoint by its tensors' names and shapes and its config."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, Literal, cast

import torch

from attnflow._core.checks import preview
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.weights.families.rows import Composed, Selected, blocks, latent
from attnflow.models.weights.families.table import (
    BESIDE,
    FUSED,
    FUSED_WORDS,
    GATED,
    KNOWN,
    LATENT,
    SEPARATE,
    UNIVERSAL,
    Heads,
    Stated,
    arranged,
    is_query_or_key,
    with_heads,
)

Kind = Literal["self", "cross"]
Shapes = Mapping[str, tuple[int, ...]]
Config = Mapping[str, object]

CROSS: Final = re.compile(r"cross(?!_modal)|encoder_attn|encdec|encoder_decoder|multihead_attn", re.IGNORECASE)
_TOWERS: Final = {
    "vision": re.compile(r"(?:^|\.)(?:vision|visual|image)(?:_(?:model|tower|encoder|backbone))?(?:\.|$)"),
    "audio": re.compile(r"(?:^|\.)audio_(?:model|tower|encoder)(?:\.|$)"),
    "text": re.compile(r"(?:^|\.)(?:text|language)_(?:model|encoder|decoder)(?:\.|$)"),
}
_SIDES: Final = {"encoder": "encoder", "enc": "encoder", "decoder": "decoder", "dec": "decoder"}
# Small networks between two towers, with settings of their own, are no layers of either; and recurrent layers, which
# have queries and keys, too, are no attention.
_OTHER: Final = re.compile(r"resampler|perceiver|connector|projector|pooler|adapter|linear_attn")


@dataclass(frozen=True)
class Place:
    layer: int  # in its tower, from 0, as the model counts
    name: str  # path of the module: the common stem of its tensors' names
    tower: str  # of a model of several parts: "encoder", "decoder", "vision", "text", "audio", ...; "" if it has one
    kind: Kind  # whether the keys are made from the same sequence as the queries
    query_rows: Selected | Composed
    key_rows: Selected | Composed
    num_heads: int
    num_kv_heads: int  # a divisor of `num_heads`
    discovered: bool  # by names and shapes alone, as its family is not in the registry

    @property
    def head_dim(self) -> int:
        return self.query_rows.head_dim

    @property
    def tensors(self) -> tuple[str, ...]:
        return (*self.query_rows.tensors, *self.key_rows.tensors)


@dataclass(frozen=True, slots=True)
class Stem:
    path: str
    word: str
    suffix: str

    def tensor(self, word: str) -> str:
        return ".".join(part for part in (self.path, word) if part) + self.suffix

    @property
    def numbers(self) -> list[int]:
        return [int(part) for part in self.path.split(".") if part.isdigit()]

    @property
    def kind(self) -> Kind:
        return "cross" if CROSS.search(f"{self.path}.{self.word}") else "self"

    @property
    def beside(self) -> bool:
        return _OTHER.search(self.path) is not None

    @property
    def tower(self) -> str:
        """Name of its tower; "" if the path names none."""
        return next((name for name, pattern in _TOWERS.items() if pattern.search(self.path)), "")

    @property
    def side(self) -> str:
        """Return "encoder" or "decoder" if the path says so, else an empty string."""
        return next((_SIDES[part] for part in self.path.split(".") if part in _SIDES), "")


def inside(name: str, path: str) -> bool:
    """Whether a module is the one at `path` or lies in it; all lie in ""."""
    return path == "" or name == path or name.startswith(f"{path}.")


Pairs = list[tuple[Stem, Place | UnsupportedArchitecture]]


def registered(shapes: Shapes, config: Config, stated: Callable[[str], Config] = lambda _: {}) -> Pairs:
    """Look up every attention-like name: its place, or why it is unknown; `stated` counts heads without a config."""
    parts = {name: re.split(r"\.(?:base_layer|lora_\w+)\.", name) for name in shapes}
    adapted = [name for name, (path, *rest) in parts.items() if rest and is_query_or_key(path)]
    if adapted:
        raise UnsupportedArchitecture(f"it has adapters at queries or keys ({adapted[0]}): merge them into the model")
    stems = [stem for stem in _stems(shapes) if not stem.beside]
    result: Pairs = []
    for stem in [stem for stem in stems if stem.numbers] or stems:
        try:
            place = _place(stem, shapes, config or stated(stem.path))
        except UnsupportedArchitecture as error:
            place = error
        if place is not None:
            result.append((stem, place))
    return result


def _stems(shapes: Shapes) -> Iterator[Stem]:
    for name, shape in shapes.items():
        suffix = ".weight" if name.endswith(".weight") else ""
        stem, _, word = name.removesuffix(suffix).rpartition(".")
        named = word in SEPARATE or word in FUSED_WORDS or word in LATENT
        # Tensors of torch's own attention are called in_proj_weight and q_proj_weight, those of XLNet q and k.
        bare = len(shape) == 3 and not suffix and f"{stem}.k" in shapes
        if named and (bare or (len(shape) == 2 and bool(suffix) != word.endswith("_weight"))):
            yield Stem(stem, word, suffix)


def _place(stem: Stem, shapes: Shapes, root: Config) -> Place | None:
    config = part_of(root, stem)
    model_type = str(config.get("model_type") or root.get("model_type") or "")
    if config.get("num_kv_shared_layers"):
        raise UnsupportedArchitecture("some layers attend to keys of earlier ones, which their own weights do not show")
    stage = next(iter(stem.numbers), 0)
    stated = Stated(with_heads(config, model_type), stem.side)
    if stem.word in LATENT or stem.tensor("kv_a_proj_with_mqa") in shapes:
        layout = _latent(stem, shapes, model_type, stated, stage)
    elif stem.word in SEPARATE:
        layout = _separate(stem, shapes, model_type, stated, stage)
    elif stem.tensor("q_attn") in shapes:
        return None  # key and value of cross-attention, found with its query
    else:
        layout = _fused(stem, shapes, model_type, stated, stage)
    if layout is None:
        return None
    query, key, heads = layout
    discovered = model_type not in KNOWN and stem.word not in UNIVERSAL
    if discovered:  # a convolution beside the key may well stand between the key and the score
        beside = next((name for name in shapes if name.startswith(f"{stem.path}.") and "conv" in name.lower()), None)
        if beside is not None:
            raise UnsupportedArchitecture(
                f"{beside} may change queries or keys, and this family is not in the registry"
            )
    return Place(stage, stem.path, "", stem.kind, query, key, heads.query, heads.key, discovered)


_Layout = tuple[Selected | Composed, Selected | Composed, Heads]


def _separate(stem: Stem, shapes: Shapes, model_type: str, stated: Stated, stage: int) -> _Layout:
    query, key = stem.tensor(stem.word), stem.tensor(SEPARATE[stem.word])
    word, transposed = BESIDE.get(stem.word, ("", False))
    if word and (both := stem.tensor(word)) in shapes:  # keys and values are one tensor
        rows, key_rows = (shapes[name][1 if transposed else 0] for name in (query, both))
        heads = stated.separate(query, stage, rows, key_rows // 2)
        return (
            blocks(query, heads.dim, heads.query, 0, heads.query, transposed=transposed),
            blocks(both, heads.dim, 2 * heads.key, 0, heads.key, transposed=transposed),
            heads,
        )
    if key not in shapes or len(shapes[key]) != len(shapes[query]):
        raise UnsupportedArchitecture(f"{query} has no key beside it: expected {key}")
    parts = 2 if model_type in GATED else 1
    bare = len(shapes[query]) == 3  # (in, heads, head_dim)
    (rows, width), (key_rows, _) = (
        (shapes[name][1] * shapes[name][2], shapes[name][0]) if bare else shapes[name] for name in (query, key)
    )
    heads = stated.separate(query, stage, rows // parts, key_rows, None if model_type in KNOWN else width)
    return (
        blocks(query, heads.dim, parts, 0, 1, groups=heads.query)
        if parts > 1
        else blocks(query, heads.dim, heads.query, 0, heads.query, transposed=bare),
        blocks(key, heads.dim, heads.key, 0, heads.key, transposed=bare),
        heads,
    )


def _fused(stem: Stem, shapes: Shapes, model_type: str, stated: Stated, stage: int) -> _Layout | None:
    tensor = stem.tensor(stem.word)
    rows = [row for row in FUSED if row.word == stem.word and (not row.model_types or model_type in row.model_types)]
    if not rows:
        if stem.word == "in_proj":
            return None  # of a state-space layer, in every family but those registered
        raise UnsupportedArchitecture(
            f"{tensor} holds query and key together, and models of type {model_type!r} are not in the registry: the "
            "order of its rows is not known, and a guess would give wrong scores"
        )
    row = rows[0]
    heads = stated.fused(tensor, stage, shapes[tensor][1 if row.transposed else 0])
    return *arranged(row.order, tensor, heads, row.transposed), heads


def _latent(stem: Stem, shapes: Shapes, model_type: str, stated: Stated, stage: int) -> _Layout:
    names = [stem.tensor(word) for word in ("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj")]
    if model_type not in KNOWN or any(n not in shapes for n in names[1:]):
        raise UnsupportedArchitecture(
            f"{stem.path} has latent attention, and models of type {model_type!r} are not in the registry"
        )
    query = stem.tensor(stem.word)
    count = stated.query_heads(query, stage)
    widths = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    nope, rope, value = (next(iter(stated.values([word], stage)), 0) for word in widths)
    dim = nope + rope
    if shapes[query][0] != count * dim or shapes[names[2]][0] != count * (nope + value):
        raise UnsupportedArchitecture(f"{stem.path}: the shapes of its latent attention are not those of its config")
    low, rank = stem.word in LATENT, shapes[names[1]][0] - rope
    queries = torch.arange(count * dim, device="cpu")
    keys = torch.arange(count * (nope + value), device="cpu").view(count, -1)[:, :nope].flatten()
    return (
        latent(query, names[0], dim, queries, shapes[names[0]][0], heads=count)
        if low
        else blocks(query, dim, count, 0, count),
        latent(names[2], names[1], dim, keys, rank, torch.arange(rank, rank + rope, device="cpu"), count),
        Heads(count, count, dim),
    )


def part_of(root: Config, stem: Stem) -> Config:
    """Return the part of the config for the stem's tower, else the root."""
    for key in (f"{stem.tower}_config", f"{stem.tower}_encoder", stem.side):
        part = root.get(key)
        if isinstance(part, Mapping):
            return cast(Config, part)
    part = root.get("text_config")
    stated = Stated(root, stem.side)
    if isinstance(part, Mapping) and not stated.values(stated.query_words, 0):
        return cast(Config, part)
    return root


def ordered(pairs: Pairs, shapes: Shapes, config: Config) -> tuple[Place, ...]:
    """Name the towers, number the layers, and sort the places by both; raises for what is unknown."""
    if unknown := next((place for _, place in pairs if isinstance(place, UnsupportedArchitecture)), None):
        raise unknown
    known = cast("list[tuple[Stem, Place]]", pairs)
    if not known:
        near = sorted(
            {re.sub(r"\d+", "*", name) for name in shapes if re.search(r"att|query|qkv", name, re.IGNORECASE)}
        )
        names = f"names with attention in them: {preview(near, 6)}" if near else "no name speaks of attention"
        if any(name.endswith((".qweight", ".quant_state", ".SCB")) for name in shapes):
            names = "its weights are quantised in a format that is not read; GGUF is"
        raise UnsupportedArchitecture(
            f"no queries and keys that are known (model type {config.get('model_type')!r}; {names})"
        )

    def label(stem: Stem) -> str:
        several = len({other.side for other, _ in known if other.tower == stem.tower}) > 1
        return f"{stem.tower} {stem.side if several else ''}".strip()

    single = len({label(stem) for stem, _ in known}) == 1
    named = [(stem, replace(place, tower="" if single else label(stem))) for stem, place in known]
    named.sort(key=lambda pair: (pair[0].tower, pair[0].side == "decoder", pair[1].kind == "cross", _natural(pair[0])))
    result: list[Place] = []
    for _, group in groupby(named, key=lambda pair: (pair[1].tower, pair[1].kind)):
        places = [place for _, place in group]
        if len({place.layer for place in places}) < len(places):  # stages of layers: number them through
            places = [replace(place, layer=index) for index, place in enumerate(places)]
        result += places
    return tuple(result)


def lacking(places: Sequence[Place], shapes: Shapes, config: Config) -> str | None:
    """Say which queries and keys a checkpoint lacks that its other tensors and its config ask for; None if none."""
    modules: dict[str, dict[str, set[str]]] = {}  # of each pattern of paths: its paths, with their tensors
    lists: dict[str, set[int]] = {}
    for name in shapes:
        path, _, leaf = name.removesuffix(".weight").rpartition(".")
        modules.setdefault(re.sub(r"\b\d+\b", "*", path), {}).setdefault(path, set()).add(leaf)
        for part in re.finditer(r"(?:^|\.)(\d+)(?=\.)", name):
            lists.setdefault(name[: part.start()], set()).add(int(part[1]))
    deepest: dict[int, tuple[int, str, list[int]]] = {}
    for place in places:
        kin = modules.get(re.sub(r"\b\d+\b", "*", place.name), {})
        leaves = {tensor.removesuffix(".weight").removeprefix(f"{place.name}.") for tensor in place.tensors}
        leaves |= set() if place.name.rpartition(".")[2].isdigit() else kin.get(place.name, set())
        torn = [path for path in kin if path not in {other.name for other in places} and kin[path] & leaves]
        if torn:
            return f"{torn[0]} has {preview(sorted(kin[torn[0]]), 3)} without the queries or keys beside them"
        numbers = list(re.finditer(r"(?:^|\.)(\d+)(?=\.|$)", place.name))
        if len(numbers) == 1 and (there := lists.get(prefix := place.name[: numbers[0].start()])):
            if gone := sorted(set(range(max(there))) - there):
                return f"there is nothing of {prefix}.{gone[0]}, but of {prefix}.{max(there)}"
            part = part_of(config, Stem(place.name, "", ""))
            depths = Stated(part, "").values(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 0)
            deepest[id(part)] = max(deepest.get(id(part), (0, "", [])), (len(there), prefix, depths))
    short = next(((n, path, depths) for n, path, depths in deepest.values() if depths and n < depths[0]), None)
    return None if short is None else f"{short[1]} has {short[0]} layers, and the config asks for {short[2][0]}"


def _natural(stem: Stem) -> list[tuple[bool, int, str]]:
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in stem.path.split(".")]
