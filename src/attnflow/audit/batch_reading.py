"""One batch of a data loader as labels, documents, padding and pairs that may read one another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnflow.audit.batch_family import Family
from attnflow.audit.block_masks import computed_pairs

IGNORED: Final = -100
ANSWERS: Final = ("completion_mask", "assistant_masks", "assistant_tokens_mask")


@dataclass(frozen=True, eq=False)
class Reading:
    """What a batch says.

    Attributes:
        ids: [batch, n, width] token ids; several at one position are averaged, -100 fills up. None without ids.
        labels: [batch, n], -100 where there is none; None without labels of this form.
        targets: [batch, n, several] of `af.tasks.Collator`, each at the position that predicts it.
        real: bool [batch, n], no padding.
        padding: bool [batch, n], a run of the padding token at an end of the sequence, whatever the mask says.
        mask: [batch, n], the 2D attention mask as it is; None without one.
        positions: [batch, n]; None without position ids, or where they have several axes.
        allow: bool [n, n] for each sequence, from a mask of pairs; None without one.
        starts: {what says so: bool [batch, n], True where a document begins}.
        documents: [batch, n], the number of each position's document within its sequence.
        blocks: [batch, n], positions of one block read one another in both directions; -1 elsewhere.
        answers: bool [batch, n], what a mask in the batch says belongs to an answer; None without one.
        problems: what contradicts itself in the reading, (position in the flattened batch, message).
        unread: what could not be read, (what, why).
    """

    ids: Tensor | None
    labels: Tensor | None
    targets: Tensor | None
    real: Tensor
    padding: Tensor
    mask: Tensor | None
    positions: Tensor | None
    allow: tuple[Tensor, ...] | None
    starts: dict[str, Tensor]
    documents: Tensor
    blocks: Tensor
    answers: Tensor | None
    problems: list[tuple[int, str]]
    unread: list[tuple[str, str]]

    @property
    def shape(self) -> tuple[int, int]:
        """Sequences and positions."""
        return self.real.shape[0], self.real.shape[1]


def read_batch(batch: Mapping[str, Any], family: Family) -> Reading:
    """What `batch` says, for labels as `family` takes them.

    Raises:
        ValueError: neither ids nor labels, or shapes that do not fit together.
        TypeError: ids, labels or positions that are no integers.
    """
    prefix = "decoder_" if family.decoder or batch.get("decoder_input_ids") is not None else ""
    ids = _integers(batch, f"{prefix}input_ids", (1, 2, 3))
    labels = None if family.classes else _integers(batch, "labels", (1, 2, 4))
    if ids is None and labels is None:
        raise ValueError(
            f"expected {prefix}input_ids or labels among the batch's entries, got {sorted(batch)}: pass what the data "
            "loader gives to the model"
        )
    subject = cast(Tensor, labels if ids is None else ids)
    if subject.ndim == 1:
        ids, labels = (None if value is None else value[None] for value in (ids, labels))
        subject = subject[None]
    size = (subject.shape[0], subject.shape[1])
    if labels is not None and labels.shape[:2] != size:
        raise ValueError(f"labels are {list(labels.shape)} and {prefix}input_ids {list(subject.shape)}")
    if labels is not None and labels.ndim == 4 and labels.shape[2] != 2:
        raise ValueError(f"expected labels [batch, n] or those of an af.tasks.Collator, got {list(labels.shape)}")
    targets = labels[:, :, 0, 1:] if labels is not None and labels.ndim == 4 else None
    plain = labels if targets is None else None
    if ids is not None:
        ids = ids[..., None] if ids.ndim == 2 else ids
    mask, allow = _masks(batch.get(f"{prefix}attention_mask"), size)
    if prefix and ids is None and plain is not None:  # the model makes its decoder's inputs of the labels
        mask = (plain != IGNORED).long() if mask is None else mask
    padding = torch.zeros(size, dtype=torch.bool) if ids is None else _padding(ids, family)
    real = torch.ones(size, dtype=torch.bool) if mask is None else mask != 0
    if allow is not None:
        real = real & ~_isolated(allow)
    if mask is None and allow is None:
        real = real & ~padding
    unread: list[tuple[str, str]] = []
    positions = _positions(batch.get(f"{prefix}position_ids"), size, unread)
    problems: list[tuple[int, str]] = []
    starts = _starts(batch, size, mask, positions, real, problems, merged=targets is not None, paired=allow is not None)
    first = next(iter(starts.values()), torch.zeros(size, dtype=torch.bool))
    return Reading(
        ids=ids,
        labels=plain,
        targets=targets,
        real=real,
        padding=padding,
        mask=mask,
        positions=positions,
        allow=allow,
        starts=starts,
        documents=first.long().cumsum(-1),
        blocks=_blocks(batch, size, family),
        answers=_answers(batch, size),
        problems=problems,
        unread=unread,
    )


def _integers(batch: Mapping[str, Any], name: str, ranks: tuple[int, ...]) -> Tensor | None:
    value = batch.get(name)
    if value is None:
        return None
    try:
        tensor = (value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))).detach().cpu()
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__} that is none: {error}") from error
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got {tensor.dtype}")
    if tensor.ndim not in ranks:
        raise ValueError(f"{name} must have {' or '.join(map(str, ranks))} axes, got {list(tensor.shape)}")
    return tensor.long()


def _masks(value: Any, size: tuple[int, int]) -> tuple[Tensor | None, tuple[Tensor, ...] | None]:
    """The 2D mask, or the pairs of a mask of pairs: of any head, and of any layer where layers differ."""
    batch, n = size
    if value is None:
        return None, None
    if isinstance(value, Mapping):
        parts = [_masks(part, size)[1] for part in cast(Mapping[str, Any], value).values()]
        pairs = [part for part in parts if part is not None]
        if not pairs:
            return None, None
        return None, tuple(torch.stack(layers).any(0) for layers in zip(*pairs, strict=True))
    if isinstance(value, BlockMask):
        value = computed_pairs(value)
    value = (value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))).detach().cpu()
    if value.ndim <= 2:
        value = value.reshape(-1, value.shape[-1])
        if value.shape != size:
            raise ValueError(f"attention_mask is {list(value.shape)}, expected {list(size)} as the ids")
        return value, None
    if value.shape[-2:] != (n, n) or value.shape[0] not in (1, batch):
        raise ValueError(f"attention_mask must be [{batch}, heads, {n}, {n}], got {list(value.shape)}")
    zero_one = not value.is_floating_point() or bool(((value == 0) | (value == 1)).all() and (value == 1).any())
    allow = value != 0 if zero_one else value == 0
    allow = (allow.any(1) if allow.ndim == 4 else allow).expand(batch, n, n)
    return None, tuple(allow)


def _isolated(allow: tuple[Tensor, ...]) -> Tensor:
    """Runs at the ends of sequences that read nothing and that nothing else reads: how masks of pairs pad."""
    rows: list[Tensor] = []
    for pairs in allow:
        others = pairs & ~torch.eye(len(pairs), dtype=torch.bool)
        rows.append(_runs(~(others.any(0) | others.any(1))))
    alone = torch.stack(rows)
    return alone & ~alone.all(-1, keepdim=True)


def _runs(marked: Tensor) -> Tensor:
    """What is marked from either end without a gap."""
    ends = marked.long()
    return (ends.cumprod(-1) + ends.flip(-1).cumprod(-1).flip(-1)) > 0


def _padding(ids: Tensor, family: Family) -> Tensor:
    if ids.shape[-1] > 1 or family.pad is None:
        return torch.zeros(ids.shape[:2], dtype=torch.bool)
    run = _runs(ids[..., 0] == family.pad)
    if family.pad in family.ends:  # one of them ends the text
        after = F.pad(run[:, :-1], (1, 0))
        run = run & (after | (run.long().cumprod(-1) > 0))
    return run & ~run.all(-1, keepdim=True)


def _positions(value: Any, size: tuple[int, int], unread: list[tuple[str, str]]) -> Tensor | None:
    if value is None:
        return None
    positions = _integers({"position_ids": value}, "position_ids", (1, 2, 3))
    assert positions is not None
    if positions.ndim == 3:
        unread.append(("position_ids", f"they have {len(positions)} axes (time, height, width)"))
        return None
    positions = positions.reshape(-1, positions.shape[-1])
    if positions.shape[1] != size[1] or len(positions) not in (1, size[0]):
        raise ValueError(f"position_ids are {list(positions.shape)}, expected {list(size)} as the ids")
    return positions.expand(size)


def _starts(
    batch: Mapping[str, Any],
    size: tuple[int, int],
    mask: Tensor | None,
    positions: Tensor | None,
    real: Tensor,
    problems: list[tuple[int, str]],
    merged: bool,
    paired: bool,
) -> dict[str, Tensor]:
    """Where documents begin, as each entry of the batch says; the most explicit first."""
    starts: dict[str, Tensor] = {}
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        lengths = _integers(batch, name, (1,))
        if lengths is not None:
            total = size[0] * size[1]
            if not len(lengths) or lengths[0] != 0 or lengths[-1] != total or (lengths.diff() < 0).any():
                problems.append(
                    (0, f"{name} must rise from 0 to {total}, the number of positions, got {_few(lengths)}")
                )
                continue
            here = torch.zeros(total, dtype=torch.bool)
            here[lengths[:-1][lengths.diff() > 0]] = True
            starts[name] = here.reshape(size)
            longest, most = int(lengths.diff().max()), batch.get(f"max_length_{name[-1]}")
            if most is not None and int(most) < longest:
                problems.append((0, f"max_length_{name[-1]} is {int(most)}, but {name} has a document of {longest}"))
    numbers = _integers(batch, "seq_idx", (1, 2))
    if numbers is not None:
        numbers = numbers.reshape(-1, numbers.shape[-1])
        if numbers.shape != size:
            raise ValueError(f"seq_idx is {list(numbers.shape)}, expected {list(size)} as the ids")
        starts["seq_idx"] = _changes(numbers)
    if mask is not None and not mask.is_floating_point() and mask.long().amax() > 1:
        starts["attention_mask"] = _changes(mask.long())
    if positions is not None and not merged:
        before = _before(positions, real)
        back = real & (before >= 0) & (positions <= before)
        if paired:  # masks of pairs come with layouts of any kind: documents are what begins anew
            back &= positions == positions[:, :1]
        if back.any():
            starts["position_ids"] = back
    for here in starts.values():
        here[:, 0] = True
    return starts


def _changes(numbers: Tensor) -> Tensor:
    return F.pad(numbers.diff(dim=-1) != 0, (1, 0))


def _before(positions: Tensor, real: Tensor) -> Tensor:
    """The position of the real token before each; -1 where there is none."""
    index = torch.arange(positions.shape[1]).expand_as(positions)
    last = torch.where(real, index, -1).cummax(-1).values
    last = F.pad(last[:, :-1], (1, 0), value=-1)
    return torch.where(last >= 0, positions.gather(1, last.clamp(min=0)), -1)


def _blocks(batch: Mapping[str, Any], size: tuple[int, int], family: Family) -> Tensor:
    blocks = torch.full(size, -1)
    types = _integers(batch, "token_type_ids", (1, 2))
    if types is None or not (family.prefix or family.images):
        return blocks
    types = types.reshape(size)
    if family.prefix:
        return torch.where(types == 0, 0, blocks)
    return torch.where(types == 1, _changes(types).long().cumsum(-1), blocks)


def _answers(batch: Mapping[str, Any], size: tuple[int, int]) -> Tensor | None:
    for name in ANSWERS:
        value = batch.get(name)
        if value is not None:
            mask = torch.as_tensor(np.asarray(value)) if not isinstance(value, Tensor) else value.cpu()
            if mask.numel() != size[0] * size[1]:
                raise ValueError(f"{name} is {list(mask.shape)}, expected {list(size)} as the ids")
            return mask.reshape(size) != 0
    return None


def _few(values: Tensor) -> str:
    return f"{values[:6].tolist()}{' ...' if len(values) > 6 else ''}"
