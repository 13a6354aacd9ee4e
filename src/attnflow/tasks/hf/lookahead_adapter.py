"""What lookahead adds to a frozen model: [MASK] vectors, and low-rank updates of layers for masked rows alone."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.sites import find_sites


class GatedAdapter(nn.Module):
    """Low-rank updates x A B of the linear maps of a model's layers, on the last rows of a pass (arXiv:2507.11851).

    Other rows are not touched, to the bit, and outside of `gate` no row is. B starts at zero, so that a masked row
    starts as what the model makes of a [MASK]; experts, which see tokens without their rows, have no update.

    Attributes:
        masks: the vectors of [MASK] 1..m after a token, in the model's embedding space.
        down: A of each linear map.
        up: B of each linear map.
    """

    def __init__(self, model: PreTrainedModel, drafts: int, rank: int, seed: int) -> None:
        super().__init__()
        embedding = cast(Tensor, next(model.get_input_embeddings().parameters())).detach()
        kind: dict[str, Any] = {
            "dtype": torch.promote_types(embedding.dtype, torch.float32),
            "device": embedding.device,
        }
        self.masks = nn.Parameter(embedding.to(kind["dtype"]).mean(dim=0).repeat(drafts, 1))
        linears = _linears(model)
        generator = torch.Generator().manual_seed(seed)
        self.down, self.up = nn.ParameterList(), nn.ParameterList()
        for _, width, height in linears:
            start = torch.randn(width, rank, generator=generator) / width**0.5
            self.down.append(nn.Parameter(start.to(**kind)))
            self.up.append(nn.Parameter(torch.zeros(rank, height, **kind)))
        self._gate: tuple[int, int] | None = None  # (rows of the pass, masked ones)
        self._hooks: list[RemovableHandle] = [
            linear.register_forward_hook(self._hook(number)) for number, (linear, _, _) in enumerate(linears)
        ]

    @contextmanager
    def gate(self, rows: int, masked: int) -> Generator[None]:
        """Inside, passes have so many rows, of which the last `masked` are masked."""
        self._gate = (rows, masked)
        try:
            yield
        finally:
            self._gate = None

    def remove(self) -> None:
        """Take the updates off the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hook(self, number: int) -> Any:
        def update(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            if self._gate is None or not self._gate[1]:
                return None
            rows, masked = self._gate
            read = cast(Tensor, args[0])
            if read.ndim != 3 or read.shape[1] != rows:
                return None
            down, up = self.down[number], self.up[number]
            change = (read[:, -masked:].to(down.dtype) @ down @ up).to(output.dtype)
            return torch.cat([output[:, :-masked], output[:, -masked:] + change], dim=1)

        return update


def _linears(model: PreTrainedModel) -> list[tuple[nn.Module, int, int]]:
    """(linear map, its width, its height) of all layers that attend."""
    linears: list[tuple[nn.Module, int, int]] = []
    for path in dict.fromkeys(site.layers for site in find_sites(model)):
        for module in model.get_submodule(path).modules():
            if isinstance(module, nn.Linear):
                linears.append((module, module.in_features, module.out_features))
            elif isinstance(module, Conv1D):
                linears.append((module, *cast("tuple[int, int]", tuple(module.weight.shape))))
    if not linears:
        raise UnsupportedArchitecture(f"the layers of {type(model).__name__} hold no linear map that could be adapted")
    return linears


def layout(past: int, clean: int, after: list[int], drafts: int) -> tuple[Int[Tensor, " q"], Bool[Tensor, "q k"]]:
    """(positions, allow) of a pass [clean tokens | `drafts` masks after each of the clean rows in `after`].

    Clean rows are causal and read no mask. Mask j of a group stands j positions behind its clean row, and reads what
    that row reads and the masks of its group up to itself.
    """
    rows = torch.tensor(after, dtype=torch.int64).repeat_interleave(drafts)
    offset = torch.arange(1, drafts + 1).repeat(len(after))
    group = torch.arange(len(after)).repeat_interleave(drafts)
    positions = torch.cat([torch.arange(clean), rows + offset]) + past
    key = torch.arange(past + clean)
    seen = torch.cat([torch.arange(clean), rows]) + past
    allow = key <= seen[:, None]
    own = (group[:, None] == group) & (offset <= offset[:, None])
    masks = torch.cat([torch.zeros(clean, len(rows), dtype=torch.bool), own])
    return positions, torch.cat([allow, masks], dim=1)


def inputs(model: PreTrainedModel, adapter: GatedAdapter, ids: Tensor, groups: int, drafts: int) -> Tensor:
    """Embeddings [batch, rows, hidden] of [clean tokens | the first `drafts` masks, `groups` times]."""
    clean = cast(Tensor, model.get_input_embeddings()(ids))
    masks = adapter.masks[:drafts].to(clean.dtype).repeat(groups, 1)
    return torch.cat([clean, masks.expand(len(ids), -1, -1)], dim=1)
