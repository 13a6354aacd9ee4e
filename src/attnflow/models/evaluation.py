"""The model is left as it was found: training flags, random generators, precision, hooks."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def devices(model: nn.Module) -> list[torch.device]:
    """The devices that hold the model's tensors."""
    return list({tensor.device for tensor in (*model.parameters(), *model.buffers())})


def seed_all(seed: int) -> None:
    """Same random numbers in every pass: models that draw some in eval (random attention, hashing) stay comparable."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - it is the legacy generator that models draw from
    torch.manual_seed(seed)


@contextmanager
def preserved(model: nn.Module) -> Generator[None, None, None]:
    """In eval mode inside; the training flags of all modules and all random generators are restored afterwards."""
    training = [(module, module.training) for module in model.modules()]
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    cuda = [device for device in devices(model) if device.type == "cuda"]
    with torch.random.fork_rng(devices=cuda):
        try:
            model.eval()
            yield
        finally:
            for module, flag in training:
                module.training = flag
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002


@contextmanager
def precision(model: nn.Module, dtype: torch.dtype | None) -> Generator[None, None, None]:
    """Parameters and buffers in `dtype` inside; the very same tensors are put back afterwards.

    Cost: a second copy of the parameters while it lasts. Nothing happens for None.
    """
    tensors = [] if dtype is None else [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    saved = [(tensor, tensor.data) for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(dtype)
        with _GroupedMatmul() if dtype == torch.float64 else nullcontext():
            yield
    finally:
        for tensor, data in saved:
            tensor.data = data


class _GroupedMatmul(TorchFunctionMode):
    """torch's grouped matrix product (experts) has no float64 kernel: one product per group instead."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm") and len(args) >= 2:
            left, right, offsets = cast(Tensor, args[0]), cast(Tensor, args[1]), named.get("offs")
            if left.dtype == torch.float64 and left.ndim == 2 and right.ndim == 3 and offsets is not None:
                ends = cast(Tensor, offsets).tolist()
                rows = [left[a:b] @ expert for a, b, expert in zip([0, *ends], ends, right, strict=False)]
                rest = left.new_zeros(len(left) - ends[-1], right.shape[-1])
                return torch.cat([*rows, rest])
        return func(*args, **named)
