"""The weights of queries and keys that no registry knows, from what noise shows of an attention module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnflow.models.families.rows import Composed, Piece, Selected
from attnflow.models.noise import TOKENS, Trace
from attnflow.models.probe import recognise

_LINEAR: Final = 0.01  # of its size a result may be off that of its weight: rounding, of bfloat16 at most


class NotLinear(Exception):
    """Queries or keys are no linear function of a token."""


@dataclass(frozen=True, eq=False)
class Weights:
    """The queries and keys of one attention module, as weights on the tokens that it reads."""

    query: Selected | Composed
    key: Selected | Composed
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Unread:
    """Why queries and keys of an attention module were not read."""

    why: str
    ran: bool  # whether the module was seen at work; otherwise nothing speaks against what its names suggest


def weights_of(modules: Mapping[str, nn.Module], traces: Mapping[str, Trace]) -> dict[str, Weights | Unread]:
    """What traces show of attention modules, in the order in which they run, by their paths in the model.

    A module that attends to the keys of an earlier one (shared key-value layers) has its weights for them.
    """
    result: dict[str, Weights | Unread] = {}
    for name, module in modules.items():
        earlier = {traces[other]: read for other, read in result.items() if isinstance(read, Weights)}
        result[name] = _weights(_Reader(module, name, traces[name]), traces[name], earlier)
    return result


def _weights(reader: _Reader, trace: Trace, earlier: Mapping[Trace, Weights]) -> Weights | Unread:
    if not trace.calls:
        return Unread(trace.why, ran=False)
    query, key = trace.calls[0]
    if any(q.shape[1:2] + q.shape[3:] != query.shape[1:2] + query.shape[3:] for q, _ in trace.calls):
        return Unread("it calls the attention interface several times, with heads of several shapes", ran=True)
    if query.shape[1] % key.shape[1] or query.shape[3] != key.shape[3]:
        return Unread(
            f"its {query.shape[1]} query heads of {query.shape[3]} do not share its {key.shape[1]} key heads of "
            f"{key.shape[3]}",
            ran=True,
        )
    shared = next((read for other, read in earlier.items() if _equal(other.calls[0][1], key)), None)
    try:
        queries = reader.weight("queries", [q for q, _ in trace.calls])
        keys = shared.key if shared else reader.weight("keys", [k for _, k in trace.calls])
    except NotLinear as error:
        return Unread(str(error), ran=True)
    return Weights(queries, keys, query.shape[1], key.shape[1], query.shape[3])


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.to(other.device), other)


class _Reader:
    """Reads the linear maps below one attention module."""

    def __init__(self, module: nn.Module, name: str, trace: Trace) -> None:
        self._module, self._name, self._trace = module, name, trace

    def weight(self, side: str, heads: Sequence[Tensor]) -> Selected | Composed:
        """The map to the heads, [batch, heads, positions, head_dim], of all calls of the attention interface."""
        try:
            return self._weight(heads, heads[0].shape[3])
        except NotLinear as error:
            raise NotLinear(f"its {side} {error}") from error

    def _weight(self, heads: Sequence[Tensor], head_dim: int) -> Selected | Composed:
        parts = [one.transpose(1, 2).flatten(2) for one in heads]  # [batch, positions, width]
        tokens = sum(part.shape[0] * part.shape[1] for part in parts)
        if tokens == TOKENS:
            return self._simple(self._map(torch.cat([part.flatten(0, 1) for part in parts]), head_dim))
        if any(part.shape[0] != TOKENS for part in parts):
            raise NotLinear(f"are of {tokens} positions when it reads {TOKENS} tokens")
        maps = [self._simple(self._map(part[:, at], head_dim)) for part in parts for at in range(part.shape[1])]
        if any(not _same(one, maps[0]) for one in maps):
            raise NotLinear(f"are made in {len(maps)} ways, such as of other tokens or for several softmaxes")
        return maps[0]

    def _map(self, vectors: Float[Tensor, "tokens width"], head_dim: int, outer: bool = True) -> Composed:
        outputs = self._trace.outputs
        match = recognise(vectors, outputs)
        if match is None:
            raise NotLinear(
                "are sums, products or mixtures of what its submodules put out, so that no one weight makes them"
            )
        factors = _distinct(match.factors, vectors.dtype, outer)
        pieces: list[Piece] = []
        start = 0
        for path in match.columns.paths:
            end = start + outputs[path].shape[1]
            place = ((match.columns.index >= start) & (match.columns.index < end)).nonzero().flatten()
            index = match.columns.index[place] - start
            inner = self._linear(path, index, head_dim) or self._through(path, index, head_dim)
            own = None if factors is None else factors[place]
            pieces += [_placed(piece, place, own) for piece in inner.pieces]
            start = end
        return Composed(head_dim, tuple(pieces))

    def _linear(self, path: str, index: Tensor, head_dim: int) -> Composed | None:
        """Rows of the weight of a submodule, if what it makes is that weight times what it reads."""
        part, result = self._module.get_submodule(path), self._trace.results[path]
        reads = self._trace.inputs[path]
        weight, bias = getattr(part, "weight", None), getattr(part, "bias", None)
        if not isinstance(weight, nn.Parameter) or weight.ndim < 2 or not weight.is_floating_point():
            return None
        matrix, transposed = weight.detach().flatten(1), False
        if hasattr(part, "nf"):  # Conv1D of transformers, stored (in, out)
            matrix, transposed = matrix.T, True
        if any(matrix.shape != (result.shape[1], read.shape[1]) for read in reads):
            return None
        exact = torch.promote_types(matrix.dtype, torch.float32)
        expected = reads[0].to(exact) @ matrix.to(exact).T + (bias.detach() if isinstance(bias, Tensor) else 0)
        if not float((expected - result).norm()) <= _LINEAR * float(result.norm()):
            return None
        inputs = [self._input(read) for read in reads]
        if any(not _same_input(one, inputs[0]) for one in inputs):
            raise NotLinear(f"come out of {path}, which runs several times, on more than tokens")
        rows = Selected(f"{self._name}.{path}.weight".lstrip("."), head_dim, index, transposed)
        return Composed(head_dim, (Piece(rows, torch.arange(len(index)), None, inputs[0]),))

    def _through(self, path: str, index: Tensor, head_dim: int) -> Composed:
        """What a submodule hands on of those below or before it, such as a wrapper, or dropout in evaluation."""
        part = type(self._module.get_submodule(path)).__name__
        others = {name: one for name, one in self._trace.outputs.items() if name != path}
        if recognise(self._trace.results[path][:, index], others) is None:
            raise NotLinear(f"come out of {path} ({part}), which is no linear map of one token")
        return self._map(self._trace.results[path][:, index], head_dim, outer=False)

    def _input(self, read: Float[Tensor, "tokens features"]) -> Composed | None:
        """The map to what a submodule reads; None if that is the token itself."""
        arguments = self._trace.arguments
        match = recognise(read, arguments)
        if match is not None:
            size = arguments[match.columns.paths[0]].shape[1]
            whole = len(match.columns.paths) == 1 and torch.equal(match.columns.index, torch.arange(size))
            if not whole:
                raise NotLinear("are made of a part of the token")
            if _distinct(match.factors, read.dtype, outer=True) is not None:
                raise NotLinear("are made of a token whose components are weighted")
            return None
        return self._map(read, 1, outer=False)

    def _simple(self, composed: Composed) -> Selected | Composed:
        """Rows of one weight where it is no more than that."""
        if len(composed.pieces) == 1 and composed.pieces[0].input is None and composed.pieces[0].factors is None:
            return composed.pieces[0].rows
        return composed


def _placed(piece: Piece, place: Tensor, factors: Tensor | None) -> Piece:
    """A piece of an inner whole, whose rows go to these places of the outer one."""
    own = piece.factors
    if factors is not None:
        own = factors[piece.place] if own is None else own * factors[piece.place]
    return Piece(piece.rows, place[piece.place], own, piece.input)


def _distinct(factors: Tensor, dtype: torch.dtype, outer: bool) -> Tensor | None:
    """The factors, unless all are 1, or are one that has no part in the scores, as that of 1/sqrt(head_dim)."""
    rounding = 1e-5 if torch.finfo(dtype).eps < 1e-6 else 0.03
    common = factors.mean() if outer else torch.ones((), dtype=factors.dtype)
    return None if bool(((factors - common).abs() <= rounding * common.abs()).all()) else factors


def _same(one: Selected | Composed, other: Selected | Composed) -> bool:
    """Whether two maps are of the same rows of the same weights."""
    if isinstance(one, Selected) and isinstance(other, Selected):
        return one.tensor == other.tensor and torch.equal(one.index, other.index)
    if not isinstance(one, Composed) or not isinstance(other, Composed) or len(one.pieces) != len(other.pieces):
        return False
    return all(
        _same(a.rows, b.rows) and torch.equal(a.place, b.place) and _same_input(a.input, b.input)
        for a, b in zip(one.pieces, other.pieces, strict=True)
    )


def _same_input(one: Composed | None, other: Composed | None) -> bool:
    return one is other if one is None or other is None else _same(one, other)
