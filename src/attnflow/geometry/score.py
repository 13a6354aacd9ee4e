"""`score` and `survey`: symmetry and directionality of every layer and head of one or more models."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

import torch
from torch import nn

from attnflow._core.checks import integer, preview
from attnflow._core.errors import AttnflowError, UnsupportedArchitecture
from attnflow._core.progress import Progress
from attnflow._core.results import Result
from attnflow.geometry.fold import NormPass, NotFolded, Pair, folded, norms_of, pass_of, told
from attnflow.geometry.in_use import InUse, measure
from attnflow.geometry.rotary import Rotary, rotary_of
from attnflow.geometry.scores import Mode, check_reading, full_scores, head_scores
from attnflow.geometry.table import AtDistance, GeometryScores, MatrixScores, rows_of
from attnflow.models.subject import Loaded, Subject, Text
from attnflow.models.weights.attention import AttentionLayer, attention_layers, stored_layers
from attnflow.models.weights.checkpoints import BadCheckpoint, Weights, open_weights

Attention = Literal["self", "cross", "all"]
Source = nn.Module | Loaded | str | os.PathLike[str]

_LOG: Final = logging.getLogger("attnflow.geometry")
_SHARED: Final = "layers share their weights: each set of weights is scored once"


def score(
    source: Source,
    gamma: float = 2.0,
    mode: Mode = "excess",
    per_head: bool = True,
    attention: Attention = "self",
    *,
    fold: bool = True,
    distances: Sequence[int] = (),
    inputs: Text | None = None,
    config: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> GeometryScores:
    """Score symmetry and directionality of M = W_q^T W_k in every layer and head of a model (geometry, sec. 3).

    Only the queries and keys are read, one layer at a time: slices of safetensors files (those of a model on the hub
    are downloaded first), dequantised GGUF tensors. No code of a checkpoint is run and no pickle is opened. M contains
    no biases, rotary embeddings and 1/sqrt(head_dim), and gains of norms only with `fold`. With latent attention
    (DeepSeek), queries and keys are the products of their low-rank factors, without the norm between them.

    A model in memory is probed: noise in place of the submodules' outputs shows the rows of weights that make an
    attention module's queries and keys. A layer that attends to the keys of an earlier layer is scored with those. For
    files, tables of model families say where queries and keys are.

    With `fold`, gains of the norms around queries and keys are part of M, and the mean that a norm takes away is not:
    it is then the form of normed tokens that the model computes. The norm is the one that puts out what the weights
    read, in the same layer or the one before. A model in memory shows it when it reads a few tokens, or `inputs`; for
    files, tables of families name it. A layer whose norms are not known is scored as stored, flagged "not folded", and
    the notes say why. The published scores are of weights as stored.

    With `inputs`, the model reads them, and every row of self-attention also says how symmetric and directional it is
    among these tokens. Over all pairs of two tokens i and j that meet in a sequence, and with row-centred scores,

        S in use = sum s_ij s_ji / sum s_ij^2,   s_ij = q_i . (k_j - mean k)

    of the model's own queries and keys, so that biases, positions and norms count. s_ji of a causal model, which it
    never computes, comes from the same queries and keys. D in use is D of M with each row weighted by the root mean
    square of its coordinate in the queries' tokens and with the keys' tokens by their covariance, and columns the other
    way round. Both are S and D of the weights where the tokens are white (`docs/maths.md`, "Geometry in use").

    Args:
        source: a torch module, a model folder, a safetensors or GGUF file, or the id of a model on the hub.
        gamma: threshold of directionality, in standard deviations above the mean.
        mode: definition of directionality: "excess" (as the published numbers) or "norm" (as def. 3.2).
        per_head: whether to score every head as well as the full matrix.
        attention: "self", "cross" (the decoder's attention to the encoder) or "all".
        fold: whether to fold gains of norms into the weights; False scores them as stored, as was published.
        distances: numbers of places between a query and a key before it, at which `by_distance` of each row has the
            symmetry and norm of W_q^T R_{-r} W_k with the rotation of a model in memory.
        inputs: what a model in memory reads, to score its geometry in use: a text, token ids, or named inputs, also of
            several sequences with their attention_mask.
        config: entries that replace or complete config.json, such as `{"num_attention_heads": 12}`.
        progress: called as progress(done, total, layer name) after each layer.

    Returns:
        A row for each full matrix and, with `per_head`, one for each head.

    Raises:
        FileNotFoundError: the file, folder or model does not exist.
        BadCheckpoint: a file is damaged, incomplete, in an unsupported format, or holds NaN or Inf.
        UnsupportedArchitecture: the queries and keys are unknown, do not fit the config, or are not linear functions of
            a token; the model does not have the requested kind of attention, or no rotary positions for `distances`.
        MissingExtra: a package that reads this source is not installed.
        ValueError: inputs or distances for a model that is not in memory, or inputs without two tokens that meet.

    Cost: it reads the queries and keys once, with memory for one layer in float32. A probe is one forward pass of 16
    tokens, once for each model, and so is what `fold` and `distances` need. Each distance takes as long as the scores
    without one. `inputs` of n tokens take a forward pass, 8 n^2 head_dim multiplications a head, and
    memory for blocks of 2 million scores.
    """
    check_reading(gamma, mode)
    distances = [integer("distances", distance, 0) for distance in distances]
    more = (gamma, mode, per_head, attention, fold, distances, inputs, config, progress)
    if not isinstance(source, str | os.PathLike):
        subject = Subject.of(source).inside
        if subject.sharded_by not in ("", "FSDP2") and (inputs is not None or distances):
            subject.require_whole("a score with inputs or distances")  # no pass of it shows whole queries and keys
        if "FullyShardedDataParallel" in subject.sharded_by:
            subject.require_whole("a score", "score a checkpoint, or shard with fully_shard")
        return subject.on_every_rank("af.geometry.score", lambda _: _score(subject, *more))
    if inputs is not None or distances:
        what = "distances" if inputs is None else "inputs"
        raise ValueError(f"{what} need a model in memory, got {source!r}: pass af.load_model({str(source)!r})")
    return _score(source, *more)


def _score(
    source: Subject | str | os.PathLike[str],
    gamma: float,
    mode: Mode,
    per_head: bool,
    attention: Attention,
    fold: bool,
    distances: Sequence[int],
    inputs: Text | None,
    config: Mapping[str, object] | None,
    progress: Progress | None,
) -> GeometryScores:
    subject = source if isinstance(source, Subject) else None
    weights, layers = layers_of(source.model if isinstance(source, Subject) else source, attention, config)
    used: Mapping[str, list[InUse]] = {}
    seen: NormPass | NotFolded | None = None
    rotary: dict[str, Rotary] = {}
    unturned: list[str] = []
    if subject is not None:
        if fold or distances:
            seen = pass_of(subject, layers, inputs)
        if distances:
            rotary, unturned = _rotations(subject, layers, cast(Any, seen))
        if inputs is not None:
            used = measure(subject, layers, inputs, gamma, mode)
    norms = norms_of(weights, layers, seen) if fold else {}
    rows: list[MatrixScores] = []
    for done, layer in enumerate(layers, 1):
        try:
            made = layer_scores(layer, gamma, mode, per_head, norms.get(layer.name))
            if layer.name in used:
                made = [replace(row, in_use=in_use) for row, in_use in zip(made, used[layer.name], strict=False)]
            if layer.name in rotary:
                made = _by_distance(made, layer, norms.get(layer.name), rotary[layer.name], distances)
            rows += made
        except ValueError as error:
            raise BadCheckpoint(f"{layer.name}: {error}") from error
        if progress is not None:
            progress(done, len(layers), layer.name)
    name = weights.name if subject is None else subject.name
    if isinstance(source, str) and not Path(source).expanduser().exists():
        name = source  # a short name or an id says more than the file or the cached copy that it led to
    notes: list[str] = []
    if guessed := [layer for layer in layers if layer.discovered]:
        kind = weights.config.get("model_type")
        what = (
            f"models of type {kind!r} are not in the registry" if kind else "the model does not say of which type it is"
        )
        part = f" of the {guessed[0].tower} tower" if len(guessed) < len(layers) else ""
        notes.append(f"{what}: queries and keys{part} were found by their names and shapes")
    depth = weights.config.get("num_hidden_layers")
    if weights.config.get("model_type") == "albert" and isinstance(depth, int) and depth > len(layers):
        notes.append(_SHARED)
    return GeometryScores(name, tuple(rows), gamma, mode, (*notes, *told(norms), *unturned), fold)


def layer_scores(
    layer: AttentionLayer, gamma: float, mode: Mode, per_head: bool, norms: Pair | NotFolded | None = None
) -> list[MatrixScores]:
    """Score the full matrix of one layer and, with `per_head`, each head; `ValueError` for NaN or Inf."""
    query, key = folded(layer, norms)
    arguments = (query, key, layer.num_heads, layer.num_kv_heads, gamma, mode)
    about = (query.shape[1], not isinstance(norms, NotFolded))
    rows = rows_of(layer, full_scores(*arguments), *about)
    return rows + rows_of(layer, head_scores(*arguments), *about) if per_head else rows


def _rotations(
    subject: Subject, layers: Sequence[AttentionLayer], seen: NormPass | NotFolded
) -> tuple[dict[str, Rotary], list[str]]:
    """The rotation of each layer, and why others have none, such as those without positions between rotary ones."""
    found: dict[str, Rotary] = {}
    why: dict[str, UnsupportedArchitecture] = {}
    for layer in layers:
        try:
            found[layer.name] = rotary_of(subject.model, layer, seen)
        except UnsupportedArchitecture as error:
            why[layer.name] = error
    if not found:
        raise next(iter(why.values()))
    return found, [f"no scores by distance for {preview(list(why), 2)}: {next(iter(why.values()))}"] if why else []


def _by_distance(
    rows: Sequence[MatrixScores],
    layer: AttentionLayer,
    norms: Pair | NotFolded | None,
    rotary: Rotary,
    distances: Sequence[int],
) -> list[MatrixScores]:
    query, key = folded(layer, norms)
    found: list[list[AtDistance]] = [[] for _ in rows]
    for distance in distances:
        arguments = (query, rotary.at(key, layer.head_dim, distance), layer.num_heads, layer.num_kv_heads)
        parts = [full_scores(*arguments), *([head_scores(*arguments)] if len(rows) > 1 else [])]
        symmetry, norm = (
            torch.cat([each.reshape(-1) for each in sides]).tolist()
            for sides in zip(*((part.symmetry, part.norm) for part in parts), strict=True)
        )
        for row, values in zip(found, zip(symmetry, norm, strict=True), strict=True):
            row.append(AtDistance(distance, *values))
    return [replace(row, by_distance=tuple(each)) for row, each in zip(rows, found, strict=True)]


def layers_of(
    source: Source, attention: Attention = "self", config: Mapping[str, object] | None = None
) -> tuple[Weights, list[AttentionLayer]]:
    """Open a model and list its layers, whose `query()` and `key()` read weights in float32."""
    check_attention(attention)
    weights = open_weights(source.model if isinstance(source, Loaded) else source)
    layers = [layer for layer in stored_layers(weights, config) if attention in ("all", layer.kind)]
    if not layers:
        raise UnsupportedArchitecture(
            f'{weights.name} has no {attention}-attention: attention="all" scores what it has'
        )
    return weights, layers


@dataclass(frozen=True)
class GeometrySurvey(Result):
    """The scores of several models.

    Attributes:
        models: the scores of each model that could be scored, under the given name.
        unscored: for each other model, by name, why it could not be scored.
    """

    models: tuple[GeometryScores, ...]
    unscored: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether every model was scored."""
        return not self.unscored

    def rows(self) -> list[Mapping[str, object]]:
        """The rows of all scored models."""
        return [row for model in self.models for row in model.rows()]


def survey(
    sources: Sequence[str],
    gamma: float = 2.0,
    mode: Mode = "excess",
    per_head: bool = True,
    attention: Attention = "self",
    *,
    fold: bool = True,
    config: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> GeometrySurvey:
    """Score each model once, with the arguments of `score`; one that fails is listed in `unscored`."""
    check_reading(gamma, mode)
    check_attention(attention)
    models: list[GeometryScores] = []
    unscored: dict[str, str] = {}
    distinct = list(dict.fromkeys(sources))
    for number, name in enumerate(distinct, 1):
        which = f"{name} (model {number} of {len(distinct)})" if len(distinct) > 1 else name

        def tell(done: int, total: int, layer: str, which: str = which) -> None:
            if progress is not None:
                progress(done, total, f"{which}: {layer}")

        tell(0, 1, "opening")
        try:
            scores = score(name, gamma, mode, per_head, attention, fold=fold, config=config, progress=tell)
        except (AttnflowError, OSError, ValueError, MemoryError) as error:
            unscored[name] = str(error) or type(error).__name__
        except Exception as error:  # a defect of ours must not lose the models before and after it
            if os.environ.get("ATTNFLOW_TRACEBACK"):
                raise
            unscored[name] = f"unexpected {type(error).__name__}: {error}; ATTNFLOW_TRACEBACK=1 shows where"
        else:
            models.append(replace(scores, model=name))
    return GeometrySurvey(tuple(models), unscored)


def check_attention(attention: str) -> None:
    if attention not in get_args(Attention):
        raise ValueError(f'attention must be "self", "cross" or "all", got {attention!r}')


def layers_in_memory(model: nn.Module | Loaded, attention: Attention = "self") -> list[AttentionLayer]:
    """List the layers of one kind of attention of a model in memory, without its wrappers."""
    check_attention(attention)
    subject = Subject.of(model).inside
    layers = [layer for layer in attention_layers(subject) if attention in ("all", layer.kind)]
    if not layers:
        raise UnsupportedArchitecture(f"the model has no {attention}-attention to score")
    if any(layer.discovered for layer in layers):
        _warn_discovered(subject.kind)
    return layers


@lru_cache
def _warn_discovered(model: str) -> None:
    """Warn once for each type of model, since a penalty asks at every step."""
    _LOG.warning("%s is not in the registry: queries and keys were found by their names and shapes", model)
