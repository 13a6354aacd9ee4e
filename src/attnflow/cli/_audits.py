"""Audits as commands run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

from attnflow.cli._catalogue import find
from attnflow.cli._output import BadUsage
from attnflow.cli._spec import mask_argument

if TYPE_CHECKING:
    from attnflow.audit import AuditReport
    from attnflow.cli._models import Named
    from attnflow.cli._output import Spinner
    from attnflow.masks import Mask


def run(
    named: Named,
    ids: Sequence[int],
    order: str | None,
    mode: str,
    passes: int,
    cache: bool,
    double: bool,
    spinner: Spinner,
) -> AuditReport:
    """Audit `named` on one sequence of token ids, against `order` or against what it declares."""
    import torch

    from attnflow.audit import check

    inputs = named.inputs(ids)
    size = sum(tensor.shape[1] for tensor in inputs.values())

    def progress(done: int, total: int, what: str) -> None:
        spinner(f"auditing {named.name}: {what} {done}/{total}")

    try:
        return check(
            named.model,
            inputs,
            None if order is None else order_named(order, size),
            cast(Literal["perturb", "vjp"], mode),
            cache=cache,
            passes=passes,
            dtype=torch.float64 if double else None,
            progress=progress,
        )
    except ValueError as error:
        raise BadUsage(str(error)) from error


def order_named(order: str, size: int) -> Mask:
    """The order over `size` positions that `--order` names."""
    from attnflow import masks

    if order == "-" or order.endswith(".json"):
        return mask_argument(order, None, [])
    known = {"causal": masks.causal, "full": masks.full}
    return find(order, known, "order", "causal, full, or a JSON file with a mask")(size)
