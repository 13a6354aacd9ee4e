"""What a model asks transformers for while it runs: each mask that it makes, with the function that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from attnflow.models.mask_request import NO_SKIPS, AttentionMask, MaskRequest, on_request


@dataclass(frozen=True, eq=False)
class Asked:
    """The masks that transformers made, in order; None where the kernel's `is_causal` stands for one."""

    made: list[tuple[AttentionMask, MaskRequest]] = field(default_factory=list[tuple[AttentionMask, MaskRequest]])

    def request(self, mask: object) -> MaskRequest | None:
        """What was asked for when `mask`, or the tensor that it is a view of, was made."""
        return next((request for made, request in reversed(self.made) if _same(made, mask)), None)

    def without_mask(self) -> list[MaskRequest]:
        """The requests that needed no mask."""
        return [request for made, request in self.made if made is None]


@contextmanager
def asking() -> Generator[Asked, None, None]:
    """Note what any model asks transformers for inside, whatever its attention; what it gets is as without us.

    Other than the notes of an interception (`mask_request.request_of`), these also say what needed no mask.
    """
    asked = Asked()
    mapping = cast(dict[str, Callable[..., AttentionMask]], AttentionMaskInterface._global_mapping)
    before = dict(mapping)

    def make(function: Callable[..., AttentionMask], request: MaskRequest) -> AttentionMask:
        mask = function(**request.arguments)
        asked.made.append((mask, request))
        return mask

    try:
        mapping.update({name: on_request(partial(make, function)) for name, function in before.items()})
        yield asked
    finally:
        mapping.clear()
        mapping.update(before)


def pairs_asked(request: MaskRequest) -> Tensor:
    """bool [batch, queries, keys]: the pairs that a request is for; padding and all heads included."""
    with torch.no_grad():
        arguments: dict[str, Any] = {**request.arguments, **NO_SKIPS}
        mask = sdpa_mask(**arguments)
    assert mask is not None
    return mask.any(1).cpu()


def _same(made: AttentionMask, mask: object) -> bool:
    if made is mask:
        return made is not None
    if not isinstance(made, Tensor) or not isinstance(mask, Tensor):
        return False
    same = made.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr()
    return same and made.shape[-2:] == mask.shape[-2:] and made.storage_offset() == mask.storage_offset()


def asks_causal(request: MaskRequest) -> bool:
    """Whether the function that is asked for is made of transformers' causal one, with more beside it or less."""
    pending, seen = [request.arguments.get("mask_function")], set[int]()
    while pending:
        function = pending.pop()
        if function is causal_mask_function:
            return True
        if id(function) in seen:
            continue
        seen.add(id(function))
        for cell in getattr(function, "__closure__", None) or ():
            content = cell.cell_contents
            pending += [
                each for each in (content if isinstance(content, tuple | list) else [content]) if callable(each)
            ]
    return False
