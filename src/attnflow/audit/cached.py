"""Prefill and decoding with a cache against one full forward: the same vectors, up to measured rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from attnflow._core import checks
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.audit.findings import Violation
from attnflow.audit.inputs import Inputs
from attnflow.audit.passes import Recording, Runner
from attnflow.audit.perturb import other_precision
from attnflow.audit.trace import Event
from attnflow.models.evaluation import precision


def chunks_of(inputs: Inputs, cache: bool | Sequence[int]) -> tuple[int, ...]:
    """Lengths of the steps: as given, or a prefill and up to four single tokens."""
    if cache is False:
        return ()
    n = inputs.slots[-1].length
    taken = {slot.length for slot in inputs.slots[:-1]}  # a step as long as the encoder's sequence cannot be told apart
    if cache is True:
        single = next((k for k in range(min(4, n - 1), 0, -1) if n - k not in taken), 0)
        return (n - single, *([1] * single))
    lengths = tuple(checks.integer("cache", length, 1) for length in cast(Sequence[object], cache))
    if sum(lengths) != n:
        raise ValueError(f"cache must list step lengths that add up to the {n} positions, got {list(lengths)}")
    if taken & set(lengths):
        raise ValueError(f"no step may be as long as the encoder's sequence ({max(taken)}), got {list(lengths)}")
    return lengths


def mismatch(full: Runner, cached: Runner, base: Recording, stepped: Recording) -> Violation | None:
    """The first module where a cached step differs from the full forward by more than rounding explains.

    The rounding of a module is measured: its full forward in the model's precision against float64. Two results that
    are each within that error and one unit in the last place of the largest value may differ by twice as much.

    Raises:
        UnsupportedArchitecture: the model does not run in float64, so that rounding cannot be measured.
    """
    dtype, reference = full.dtype, other_precision(full.dtype)
    try:
        with precision(full.model, reference):
            exact = full.record(full.inputs.in_precision(reference).kwargs)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise UnsupportedArchitecture(
            f"{type(full.model).__name__} does not run in {reference}, so the rounding of its full forward cannot be "
            f"measured ({error}); audit it with cache=False"
        ) from error
    ratio = torch.finfo(dtype).eps / torch.finfo(reference).eps  # an error of the other precision, in this one's terms
    for key, event in stepped.events.items():
        whole = base.events.get(key._replace(step=0))
        other = exact.events.get(key._replace(step=0))
        if whole is None or other is None or event.offset < whole.offset:
            continue
        beyond = _beyond(event, whole, other, ratio if ratio < 1 else 1.0, torch.finfo(dtype).eps)
        if beyond is not None:
            row, target, change = beyond
            return Violation(
                "cache", event.layer, event.blame, None, target, change, None, row, cached.path, confirmed=True
            )
    return None


def _beyond(event: Event, whole: Event, exact: Event, ratio: float, eps: float) -> tuple[int, int, float] | None:
    start = event.offset - whole.offset
    rows = whole.values[:, start : start + event.values.shape[1]]
    if rows.shape != event.values.shape or exact.values.shape != whole.values.shape:
        return None
    error = _largest(whole.values.double() - exact.values.double()) * ratio
    band = 2 * (error + eps * _largest(exact.values.double()))
    change = (event.values.double() - rows.double()).abs().nan_to_num(nan=torch.inf).amax(-1)
    if not (change > band).any():
        return None
    row, column = divmod(int(change.argmax()), change.shape[1])
    return row, column + event.offset, float(change.max())


def _largest(values: Tensor) -> float:
    return float(values.abs().nan_to_num(nan=0.0).max())
