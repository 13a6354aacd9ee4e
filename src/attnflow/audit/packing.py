"""Which positions of a call are padding, and which belong to one document: what the inputs themselves say."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from attnflow._core.markup import plural
from attnflow.audit.inputs import Inputs, Slot

_BOUNDARIES: Final = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "cu_seq_lens")
DOCUMENT_ARGUMENTS: Final = ("seq_idx", *_BOUNDARIES)


def padding(inputs: Inputs, slot: Slot) -> Tensor | None:
    """Which positions of a slot are real, bool [batch, n]; None without padding."""
    decoder = (slot.name or "").startswith("decoder")
    mask = inputs.kwargs.get("decoder_attention_mask" if decoder else "attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim > 2 or mask.shape[-1] != slot.length:
        return None
    keep = mask.detach().cpu().reshape(-1, slot.length) != 0
    return None if keep.all() else keep


def documents(inputs: Inputs, slot: Slot) -> Tensor | None:
    """Which pairs of positions are of one document, bool [rows, n, n]; None where nothing speaks of several.

    Position ids that go back, boundaries of a flattened batch, numbers of documents, a 2D mask that counts: what any of
    them keeps apart is apart.

    Raises:
        ValueError: one of them is of another length.
    """
    n = slot.length
    numbers = [_restarts(inputs, n), _counted(inputs, n), _numbered(inputs, n), *_bounded(inputs, n)]
    apart = [each[:, :, None] == each[:, None, :] for each in numbers if each is not None]
    if not apart:
        return None
    together = torch.stack([each.expand(max(map(len, apart)), -1, -1) for each in apart]).all(0)
    return None if together.all() else together


def documents_in_words(together: Tensor) -> str:
    """How many documents, and of how many tokens."""
    starts = [torch.nn.functional.pad(~row.diagonal(-1), (1, 1), value=True).nonzero()[:, 0] for row in together]
    lengths = [start.diff().tolist() for start in starts]
    if len(lengths) == 1 or all(each == lengths[0] for each in lengths):
        sizes = " + ".join(map(str, lengths[0][:12])) + (" + ..." if len(lengths[0]) > 12 else "")
        return f"{plural(len(lengths[0]), 'packed document')}, {sizes} tokens"
    return f"up to {plural(max(map(len, lengths)), 'packed document')} a sequence"


def _restarts(inputs: Inputs, n: int) -> Tensor | None:
    """Document numbers by position ids that go back, of the first axis where there are several."""
    positions = inputs.kwargs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.shape[-1] != n:
        return None
    positions = positions.detach().cpu()
    several = positions.ndim > 2  # of an image, all tokens may share a time
    positions = positions[0] if several else positions.reshape(-1, n)
    step = positions.diff(dim=-1)
    first = positions[:, 1:] == positions.min(dim=-1, keepdim=True).values
    starts = (step < 0) if several else (step < 0) | ((step == 0) & first)
    return torch.nn.functional.pad(starts.cumsum(-1), (1, 0)) if starts.any() else None


def _counted(inputs: Inputs, n: int) -> Tensor | None:
    """A 2D attention mask that holds the number of each token's document, and 0 for padding."""
    mask = inputs.kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim > 2 or mask.is_floating_point() or mask.shape[-1] != n:
        return None
    return mask.detach().cpu().reshape(-1, n) if mask.numel() and int(mask.max()) > 1 else None


def _numbered(inputs: Inputs, n: int) -> Tensor | None:
    numbers = inputs.kwargs.get("seq_idx")
    if not isinstance(numbers, Tensor):
        return None
    if numbers.shape[-1] != n:
        raise ValueError(f"seq_idx must number the {n} positions, got shape {tuple(numbers.shape)}")
    return numbers.detach().cpu().reshape(-1, n)


def _bounded(inputs: Inputs, n: int) -> list[Tensor]:
    numbers: list[Tensor] = []
    for name in _BOUNDARIES:
        bounds = inputs.kwargs.get(name)
        if isinstance(bounds, Tensor) and bounds.ndim == 1:
            bounds = bounds.detach().cpu().long()
            if inputs.batch != 1 or int(bounds[-1]) != n or bool((bounds.diff() < 0).any()):
                raise ValueError(
                    f"{name} must rise from 0 to the {n} positions of one flattened sequence, got "
                    f"{bounds.tolist()[:12]} for a batch of {inputs.batch}"
                )
            numbers.append(torch.bucketize(torch.arange(n), bounds[1:], right=True)[None])
    return numbers
