"""What a model asks transformers for while it runs: each mask that it makes, with the function that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from attnflow.models.mask_request import AttentionMask, MaskRequest

_ALWAYS = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}


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
    """Note what any model asks transformers for inside; what it gets is as without us."""
    asked = Asked()
    mapping = cast(dict[str, Callable[..., AttentionMask]], AttentionMaskInterface._global_mapping)
    before = dict(mapping)

    def noting(function: Callable[..., AttentionMask]) -> Callable[..., AttentionMask]:
        def make(
            batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, **others: Any
        ) -> AttentionMask:
            q_offset = int(q_offset)
            size = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
            arguments = {**size, "q_offset": q_offset, "kv_offset": kv_offset, **others}
            mask = function(**arguments)
            padding = others.get("attention_mask")
            asked.made.append(
                (mask, MaskRequest(batch_size, q_length, kv_length, q_offset, kv_offset, padding, arguments))
            )
            return mask

        return make

    try:
        mapping.update({name: noting(function) for name, function in before.items()})
        yield asked
    finally:
        mapping.clear()
        mapping.update(before)


def pairs_asked(request: MaskRequest) -> Tensor:
    """bool [batch, queries, keys]: the pairs that a request is for; padding and all heads included."""
    with torch.no_grad():
        arguments: dict[str, Any] = {**request.arguments, **_ALWAYS}
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
