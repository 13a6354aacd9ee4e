"""What the queries and keys of an attention module are made of, seen by running it: no table of families.

What every submodule of an attention module puts out is replaced by noise, one batch of single tokens, and norms by the
identity; rotations are switched off where the module is handed them, and do nothing at position 0. Each component of a
query or key that arrives at the attention interface then is, up to a factor, one component of some submodule's output,
and the noise says which. Separate, fused, interleaved, gated and latent layouts differ in the answer alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnflow.models.families.rows import Rows
from attnflow.models.noise import TOKENS, Trace, traces
from attnflow.models.sites import Site

_COSINE: Final = 0.9999  # of the same numbers up to a factor, rounded to bfloat16; of others about 0.9 at most
_ROWS: Final = 2048  # components that are compared at a time


@dataclass(frozen=True, eq=False)
class Columns:
    """The queries, or the keys, of all heads as components of what submodules of an attention module put out.

    Attributes:
        paths: of the submodules, below the attention module.
        index: for each component of each head, its place in their outputs side by side.
        span: that place where it is one run, so that nothing is copied.
    """

    paths: tuple[str, ...]
    index: Int[Tensor, " width"]
    span: slice | None = field(init=False)

    def __post_init__(self) -> None:
        first = int(self.index[0])
        run = torch.equal(self.index, torch.arange(first, first + len(self.index), device="cpu"))
        object.__setattr__(self, "span", slice(first, first + len(self.index)) if run else None)

    @classmethod
    def of_rows(cls, path: str, rows: Rows) -> Columns:
        """Where the registry says that the heads lie in a projection."""
        size = rows.groups * rows.blocks * rows.head_dim
        blocks = torch.arange(size, device="cpu").view(rows.groups, rows.blocks, rows.head_dim)  # under "meta", too
        return cls((path,), blocks[:, rows.start : rows.stop].flatten())

    def take(self, outputs: Mapping[str, Tensor]) -> Float[Tensor, "batch tokens width"]:
        """The vectors, from the output of each submodule by its path, [batch, tokens, features]."""
        parts = [outputs[path] for path in self.paths]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if self.span is not None:
            return whole[..., self.span]
        return whole.index_select(-1, self.index.to(whole.device))


@dataclass(frozen=True, eq=False)
class Projections:
    """The queries and keys of one attention module, as the attention interface sees them but for their rotation."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    query: Columns
    key: Columns


def probe(model: nn.Module, sites: Sequence[Site]) -> dict[str, Projections | str]:
    """The projections of each attention module, or why they cannot be told; the model is as it was.

    Cost: one forward pass of 16 sequences of one token, without a cache.
    """
    return {name: _projections(trace) for name, trace in traces(model, sites).items()}


def _projections(trace: Trace) -> Projections | str:
    if not trace.calls:
        return trace.why
    query, key = trace.calls[-1]
    if query.shape[0] != TOKENS or query.shape[2] != 1 or key.shape[2] != 1:
        return f"it attends from {query.shape[2]} to {key.shape[2]} positions when the model reads one token"
    sides: list[Columns] = []
    for side, heads in (("queries", query), ("keys", key)):
        match = recognise(heads.reshape(TOKENS, -1), trace.outputs)
        if match is None:
            return f"its {side} are more than components of what its submodules put out, normed and rotated"
        twice = next((path for path in match.columns.paths if len(trace.inputs[path]) > 1), None)
        if twice is not None:
            return f"its {side} come out of {twice}, which runs several times"
        sides.append(match.columns)
    return Projections(query.shape[1], key.shape[1], query.shape[3], *sides)


@dataclass(frozen=True, eq=False)
class Match:
    """Vectors that were recognised: of which components they are, and by which factor each was multiplied."""

    columns: Columns
    factors: Float[Tensor, " width"]


def recognise(vectors: Float[Tensor, "tokens width"], outputs: Mapping[str, Tensor]) -> Match | None:
    """Which components of the outputs, [tokens, features] by name, the vectors consist of; None if some are of none."""
    widths = {path: output.shape[-1] for path, output in outputs.items()}
    if not widths:
        return None
    exact = torch.promote_types(vectors.dtype, torch.float32)
    vectors = vectors.to(exact)
    pool = torch.cat([output.to(vectors) for output in outputs.values()], dim=1)
    normed, sizes = nn.functional.normalize(pool, dim=0), pool.square().sum(0)
    best = [(part.T @ normed).abs().max(dim=1) for part in nn.functional.normalize(vectors, dim=0).split(_ROWS, dim=1)]
    if not min(float(one.values.min()) for one in best) >= _COSINE:  # of NaN, too
        return None
    index = torch.cat([one.indices for one in best])
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
    return Match(Columns(tuple(paths), placed), factors.cpu())
