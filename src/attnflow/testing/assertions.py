"""One-line asserts for your own tests: no leak, a right batch, the same mask, as accurate as a plain computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, Final, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from attnflow import audit
from attnflow.audit.batch.alone import bound, compare_alone
from attnflow.audit.batch.cutting import rows_of
from attnflow.audit.functions import is_function
from attnflow.audit.guards import without_loss
from attnflow.masks.build import computed_pairs
from attnflow.masks.mask import Mask
from attnflow.models.subject import Loaded, Subject
from attnflow.order.flow import Flow

_PAIRS: Final = 6  # pairs that a message lists
_WINDOW: Final = 24  # queries and keys that its picture shows


def assert_no_leak(
    model: nn.Module | Loaded | Callable[..., object],
    batch: str | Sequence[int] | Tensor | Mapping[str, Any],
    order: Mask | Sequence[Mask] | Flow | None = None,
    *,
    cache: bool = False,
    passes: int = 32,
) -> None:
    """Assert that, on this batch, no information flows in the model that its order forbids.

    Args:
        model: any module that takes token ids or embeddings, what `af.load_model` returned, or a function of ids.
        batch: token ids, a text, or the keyword arguments of a call, with or without labels.
        order: what may flow; None for what the model declares for this batch.
        cache: also audit decoding with a cache.
        passes: number of perturbations, as in `af.audit.check`.

    Raises:
        AssertionError: information leaks, or nothing could be tested. The message is the table of the audit: layer,
            module, sequence, source and target.
        UnsupportedArchitecture: you gave no order, and the model declares none.

    Cost: one `af.audit.check`.

    >>> import torch, attnflow as af
    >>> assert_no_leak(torch.nn.Linear(8, 8), torch.randn(2, 5, 8), order=af.masks.causal(5))
    """
    __tracebackhide__ = True
    call = batch
    if isinstance(batch, Mapping) and not is_function(model):
        call = without_loss(Subject.of(cast("nn.Module | Loaded", model)).model, batch)
    report = audit.check(model, call, order, cache=cache, passes=passes)
    if report.violations:
        raise AssertionError(f"information flows against the order\n{report}")
    if report.untested:
        raise AssertionError(f"nothing was tested\n{report}")
    if report.forbidden == 0 and report.batch == 1:
        raise AssertionError(
            f"nothing was tested: {report.order} forbids nothing in one sequence; pass a batch of two, to see what "
            f"crosses between sequences, or the order that you mean\n{report}"
        )


def assert_batch(batch: Mapping[str, Any], model: nn.Module | Loaded) -> None:
    """Assert that labels, documents, masks and positions of a batch fit, and so do the model's loss and rows alone.

    Args:
        batch: the collator's output, with labels.
        model: the model that trains on it, or a result of `af.load_model`.

    Raises:
        AssertionError: there is a mistake, or something decisive was not tested. The message is the report.

    Cost: one `af.audit.check_batch`.
    """
    __tracebackhide__ = True
    report = audit.check_batch(batch, model)
    if not report.ok:
        raise AssertionError(f"the batch is not what the model needs\n{report}")


def assert_packing_equals_alone(
    model: nn.Module | Loaded, collate: Callable[[list[Any]], Mapping[str, Any]], samples: Sequence[Any]
) -> None:
    """Assert that every sample has the outputs in its padded or packed batch that it has alone.

    The collator runs on all samples, and on each alone to see the tokens it makes of it. Samples are found in the
    batch by their tokens, so the test needs no entry that says where documents begin.

    Args:
        model: the model that trains on the batch, or a result of `af.load_model`.
        collate: the collator: takes a list of samples and returns the arguments of a call with `input_ids`.
        samples: what the data set holds, at least two, each with other tokens.

    Raises:
        AssertionError: a sample differs, is not in the batch, or could not be compared. The message is the report;
            documents in it are numbers of samples.

    Cost: one pass of the batch and one of each sample, and up to seven for each of the first four differences.
    """
    __tracebackhide__ = True
    if len(samples) < 2:
        raise ValueError(
            f"expected at least two samples, got {len(samples)}: one alone has nothing to be compared with"
        )
    subject = Subject.of(model)
    call, losses, _ = bound(subject, collate(list(samples)))
    ids, _ = rows_of(subject, call).tokens()
    tokens: list[Tensor] = []
    for sample in samples:
        single, real = rows_of(subject, bound(subject, collate([sample]))[0]).tokens()
        tokens.append(single[real])
    free, places = torch.ones_like(ids, dtype=torch.bool), dict[int, tuple[int, Tensor]]()
    for number in sorted(range(len(tokens)), key=lambda number: -len(tokens[number])):
        size = len(tokens[number])
        runs, unused = (grid.unfold(1, size, 1) for grid in (ids, free))
        starts = ((runs == tokens[number]) & unused).all(-1).nonzero().tolist() if size <= ids.shape[1] else []
        if not starts:
            raise AssertionError(f"sample {number} is not in the batch in one piece: {tokens[number].tolist()}")
        row, start = starts[0]
        free[row, start : start + size] = False
        places[number] = row, torch.arange(start, start + size)
    report = compare_alone(subject, call, losses, places=[places[number] for number in range(len(tokens))])
    if not report.ok:
        what = "samples have other outputs in the batch than alone" if report.differences else "not all was compared"
        raise AssertionError(f"{what}; documents are numbers of samples\n{report}")


def assert_same_mask(actual: object, expected: object) -> None:
    """Assert that two masks allow the same pairs, layer by layer, sequence by sequence and head by head.

    Either may be a `Mask`, a list of masks or a `Flow` (layers), a `BlockMask`, or a tensor [..., queries, keys]. A
    tensor is bool with True for allowed, or additive with 0 for allowed and large negative values or -inf elsewhere.
    One mask is compared with each of several. A BlockMask allows what FlexAttention computes: its full blocks, and in
    partial blocks its `mask_mod`.

    Raises:
        AssertionError: they differ; the message lists the first pairs and draws that part of the mask.
        TypeError: another type, or an ambiguous tensor: integers, or 0 and 1 in floating point.
        ValueError: the shapes or the numbers of masks differ.

    Cost: both dense masks in memory.

    >>> import torch, attnflow as af
    >>> assert_same_mask(torch.ones(4, 4).tril().bool(), af.masks.causal(4))
    >>> assert_same_mask(af.masks.causal(4), af.masks.full(4))
    Traceback (most recent call last):
    ...
    AssertionError: masks differ in 6 of 16 pairs (query, key)
    missing (expected only): (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)
       queries down from 0, keys across from 0; # both, + actual only, - expected only
       #---
       ##--
       ###-
       ####
    """
    __tracebackhide__ = True
    left, right = _tables(actual, "actual"), _tables(expected, "expected")
    if len(left) != len(right) and 1 not in (len(left), len(right)):
        raise ValueError(f"actual has {len(left)} masks and expected {len(right)}: compare one with one, or with each")
    names = list(left if len(left) >= len(right) else right)
    for index, name in enumerate(names):
        one, other = (list(side.values())[index % len(side)] for side in (left, right))
        if one.shape != other.shape:
            raise ValueError(f"actual is {list(one.shape)} (queries, keys), expected is {list(other.shape)}{name}")
        if not torch.equal(one, other):
            raise AssertionError(_difference(one, other, name))


def _tables(value: object, what: str) -> dict[str, Tensor]:
    """Return the allowed pairs [queries, keys] by place, such as " in layer 3"."""
    if isinstance(value, Mask):
        return {"": value.dense()}
    if isinstance(value, Flow):
        value = value.masks
    if isinstance(value, BlockMask):
        value = computed_pairs(value)
    if isinstance(value, Sequence) and value and all(isinstance(mask, Mask) for mask in cast(Sequence[object], value)):
        masks = cast(Sequence[Mask], value)
        return {f" in layer {i}" if len(masks) > 1 else "": mask.dense() for i, mask in enumerate(masks)}
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{what} must be a Mask, a list of masks, a Flow, a BlockMask or a tensor, got {type(value).__name__}"
        )
    allow = _allowed(value.detach().cpu(), what)
    if allow.ndim < 2:
        raise ValueError(f"{what} must have the shape [..., queries, keys], got {list(allow.shape)}")
    names = ("sequence", "head") if allow.ndim <= 4 else tuple(f"axis {axis}" for axis in range(allow.ndim - 2))
    return {
        "".join(f" in {name} {at}" for name, at in zip(names, place, strict=False)): allow[place]
        for place in product(*(range(size) for size in allow.shape[:-2]))
    }


def _allowed(mask: Tensor, what: str) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise TypeError(f"{what} holds {mask.dtype}, which may mean either: pass bool, as in mask.bool() or mask == 0")
    if (mask == 1).any() or not ((mask == 0) | (mask < -1000)).all():
        raise TypeError(
            f"{what} is a floating-point tensor that is not additive (0 for allowed, large negative values or -inf for "
            f"the rest): it holds {float(mask.max()):.3g}; pass bool"
        )
    return mask == 0


def _difference(actual: Tensor, expected: Tensor, name: str) -> str:
    extra, missing = actual & ~expected, expected & ~actual
    wrong = extra | missing
    lines = [f"masks differ in {int(wrong.sum())} of {wrong.numel()} pairs (query, key){name}"]
    for what, pairs in (("extra (actual only)", extra), ("missing (expected only)", missing)):
        if pairs.any():
            first = [f"({q}, {k})" for q, k in pairs.nonzero()[:_PAIRS].tolist()]
            lines.append(f"{what}: {', '.join(first)}{', ...' if pairs.sum() > _PAIRS else ''}")
    place = wrong.nonzero().amin(0)
    corner = [max(0, min(int(at) - _WINDOW // 4, size - _WINDOW)) for at, size in zip(place, wrong.shape, strict=True)]
    part = slice(corner[0], corner[0] + _WINDOW), slice(corner[1], corner[1] + _WINDOW)
    signs = torch.where(actual & expected, 0, torch.where(extra, 1, torch.where(missing, 2, 3)))[part]
    lines.append(
        f"   queries down from {corner[0]}, keys across from {corner[1]}; # both, + actual only, - expected only"
    )
    lines += ["   " + "".join("#+-."[sign] for sign in row) for row in signs.tolist()]
    return "\n".join(lines)


def tolerance(low: Float[Tensor, "..."], exact: Float[Tensor, "..."]) -> float:
    """The largest error to accept: 2 x (error of `low` against `exact` + one rounding of `low`'s dtype).

    Args:
        low: the reference implementation run in the precision under test.
        exact: the reference implementation run in float64.

    Returns:
        An absolute tolerance. It follows from the data, so that no test carries a hand-tuned number.

    >>> tolerance(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0], dtype=torch.float64)) == 2 * 2 * 2.0**-23
    True
    """
    if exact.dtype != torch.float64:
        raise TypeError(f"exact must be float64, got {exact.dtype}; run the reference in double precision")
    if low.shape != exact.shape:
        raise ValueError(f"low and exact must have one shape, got {tuple(low.shape)} and {tuple(exact.shape)}")
    if exact.numel() == 0:
        return 0.0
    rounding = float(exact.abs().max()) * torch.finfo(low.dtype).eps
    return 2.0 * (float((low.double() - exact).abs().max()) + rounding)


def assert_as_accurate(actual: Float[Tensor, "..."], low: Float[Tensor, "..."], exact: Float[Tensor, "..."]) -> None:
    """Assert that `actual` is within `tolerance(low, exact)` of `exact`, and finite.

    Raises:
        AssertionError: it is not; the message gives both errors.

    >>> exact = torch.tensor([1.0], dtype=torch.float64)
    >>> assert_as_accurate(exact.float(), exact.float(), exact)
    """
    if actual.shape != exact.shape:
        raise AssertionError(f"shape {tuple(actual.shape)}, expected {tuple(exact.shape)}")
    limit = tolerance(low, exact)
    error = float((actual.double() - exact).abs().max()) if exact.numel() else 0.0
    if not error <= limit:  # NaN fails too
        raise AssertionError(f"error {error:.3g} against float64 is above the tolerance {limit:.3g}")
