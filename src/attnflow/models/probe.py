"""What the queries and keys of an attention module are made of, seen by running it: no table of families.

What every submodule of an attention module puts out is replaced by noise, one batch of single tokens, and norms by the
identity; rotations by position do nothing at position 0. Each component of a query or key that arrives at the
attention interface then is, up to a factor, one component of some submodule's output, and the noise says which.
Separate, fused, interleaved, gated and latent layouts differ in the answer alone.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnflow.models.evaluation import REFUSALS, evaluating
from attnflow.models.families.rows import Rows
from attnflow.models.inputs import ordinary_tokens, sparing
from attnflow.models.interception import AttentionCall, Output, Proceed, intercept
from attnflow.models.sites import Site, models_around

_BATCH: Final = 16  # tokens, so many numbers by which a component is recognised
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
    around = models_around(model, sites)
    outputs = {site.name: dict[str, Tensor]() for site in sites}
    calls: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def watch(call: AttentionCall, proceed: Proceed) -> Output:
        calls[call.module] = call.query, call.key
        value = call.value[:, :, -1:].repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)
        return value.transpose(1, 2).expand(-1, call.query.shape[2], -1, -1), None

    why = "no call of it was seen when the model read one token"
    with evaluating(model), torch.no_grad(), _noise(sites, outputs):
        modules = [site.module for site in sites]
        interception = intercept(around, dict.fromkeys(modules, watch), role="bias", implementation="sdpa")
        try:
            (token,) = ordinary_tokens(around[0], 1)
            ids = torch.full((_BATCH, 1), token, device=next(around[0].parameters()).device)
            around[0](ids, **sparing(around[0]))
        except REFUSALS as error:  # one token of text alone is no input of some models
            why = f"the model did not run on one token ({type(error).__name__}: {error})"
        finally:
            interception.remove()
    return {
        site.name: _projections(*calls[site.module], outputs[site.name]) if site.module in calls else why
        for site in sites
    }


@contextmanager
def _noise(sites: Sequence[Site], outputs: Mapping[str, dict[str, Tensor]]) -> Generator[None]:
    """Noise for what every submodule puts out, noted in `outputs`, and the identity for norms."""
    generator = torch.Generator().manual_seed(0)

    def hook(site: str, path: str, norm: bool) -> Any:
        def replace(module: nn.Module, args: tuple[Any, ...], output: object) -> Tensor | None:
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return None
            if norm and args and isinstance(args[0], Tensor) and args[0].shape == output.shape:
                return args[0]
            if output.numel() != _BATCH * output.shape[-1]:  # not of one vector for each token
                return None
            outputs[site][path] = torch.randn(output.shape, generator=generator).to(output)
            return outputs[site][path]

        return replace

    handles = [
        part.register_forward_hook(hook(site.name, path, "norm" in f"{path} {type(part).__name__}".lower()))
        for site in sites
        for path, part in site.module.named_modules()
        if path
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _projections(query: Tensor, key: Tensor, outputs: Mapping[str, Tensor]) -> Projections | str:
    if query.shape[0] != _BATCH or query.shape[2] != 1 or key.shape[2] != 1:
        return f"it attends from {query.shape[2]} to {key.shape[2]} positions when the model reads one token"
    sides: list[Columns] = []
    for side, heads in (("queries", query), ("keys", key)):
        columns = _columns(heads.reshape(_BATCH, -1).float(), outputs)
        if columns is None:
            return f"its {side} are more than components of what its submodules put out, normed and rotated"
        sides.append(columns)
    return Projections(query.shape[1], key.shape[1], query.shape[3], *sides)


def _columns(heads: Tensor, outputs: Mapping[str, Tensor]) -> Columns | None:
    """Which components of the outputs the heads consist of; None if some are none of them."""
    widths = {path: output.shape[-1] for path, output in outputs.items()}
    if not widths:
        return None
    pool = torch.cat([output.reshape(_BATCH, -1).float().to(heads.device) for output in outputs.values()], dim=1)
    pool, heads = nn.functional.normalize(pool, dim=0), nn.functional.normalize(heads, dim=0)
    best = [(part.T @ pool).abs().max(dim=1) for part in heads.split(_ROWS, dim=1)]
    if min(float(one.values.min()) for one in best) < _COSINE:
        return None
    index = torch.cat([one.indices for one in best]).cpu()
    paths: list[str] = []
    placed, start, offset = torch.full_like(index, -1), 0, 0
    for path, width in widths.items():  # those that are used, side by side
        inside = (index >= start) & (index < start + width)
        if inside.any():
            paths.append(path)
            placed[inside] = index[inside] - start + offset
            offset += width
        start += width
    return Columns(tuple(paths), placed)
