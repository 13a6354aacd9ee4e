"""`summarise`: a mask in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attnflow._core.markup import percent, plural
from attnflow._core.results import Result
from attnflow.masks.mask import Mask
from attnflow.order.flow import Flow
from attnflow.report.mask_facts import BlockSparsity, block_sizes, block_sparsity
from attnflow.report.sections.mask import flow_of


@dataclass(frozen=True)
class OrderNumbers:
    """Numbers of the order that a mask generates; see `attnflow.order.Flow`."""

    depth: int
    is_dense: bool
    num_classes: int
    largest_class: int
    num_hasse_edges: int
    num_levels: int

    @classmethod
    def of(cls, flow: Flow) -> OrderNumbers:
        """The numbers of a flow."""
        return cls(
            depth=flow.depth,
            is_dense=flow.is_dense,
            num_classes=len(flow.classes),
            largest_class=max(map(len, flow.classes), default=0),
            num_hasse_edges=len(flow.hasse.edges),
            num_levels=max(flow.hasse.levels, default=-1) + 1,
        )


@dataclass(frozen=True)
class MaskSummary(Result):
    """A mask in numbers.

    Attributes:
        order: None where there is none; `no_order` then says why.
        blocks: its blocks at a few sizes, as FlexAttention sees them.
    """

    name: str
    parameters: Mapping[str, object]
    num_queries: int
    num_keys: int
    allowed_pairs: int
    density: float
    order: OrderNumbers | None
    no_order: str | None
    blocks: tuple[BlockSparsity, ...]

    def lines(self) -> list[tuple[str, str]]:
        """(label, text) pairs for a terminal."""
        pairs = f"{self.allowed_pairs:,} of {self.num_queries * self.num_keys:,} ({percent(self.density)})"
        lines = [("allowed pairs", pairs)]
        if self.order is None:
            lines.append(("order", f"none: {self.no_order}"))
        else:
            order = self.order
            largest = f", the largest of {order.largest_class:,} positions" if order.largest_class > 1 else ""
            lines += [
                ("depth", plural(order.depth, "layer")),
                ("dense", "yes (one layer lets everything flow)" if order.is_dense else "no"),
                ("classes", f"{order.num_classes:,}{largest}"),
                ("Hasse diagram", f"{plural(order.num_hasse_edges, 'edge')}, {plural(order.num_levels, 'level')}"),
            ]
        for each in self.blocks:
            counts = f"{each.full:,} full, {each.partial:,} partial, {each.empty:,} empty"
            share = f" ({percent(each.empty / each.total)} skipped)" if each.total else ""
            lines.append((f"blocks of {each.block}", counts + share))
        return lines

    def __str__(self) -> str:
        return "\n".join([self.name, *(f"{label:<16}{text}" for label, text in self.lines())])


def summarise(mask: Mask, block_size: int | None = None) -> MaskSummary:
    """The numbers of a mask: depth, density, classes, Hasse diagram, block sparsity.

    Args:
        mask: any mask.
        block_size: of the block sparsity; by default a few that suit the mask.
    """
    flow, no_order = flow_of(mask)
    sizes = block_sizes(mask) if block_size is None else [block_size]
    return MaskSummary(
        name=mask.name,
        parameters=dict(mask.parameters),
        num_queries=mask.num_queries,
        num_keys=mask.num_keys,
        allowed_pairs=mask.nnz,
        density=mask.density,
        order=None if flow is None else OrderNumbers.of(flow),
        no_order=no_order or None,
        blocks=tuple(block_sparsity(mask, size) for size in sizes),
    )
