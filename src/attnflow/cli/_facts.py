"""What the commands say about a mask, as text and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from attnflow.masks import Mask

LARGEST_ORDER: Final = 32_768  # positions above which closure and depth would take gigabytes


@dataclass(frozen=True)
class Blocks:
    """Blocks of a mask as FlexAttention sees them: `empty` ones are skipped.

    Attributes:
        size: queries and keys per block.
        sparsity: share of empty blocks, in [0, 1].
    """

    size: int
    full: int
    partial: int
    empty: int
    sparsity: float


@dataclass(frozen=True)
class OrderFacts:
    """Numbers of the order that a mask generates; see `attnflow.order.Flow`."""

    depth: int
    is_dense: bool
    num_classes: int
    largest_class: int
    num_hasse_edges: int
    num_levels: int


@dataclass(frozen=True)
class MaskFacts:
    """A mask in numbers.

    Attributes:
        order: None where there is none; `no_order` then says why.
    """

    name: str
    parameters: dict[str, object]
    num_queries: int
    num_keys: int
    allowed_pairs: int
    density: float
    order: OrderFacts | None
    no_order: str | None
    blocks: Blocks

    def lines(self) -> list[tuple[str, str]]:
        """(label, text) pairs for the terminal."""
        pairs = f"{self.allowed_pairs:,} of {self.num_queries * self.num_keys:,} ({self.density:.1%})"
        found = [("allowed pairs", pairs)]
        if self.order is None:
            found.append(("order", self.no_order or ""))
        else:
            order = self.order
            dense = "yes (one layer lets everything flow)" if order.is_dense else "no"
            largest = f", the largest of {order.largest_class:,} positions" if order.largest_class > 1 else ""
            found += [
                ("depth", f"{order.depth:,} {'layer' if order.depth == 1 else 'layers'}"),
                ("dense", dense),
                ("classes", f"{order.num_classes:,}{largest}"),
                ("Hasse diagram", f"{order.num_hasse_edges:,} edges, {order.num_levels:,} levels"),
            ]
        blocks = self.blocks
        counts = f"{blocks.full:,} full, {blocks.partial:,} partial, {blocks.empty:,} empty"
        found.append((f"blocks of {blocks.size}", f"{counts} ({blocks.sparsity:.1%} skipped)"))
        return found


def mask_facts(mask: Mask, block_size: int | None) -> MaskFacts:
    """The numbers of `mask`, with `block_size` chosen for its size if None."""
    order, no_order = None, None
    if mask.num_queries != mask.num_keys:
        no_order = "none: the mask is not square"
    elif mask.num_keys > LARGEST_ORDER:
        no_order = f"not computed above {LARGEST_ORDER:,} positions"
    else:
        order = _order_facts(mask)
    size = _default_block_size(mask) if block_size is None else block_size
    return MaskFacts(
        name=mask.name,
        parameters=dict(mask.parameters),
        num_queries=mask.num_queries,
        num_keys=mask.num_keys,
        allowed_pairs=mask.nnz,
        density=mask.density,
        order=order,
        no_order=no_order,
        blocks=_blocks(mask, size),
    )


def _order_facts(mask: Mask) -> OrderFacts:
    from attnflow.order import analyze

    flow = analyze(mask)
    return OrderFacts(
        depth=flow.depth,
        is_dense=flow.is_dense,
        num_classes=len(flow.classes),
        largest_class=max(map(len, flow.classes), default=0),
        num_hasse_edges=len(flow.hasse.edges),
        num_levels=max(flow.hasse.levels, default=-1) + 1,
    )


def _blocks(mask: Mask, size: int) -> Blocks:
    queries, keys = (-(-n // size) for n in mask.shape)
    partial = full = 0
    if queries and keys:
        table = mask.block_mask(size)
        partial = int(table.kv_num_blocks.sum())
        full = 0 if table.full_kv_num_blocks is None else int(table.full_kv_num_blocks.sum())
    empty = queries * keys - partial - full
    return Blocks(size, full, partial, empty, empty / (queries * keys) if queries * keys else 0.0)


def _default_block_size(mask: Mask) -> int:
    """128, the block of FlexAttention; for smaller masks the power of two that makes eight blocks or more."""
    eighth = max(mask.shape) // 8
    return min(128, 1 << max(eighth.bit_length() - 1, 0))
