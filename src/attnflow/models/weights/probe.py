"""The probe: finds which weights make an attention module's queries and keys, by running it, without tables.

Every submodule's output is replaced by noise, one batch of single tokens; norms become the identity and rotations are
off. Each component of a query or key at the attention interface is then, up to a factor, one component of some output,
which the noise identifies. `projections_in` stops there, for biases. `weights_in` follows linear maps down to rows of
weights, for geometry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnflow.models.loading.offload import parameter_of
from attnflow.models.weights.families.rows import Composed, Piece, Selected, run_of, same
from attnflow.models.weights.noise import TOKENS, NoiseTrace

OTHER_SEQUENCE: Final = "it attends to another sequence in the same call"
_COSINE: Final = 0.9999  # of the same numbers up to a factor, rounded to bfloat16; of others about 0.9 at most
_ROWS: Final = 2048  # components that are compared at a time
_LINEAR: Final = 0.01  # of its size a result may be off that of its weight: rounding, of bfloat16 at most


@dataclass(frozen=True, eq=False)
class Columns:
    """All heads' queries, or keys, as components of submodules' outputs.

    `index` is each component's place in the outputs side by side; `span` is the same as a slice, if contiguous.
    """

    paths: tuple[str, ...]
    index: Int[Tensor, " width"]
    span: slice | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "span", run_of(self.index))

    def take(self, outputs: Mapping[str, Tensor]) -> Float[Tensor, "batch tokens width"]:
        """Select the vectors from the outputs by path, each [batch, tokens, features]."""
        parts = [outputs[path] for path in self.paths]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if self.span is not None:
            return whole[..., self.span]
        return whole.index_select(-1, self.index.to(whole.device))


@dataclass(frozen=True, eq=False)
class Projections:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    query: Columns
    key: Columns
    hidden_size: int | None  # the width of what the module reads; None if it reads no vectors


def projections_in(trace: NoiseTrace) -> Projections | str:
    if not trace.calls:
        return trace.why
    query, key = trace.calls[-1]
    if any(heads.shape[0] * heads.shape[2] != TOKENS for heads in (query, key)):
        return f"{OTHER_SEQUENCE}, from {query.shape[2]} to {key.shape[2]} positions when the model reads one token"
    sides: list[Columns] = []
    for side, heads in (("queries", query), ("keys", key)):
        match = recognise(heads.transpose(1, 2).reshape(TOKENS, -1), trace.outputs)
        if match is None:
            return f"its {side} are more than components of what its submodules put out, normed and rotated"
        twice = next((path for path in match[0].paths if len(trace.inputs[path]) > 1), None)
        if twice is not None:
            return f"its {side} come out of {twice}, which runs several times"
        sides.append(match[0])
    read = trace.arguments.get("hidden_states", next(iter(trace.arguments.values()), None))
    width = None if read is None else read.shape[1]
    return Projections(query.shape[1], key.shape[1], query.shape[3], sides[0], sides[1], width)


def recognise(vectors: Float[Tensor, "tokens width"], outputs: Mapping[str, Tensor]) -> tuple[Columns, Tensor] | None:
    """Match vectors with components of the outputs, [tokens, features] by name, and factors [width]; None without."""
    widths = {path: output.shape[-1] for path, output in outputs.items()}
    if not widths:
        return None
    exact = torch.promote_types(vectors.dtype, torch.float32)
    vectors = vectors.to(exact)
    pool = torch.cat([output.to(vectors) for output in outputs.values()], dim=1)
    normed, sizes = nn.functional.normalize(pool, dim=0), pool.square().sum(0)
    parts = nn.functional.normalize(vectors, dim=0).split(_ROWS, dim=1)
    with torch.autocast(vectors.device.type, enabled=False):  # products in bfloat16 would blur the cosines
        best = [(part.T @ normed).abs().max(dim=1) for part in parts]
    if not all(bool((part.values >= _COSINE).all()) for part in best):  # of NaN, too
        return None
    index = torch.cat([part.indices for part in best])
    factors = (vectors * pool[:, index]).sum(0) / sizes[index]
    index = index.cpu()
    paths: list[str] = []
    placed, start, offset = torch.full_like(index, -1), 0, 0
    for path, width in widths.items():  # those that are used, side by side
        inside = (index >= start) & (index < start + width)
        if inside.any():
            paths.append(path)
            placed[inside] = index[inside] - start + offset
            offset += width
        start += width
    return Columns(tuple(paths), placed), factors.cpu()


class NotLinear(Exception):
    pass


@dataclass(frozen=True, eq=False)
class ProbedWeights:
    """One module's queries and keys as weights on the tokens that it reads."""

    query_rows: Selected | Composed
    key_rows: Selected | Composed
    num_heads: int
    num_kv_heads: int


def weights_in(modules: Mapping[str, nn.Module], traces: Mapping[str, NoiseTrace]) -> dict[str, ProbedWeights | str]:
    """Derive the weights of modules in running order, or why not; who attends to earlier keys gets their weights."""
    result: dict[str, ProbedWeights | str] = {}
    for name, module in modules.items():
        earlier = {traces[other]: read for other, read in result.items() if isinstance(read, ProbedWeights)}
        result[name] = _weights(_Reader(module, name, traces[name]), traces[name], earlier)
    return result


def _weights(reader: _Reader, trace: NoiseTrace, earlier: Mapping[NoiseTrace, ProbedWeights]) -> ProbedWeights | str:
    if not trace.calls:
        return trace.why
    query, key = trace.calls[0]
    if any(q.shape[1:2] + q.shape[3:] != query.shape[1:2] + query.shape[3:] for q, _ in trace.calls):
        return "it calls the attention interface several times, with heads of several shapes"
    if query.shape[1] % key.shape[1] or query.shape[3] != key.shape[3]:
        return (
            f"its {query.shape[1]} query heads of {query.shape[3]} do not share its {key.shape[1]} key heads of "
            f"{key.shape[3]}"
        )
    shared = next((read for other, read in earlier.items() if torch.equal(other.calls[0][1].to(key.device), key)), None)
    rows: list[Selected | Composed] = []
    for side, heads in zip(("queries", "keys"), zip(*trace.calls, strict=True), strict=True):
        try:
            rows.append(shared.key_rows if shared and side == "keys" else reader.weight(heads))
        except NotLinear as error:
            return f"its {side} {error}"
    return ProbedWeights(rows[0], rows[1], query.shape[1], key.shape[1])


class _Reader:
    def __init__(self, module: nn.Module, name: str, trace: NoiseTrace) -> None:
        self._module, self._name, self._trace = module, name, trace

    def weight(self, heads: Sequence[Tensor]) -> Selected | Composed:
        """Find the map to the heads, [batch, heads, positions, head_dim], over all calls."""
        head_dim = heads[0].shape[3]
        parts = [part.transpose(1, 2).flatten(2) for part in heads]  # [batch, positions, width]
        tokens = sum(part.shape[0] * part.shape[1] for part in parts)
        if tokens == TOKENS:
            return self._simple(self._map(torch.cat([part.flatten(0, 1) for part in parts]), head_dim))
        if any(part.shape[0] != TOKENS for part in parts):
            raise NotLinear(f"are of {tokens} positions when it reads {TOKENS} tokens")
        maps = [self._simple(self._map(part[:, at], head_dim)) for part in parts for at in range(part.shape[1])]
        if any(not same(other, maps[0]) for other in maps):
            raise NotLinear(f"are made in {len(maps)} ways, such as of other tokens or for several softmaxes")
        return maps[0]

    def _map(self, vectors: Float[Tensor, "tokens width"], head_dim: int, outer: bool = True) -> Composed:
        outputs = self._trace.outputs
        match = recognise(vectors, outputs)
        if match is None:
            raise NotLinear("are sums, products or mixtures of what its submodules put out, so no weight makes them")
        columns, scales = match
        factors = _distinct(scales, vectors.dtype, outer)
        pieces: list[Piece] = []
        start = 0
        for path in columns.paths:
            end = start + outputs[path].shape[1]
            place = ((columns.index >= start) & (columns.index < end)).nonzero().flatten()
            index = columns.index[place] - start
            inner = self._linear(path, index, head_dim) or self._through(path, index, head_dim)
            weights = None if factors is None else factors[place]
            pieces += [_placed(piece, place, weights) for piece in inner.pieces]
            start = end
        return Composed(head_dim, tuple(pieces))

    def _linear(self, path: str, index: Tensor, head_dim: int) -> Composed | None:
        """Return rows of a submodule's weight, if its output is that weight times its input."""
        part, result = self._module.get_submodule(path), self._trace.results[path]
        reads = self._trace.inputs[path]
        weight, bias = getattr(part, "weight", None), getattr(part, "bias", None)
        if not isinstance(weight, nn.Parameter) or weight.ndim < 2 or not weight.is_floating_point():
            return None
        weight, bias = parameter_of(part, "weight"), parameter_of(part, "bias") if isinstance(bias, Tensor) else None
        matrix, transposed = weight.detach().flatten(1), False
        if hasattr(part, "nf"):  # Conv1D of transformers, stored (in, out)
            matrix, transposed = matrix.T, True
        if any(matrix.shape != (result.shape[1], read.shape[1]) for read in reads):
            return None
        exact = torch.promote_types(matrix.dtype, torch.float32)
        expected = reads[0].to(exact) @ matrix.to(result.device, exact).T
        expected += 0 if bias is None else bias.detach().to(result.device)
        if not float((expected - result).norm()) <= _LINEAR * float(result.norm()):
            return None
        inputs = [self._input(read) for read in reads]
        if any(not same(other, inputs[0]) for other in inputs):
            raise NotLinear(f"come out of {path}, which runs several times, on more than tokens")
        rows = Selected(f"{self._name}.{path}.weight".lstrip("."), head_dim, index, transposed)
        return Composed(head_dim, (Piece(rows, torch.arange(len(index)), None, inputs[0]),))

    def _through(self, path: str, index: Tensor, head_dim: int) -> Composed:
        """Follow a submodule that only hands on another's output, such as a wrapper or dropout."""
        part = type(self._module.get_submodule(path)).__name__
        others = {name: output for name, output in self._trace.outputs.items() if name != path}
        if recognise(self._trace.results[path][:, index], others) is None:
            raise NotLinear(f"come out of {path} ({part}), which is not a linear map of output token")
        return self._map(self._trace.results[path][:, index], head_dim, outer=False)

    def _input(self, read: Float[Tensor, "tokens features"]) -> Composed | None:
        """Return the map to a submodule's input; None if that is the token itself."""
        arguments = self._trace.arguments
        match = recognise(read, arguments)
        if match is None:
            return self._map(read, 1, outer=False)
        columns, scales = match
        if len(columns.paths) != 1 or not torch.equal(
            columns.index, torch.arange(arguments[columns.paths[0]].shape[1])
        ):
            raise NotLinear("are made of a part of the token")
        if _distinct(scales, read.dtype, outer=True) is not None:
            raise NotLinear("are made of a token whose components are weighted")
        return None

    def _simple(self, composed: Composed) -> Selected | Composed:
        if len(composed.pieces) == 1 and composed.pieces[0].input is None and composed.pieces[0].factors is None:
            return composed.pieces[0].rows
        return composed


def _placed(piece: Piece, place: Tensor, factors: Tensor | None) -> Piece:
    product = piece.factors
    if factors is not None:
        product = factors[piece.place] if product is None else product * factors[piece.place]
    return Piece(piece.rows, place[piece.place], product, piece.input)


def _distinct(factors: Tensor, dtype: torch.dtype, outer: bool) -> Tensor | None:
    """Return the factors, or None if all are 1 or, in an outer map, equal: scores ignore a scale."""
    rounding = 1e-5 if torch.finfo(dtype).eps < 1e-6 else 0.03
    common = factors.mean() if outer else torch.ones((), dtype=factors.dtype)
    return None if bool(((factors - common).abs() <= rounding * common.abs()).all()) else factors
