"""What the commands say about a mask, as text and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnflow._core.markup import percent, plural

if TYPE_CHECKING:
    from attnflow.masks import Mask
    from attnflow.order import Flow
    from attnflow.report import BlockSparsity


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
    blocks: tuple[BlockSparsity, ...]

    def lines(self) -> list[tuple[str, str]]:
        """(label, text) pairs for the terminal."""
        pairs = f"{self.allowed_pairs:,} of {self.num_queries * self.num_keys:,} ({percent(self.density)})"
        found = [("allowed pairs", pairs)]
        if self.order is None:
            found.append(("order", f"none: {self.no_order}"))
        else:
            order = self.order
            dense = "yes (one layer lets everything flow)" if order.is_dense else "no"
            largest = f", the largest of {order.largest_class:,} positions" if order.largest_class > 1 else ""
            found += [
                ("depth", plural(order.depth, "layer")),
                ("dense", dense),
                ("classes", f"{order.num_classes:,}{largest}"),
                ("Hasse diagram", f"{plural(order.num_hasse_edges, 'edge')}, {plural(order.num_levels, 'level')}"),
            ]
        for each in self.blocks:
            counts = f"{each.full:,} full, {each.partial:,} partial, {each.empty:,} empty"
            share = f" ({percent(each.empty / each.total)} skipped)" if each.total else ""
            found.append((f"blocks of {each.block}", counts + share))
        return found


def mask_facts(mask: Mask, block_size: int | None) -> MaskFacts:
    """The numbers of `mask`, with a few block sizes that suit it if `block_size` is None."""
    from attnflow.report.facts import block_sizes, block_sparsity
    from attnflow.report.subject import order_of

    flow, no_order = order_of([mask], stacked=False)
    sizes = block_sizes(mask) if block_size is None else [block_size]
    return MaskFacts(
        name=mask.name,
        parameters=dict(mask.parameters),
        num_queries=mask.num_queries,
        num_keys=mask.num_keys,
        allowed_pairs=mask.nnz,
        density=mask.density,
        order=None if flow is None else _order_facts(flow),
        no_order=no_order or None,
        blocks=tuple(block_sparsity(mask, size) for size in sizes),
    )


def _order_facts(flow: Flow) -> OrderFacts:
    return OrderFacts(
        depth=flow.depth,
        is_dense=flow.is_dense,
        num_classes=len(flow.classes),
        largest_class=max(map(len, flow.classes), default=0),
        num_hasse_edges=len(flow.hasse.edges),
        num_levels=max(flow.hasse.levels, default=-1) + 1,
    )
