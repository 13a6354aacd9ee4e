"""`score`: symmetry and directionality of every layer and head of a checkpoint, reading no more of it than it needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal, cast

from torch import nn

from attnflow._core.checks import preview
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.geometry.factored import full_scores, head_scores
from attnflow.geometry.scores import Mode, check_reading
from attnflow.geometry.table import GeometryScores, MatrixScores, rows_of
from attnflow.models.checkpoints import BadCheckpoint, Weights, open_weights
from attnflow.models.families.find import Place, find
from attnflow.models.families.heads import UnknownHeads
from attnflow.models.families.table import is_query_or_key
from attnflow.models.query_key import QueryKey

Attention = Literal["self", "cross", "all"]
Source = nn.Module | str | os.PathLike[str]
DISCOVERED: Final = "discovered"  # found by names and shapes alone
_SHARED: Final = "layers share their weights: each set of weights is scored once"


def score(
    source: Source,
    gamma: float = 2.0,
    mode: Mode = "excess",
    per_head: bool = True,
    attention: Attention = "self",
    *,
    config: Mapping[str, object] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> GeometryScores:
    """Symmetry and directionality of M = W_q^T W_k in every layer of a model, and in every head (geometry, sec. 3).

    Only the queries and keys are read, one layer at a time: slices of safetensors files, ranges of files on the hub,
    dequantised GGUF tensors, `.bin` files opened as tensors alone. No code of a checkpoint is run. Biases, rotations by
    position, gains of norms and 1/sqrt(head_dim) have no part in M. With latent attention (DeepSeek), queries and keys
    are the products of their low-rank factors, without the norm between them.

    Args:
        source: a torch module; a folder that holds a model; a file of safetensors, GGUF, `.bin` or `.pt`; or the id of
            a model on the hub.
        gamma: threshold of directionality, in standard deviations above the mean.
        mode: reading of directionality: "excess" (as the published numbers) or "norm" (as def. 3.2).
        per_head: whether to score every head beside the full matrix.
        attention: "self", "cross" (the decoder's attention to the encoder) or "all".
        config: entries that replace those of config.json, such as `{"num_attention_heads": 12}` if there is none.
        progress: called after each layer with how many are done, how many there are, and the name of the layer.

    Returns:
        A row for each full matrix and, with `per_head`, one for each head.

    Raises:
        FileNotFoundError: there is no such file, folder or model.
        BadCheckpoint: a file is damaged, incomplete or holds NaN or Inf, or is in a form that is not opened.
        UnsupportedArchitecture: no queries and keys are known, or they do not fit the config; or the model has none of
            the kind of attention that was asked for.
        MissingExtra: a package that reads this source is not installed.

    Cost: reads the queries and keys once; memory for those of one layer in float32 and their scores.
    """
    check_reading(gamma, mode)
    if attention not in ("self", "cross", "all"):
        raise ValueError(f'attention must be "self", "cross" or "all", got {attention!r}')
    weights = open_weights(source)
    places = _places(weights, {**weights.config, **(config or {})}, attention)
    rows: list[MatrixScores] = []
    for done, place in enumerate(places, 1):
        rows += _rows(_load(weights, place), place, gamma, mode, per_head)
        if progress is not None:
            progress(done, len(places), place.name)
    # A short name or an id says more than the file or the cached copy that it led to.
    name = source if isinstance(source, str) and not Path(source).expanduser().exists() else weights.name
    return GeometryScores(name, tuple(rows), gamma, mode, _notes(weights, places))


def query_keys(
    source: Source, attention: Attention = "self", *, config: Mapping[str, object] | None = None
) -> Iterator[QueryKey]:
    """The queries and keys that `score` scores, in float32, read when they are asked for.

    Raises:
        As `score`.
    """
    weights = open_weights(source)
    for place in _places(weights, {**weights.config, **(config or {})}, attention):
        yield _load(weights, place)


def _places(weights: Weights, config: Mapping[str, object], attention: Attention) -> tuple[Place, ...]:
    packed = sorted(name for name in weights.packed if is_query_or_key(name))
    if packed:
        raise UnsupportedArchitecture(
            f"{weights.name}: the weights are quantised in a format that is not read ({preview(packed, 2)}); GGUF and "
            "8-bit floats are"
        )
    try:
        found = _found(weights, config)
    except UnsupportedArchitecture as error:
        raise UnsupportedArchitecture(f"{weights.name}: {error}") from error
    places = tuple(place for place in found if attention in ("all", place.kind))
    if not places:
        raise UnsupportedArchitecture(
            f'{weights.name} has no {attention}-attention; attention="all" takes what there is'
        )
    return places


def _found(weights: Weights, config: Mapping[str, object]) -> tuple[Place, ...]:
    try:
        return find(weights.shapes, config, weights.stated)
    except UnknownHeads:
        if not config.get("model_type") or find_spec("transformers") is None:
            raise
        complete = import_module("attnflow.models.config_defaults").complete_config(config)
        return find(weights.shapes, cast(Mapping[str, object], complete), weights.stated)


def _load(weights: Weights, place: Place) -> QueryKey:
    return QueryKey(
        place.layer,
        place.name,
        place.tower,
        place.kind,
        place.query.load(weights.read),
        place.key.load(weights.read),
        place.num_heads,
        place.num_kv_heads,
        place.head_dim,
    )


def _rows(loaded: QueryKey, place: Place, gamma: float, mode: Mode, per_head: bool) -> list[MatrixScores]:
    given = (loaded.query, loaded.key, loaded.num_heads, loaded.num_kv_heads, gamma, mode)
    try:
        rows = rows_of(loaded, full_scores(*given))
        if per_head:
            rows += rows_of(loaded, head_scores(*given))
    except ValueError as error:
        raise BadCheckpoint(f"{place.name}: {error}") from error
    return [replace(row, flags=(*row.flags, DISCOVERED)) for row in rows] if place.discovered else rows


def _notes(weights: Weights, places: tuple[Place, ...]) -> tuple[str, ...]:
    notes: list[str] = []
    if any(place.discovered for place in places):
        kind = weights.config.get("model_type")
        what = (
            f"models of type {kind!r} are not in the registry" if kind else "the model does not say of which type it is"
        )
        notes.append(f"{what}: queries and keys were found by their names and shapes")
    layers = weights.config.get("num_hidden_layers")
    if weights.config.get("model_type") == "albert" and isinstance(layers, int) and layers > len(places):
        notes.append(_SHARED)
    return tuple(notes)
