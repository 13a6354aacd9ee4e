"""The masks of a batch where each layer has its own, as one plain tensor, and what one layer takes of it.

Two forms, which no kernel takes for a mask of pairs and nothing for masks that all layers share:

- row intervals (`attnflow.masks.batch_rows`) in int64 and not in int32: [batch, layers, rows, queries];
- additive: [batch, 1, layers x queries, keys], the layers one below the other, at least two.
"""

from __future__ import annotations

from typing import Final

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from attnflow.masks.batches import MaskGrid

LAYERED: Final = torch.int64  # of row intervals


def layered_rows(grid: MaskGrid, min_width: int = 1) -> Int64[Tensor, "batch layers rows queries"]:
    """The row intervals of a grid whose heads are layers. Cost: O(queries x intervals of a query x layers)."""
    return grid.row_intervals(min_width).to(LAYERED)


def layered_dense(
    tables: Float[Tensor, "batch layers queries keys"],
) -> Float[Tensor, "batch 1 layers_and_queries keys"]:
    """The additive masks of the layers, one below the other.

    Raises:
        ValueError: there is one layer alone, whose mask nothing would tell from one for all layers.
    """
    if tables.shape[1] == 1:
        raise ValueError(
            "a list of one mask is for models of one layer, and as a dense table any model would take it for all its "
            'layers: use masks="intervals", or give the task the mask itself in place of the list'
        )
    return tables.flatten(1, 2)[:, None]


def num_layers_of(mask: object, queries: int) -> int | None:
    """For how many layers a mask is one each; None of a mask for all layers."""
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        return None
    if mask.dtype == LAYERED:
        return mask.shape[1]
    layers = mask.shape[2] // queries if queries and mask.is_floating_point() and mask.shape[1] == 1 else 1
    return layers if layers > 1 and layers * queries == mask.shape[2] else None


def mask_of_layer(mask: Tensor, layer: int, queries: int) -> Tensor:
    """The mask of one layer as it would be for all: int32 row intervals, or an additive table."""
    if mask.dtype == LAYERED:
        return mask[:, layer : layer + 1].to(torch.int32)
    return mask[:, :, layer * queries : (layer + 1) * queries]


def first_alike(mask: Tensor, queries: int) -> list[int]:
    """For each layer the first one with the same mask. Cost: O(layers x different masks) comparisons."""
    views = mask.unbind(1) if mask.dtype == LAYERED else mask.unflatten(2, (-1, queries)).unbind(2)
    first: list[int] = []
    for layer, view in enumerate(views):
        alike = (other for other in dict.fromkeys(first) if torch.equal(views[other], view))
        first.append(next(alike, layer))
    return first
