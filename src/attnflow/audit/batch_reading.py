"""Reads labels, documents, padding and allowed pairs from a batch, and from a model how it takes labels."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from attnflow.audit.packing import LENGTHS, allowed_pairs, as_tensor, integers, other_positions, read_packing
from attnflow.models.loaded import Loaded

IGNORED: Final = -100
_ROWS: Final = 2  # of an af.tasks.Collator's labels: target ids and weights
ANSWERS: Final = ("completion_mask", "assistant_masks", "assistant_tokens_mask")
_LABELS: Final = ("shift_labels", "labels", "targets", "target_ids", "label_ids")  # the first that is there
WEIGHTS: Final = re.compile(r"(loss|labels?|targets?|tokens?)_?weights?")
_LOSS_MASK: Final = re.compile(r"(loss|labels?|targets?|train)_?masks?")
# Entries that may tell documents, positions or losses: what is not read of them leaves the verdict open. Arguments of
# the model's own forward count as read by the model, but for those that rewrite its mask or its loss.
_TELLING: Final = re.compile(
    r".*(doc|seg|seq|pack|pos(ition)?s?(_|$)|len|bound|loss|label|target|mask|weight|ignore|perm)"
)
_DECISIVE: Final = re.compile(r".*(doc|seg|pack|loss|label|target|perm|cu_?seq)")
_HARMLESS: Final = re.compile(
    r"input_ids|inputs_embeds|position_ids|(mm_)?token_type_ids|max_length_[qk]|num_items_in_batch|special_tokens_mask"
    r"|(\w+_)?attention_mask|(image|pixel|audio|video|feature)\w*|\w*head_mask|encoder_\w+"
)
# Decoders of sequence-to-sequence families take labels where they stand, although their names end in ForCausalLM.
_UNSHIFTED: Final = frozenset(
    {"bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant", "flaubert", "marian", "mbart", "musicgen"}
    | {"musicgen_decoder", "musicgen_melody", "musicgen_melody_decoder", "mvp", "pegasus", "plbart", "trocr"}
    | {"whisper", "xlm"}
)
_ALWAYS_CAUSAL: Final = frozenset(
    {"gpt_neox", "gpt_neox_japanese", "evolla", "nemotron_h_omni"}
)  # whatever their is_decoder says
_IMAGE_BLOCKS: Final = frozenset({"gemma3", "gemma3_text", "gemma4", "gemma4_text", "t5gemma2"})
_CLASSES: Final = re.compile(
    r"For(Sequence|Token|Image|Audio|Video)\w*Classification|ForQuestionAnswering|ForMultiple|ForNextSentence"
)
_CAUSAL: Final = re.compile(r"ForCausalLM|LMHead|ForConditionalGeneration|DoubleHeads|ModelWithLMHead|Text2Text")
_MASKED: Final = re.compile(r"ForMaskedLM|ForPreTraining")


@dataclass(frozen=True)
class Family:
    name: str = ""  # the class of the model; "" where no model is given
    shift: int | None = None  # the loss takes label i from position i - shift; None if that is not known
    causal: bool | None = None  # whether positions read only what is before them; None if that is not known
    decoder: bool = False  # labels are those of the decoder of an encoder-decoder
    classes: bool = False  # labels are classes, not tokens
    prefix: bool = False  # `token_type_ids` 0 is a prefix that reads itself in both directions
    images: bool = False  # `token_type_ids` 1 are images, each reads itself in both directions
    transformers: bool = False  # the model is one of transformers, whose masks follow its rules
    vocabulary: int | None = None  # number of token ids; None if that is not known
    pad: int | None = None  # id of padding; None if that is not known
    ends: tuple[int, ...] = ()  # ids that end an answer
    layers: int | None = None  # number of layers; None if that is not known
    eager: bool = False  # attention is eager, which adds any mask to the scores
    seen: bool = False  # `shift` was read off the loss itself
    takes: frozenset[str] = frozenset()  # names of forward's arguments, of a model


def family_of(model_or_config: Any) -> Family:
    """How a model, a loaded model or a configuration takes labels; None says nothing."""
    if model_or_config is None:
        return Family()
    if isinstance(model_or_config, Loaded):
        model_or_config = model_or_config.model
    is_module = isinstance(model_or_config, nn.Module)
    config = getattr(model_or_config, "config", None) if is_module else model_or_config
    if is_module and not hasattr(config, "model_type"):
        return Family(name=type(model_or_config).__name__, takes=_arguments(model_or_config))
    if not hasattr(config, "model_type"):
        raise TypeError(
            "model_or_config must be a model, its configuration or what af.load_model returned, got "
            f"{type(model_or_config).__name__}; leave it out if you have none"
        )
    if not is_module:
        return _family(str((getattr(config, "architectures", None) or [""])[0]), config)
    getter = getattr(model_or_config, "get_base_model", None)  # wrappers, such as PEFT's, have another class
    inner = getter() if callable(getter) else getattr(model_or_config, "module", None)
    inner = inner if isinstance(inner, nn.Module) and hasattr(inner, "config") else model_or_config
    family = _family(type(inner).__name__, config)
    stops = _ends(getattr(inner, "generation_config", None))  # of a chat model they end its turns
    return replace(family, takes=_arguments(inner), ends=tuple(dict.fromkeys((*family.ends, *stops))))


def _arguments(model: nn.Module) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)


def _ends(config: Any) -> tuple[int, ...]:
    ends = getattr(config, "eos_token_id", None)
    return tuple(i for i in (ends if isinstance(ends, list | tuple) else [ends]) if isinstance(i, int))


def _family(name: str, config: Any) -> Family:
    text = getattr(config, "text_config", None) or config
    kind = str(config.model_type)
    decoder = bool(getattr(config, "is_encoder_decoder", False)) and "CausalLM" not in name
    masked, generates = _MASKED.search(name) is not None, _CAUSAL.search(name) is not None
    shift = 0 if decoder or masked or kind in _UNSHIFTED else 1 if generates else None
    is_decoder = getattr(text, "is_decoder", None)  # only families that may be either have it
    both_ways = getattr(text, "use_bidirectional_attention", None) in (True, "all")
    causal: bool | None = False if masked else True if generates and kind != "cpmant" else None  # by its segments
    if decoder or kind == "paligemma" or kind in _ALWAYS_CAUSAL:
        causal = True
    elif (
        both_ways
        or False in (getattr(text, "is_causal", True), getattr(text, "causal", True))
        or (getattr(text, "attn_type", None) == "bi")
    ):
        causal = False
    elif is_decoder is not None:
        causal = bool(is_decoder)
    return Family(
        name=name or f"{kind} configuration",
        shift=None if kind == "xlnet" else shift,  # its targets are chosen by target_mapping
        causal=causal,
        decoder=decoder,
        classes=_CLASSES.search(name) is not None,
        prefix=kind == "paligemma",
        images=kind in _IMAGE_BLOCKS,
        transformers=True,
        vocabulary=_id(getattr(text, "vocab_size", None)),
        pad=_id(getattr(text, "pad_token_id", None)),
        ends=_ends(text),
        layers=_id(getattr(text, "num_hidden_layers", None)) or None,
        eager=getattr(text, "_attn_implementation", None) == "eager",
    )


def _id(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


@dataclass(frozen=True, eq=False)
class Reading:
    # [batch, n, width] token ids; several at one position are averaged, -100 fills up. None without ids
    ids: Tensor | None
    labels: Tensor | None  # [batch, n], -100 where there is none; None without labels of this form
    targets: Tensor | None  # [batch, n, several] of `af.tasks.Collator`, each at the position that predicts it
    real: Tensor  # bool [batch, n], no padding
    padding: Tensor  # bool [batch, n], a run of the padding token at an end of the sequence, whatever the mask says
    mask: Tensor | None  # [batch, n], the 2D attention mask as it is; None without one
    positions: Tensor | None  # [batch, n]; None without position ids, or where they have several axes
    allow: Tensor | None  # bool [batch, n, n], from a mask of pairs; None without one
    numbers: str  # the type of a mask of pairs that holds zeros and ones or bool; "" for any other mask
    # {what says so: bool [batch, n], where a document begins behind another one of its sequence}
    starts: Mapping[str, Tensor]
    documents: Tensor  # [batch, n], the number of each position's document within its sequence
    blocks: Tensor  # [batch, n], positions of one block read one another in both directions; -1 elsewhere
    answers: Tensor | None  # bool [batch, n], what a mask in the batch says belongs to an answer; None without one
    counts: tuple[str, Tensor] | None  # (name, bool [batch, n]) of a mask of the labels that count; None without one
    problems: tuple[str, ...]  # why boundaries of documents cannot be believed
    unread: list[tuple[str, str]]  # what could not be read, (what, why)
    single: bool  # each sequence is one document, as the caller says
    patched: bool  # the caller says that the model keeps the documents of a counting mask apart
    unknown: tuple[str, ...]  # entries that may name documents, positions or losses, and were not read

    @property
    def shape(self) -> tuple[int, int]:
        return self.real.shape[0], self.real.shape[1]


def read_batch(batch: Mapping[str, Any], family: Family, documents: str | None = None) -> Reading:
    """The contents of a batch whose labels are taken as `family` takes them; `documents` is an entry, or "rows"."""
    prefix = "decoder_" if family.decoder or batch.get("decoder_input_ids") is not None else ""
    ids = integers(batch, f"{prefix}input_ids", (1, 2, 3))
    name = next((name for name in _LABELS if batch.get(name) is not None), "labels")
    labels = None if family.classes else integers(batch, name, (1, 2, 4))
    if ids is None and labels is None:
        raise ValueError(
            f"expected {prefix}input_ids or labels among the batch's entries, got {sorted(batch)}: pass what the data "
            "loader gives to the model"
        )
    if cast(Tensor, labels if ids is None else ids).ndim == 1:
        ids, labels = (None if value is None else value[None] for value in (ids, labels))
    rows, columns, *_ = cast(Tensor, labels if ids is None else ids).shape
    size = rows, columns
    if labels is not None and labels.shape[:2] != size:
        raise ValueError(f"labels are {list(labels.shape)} and {prefix}input_ids {list(cast(Tensor, ids).shape)}")
    targets, plain = None, labels
    if labels is not None and labels.ndim == 4:
        if labels.shape[2] != _ROWS:
            raise ValueError(f"expected labels [batch, n] or those of an af.tasks.Collator, got {list(labels.shape)}")
        targets, plain = labels[:, :, 0, 1:], None
    ids = ids[..., None] if ids is not None and ids.ndim == 2 else ids
    mask, allow = _masks(batch.get(f"{prefix}attention_mask"), size)
    made = ids if ids is not None or plain is None else plain[..., None]  # a decoder's inputs are made of its labels
    padding = torch.zeros(size, dtype=torch.bool) if made is None else _padding(made, family)
    if prefix and ids is None and plain is not None:
        mask = ((plain != IGNORED) & ~padding).long() if mask is None else mask
    real = mask != 0 if mask is not None else ~padding if allow is None else torch.ones_like(padding)
    real = real if allow is None else real & ~_isolated(allow)
    positions, more = _positions(batch.get(f"{prefix}position_ids"), size), None
    if positions is None and (more := other_positions(batch, size)) is not None:
        positions = more[1]
    counted = positions if targets is None else None  # else several stand for one token, where no document begins
    starts, problems = read_packing(batch, real, mask, counted, from_lowest=allow is not None)
    if more is not None and "position_ids" in starts:
        starts[more[0]] = starts.pop("position_ids")
    counts = _counts(batch, size)
    read = {
        *ANSWERS,
        name,
        *starts,
        *(("labels",) if name == "shift_labels" else ()),
        *(part[0] for part in (more, counts) if part is not None),
    }
    starts = {key: begins for key, begins in starts.items() if begins.any() or not LENGTHS.fullmatch(key)}
    if documents is not None and documents != "rows":
        starts = {documents: starts[documents], **starts} if documents in starts else starts
    unknown = [key for key in batch if batch[key] is not None and not _is_read(key, read, problems, family)]
    unread: list[tuple[str, str]] = []
    if positions is not None and positions.ndim == 3:
        unread.append(("position_ids", f"they have {len(positions)} axes: all but where time goes back"))
        positions = None
    return Reading(
        ids=ids,
        labels=plain,
        targets=targets,
        real=real,
        padding=padding,
        mask=mask,
        positions=positions,
        allow=allow,
        numbers=_zeros_and_ones(batch.get(f"{prefix}attention_mask")),
        starts=starts,
        documents=next(iter(starts.values()), torch.zeros_like(real)).cumsum(-1),
        blocks=_blocks(batch, size, family),
        answers=_answers(batch, size),
        counts=counts,
        problems=problems,
        unread=unread,
        single=documents == "rows",
        patched=documents == "attention_mask",
        unknown=tuple(unknown),
    )


def _masks(value: Any, size: tuple[int, int]) -> tuple[Tensor | None, Tensor | None]:
    """(2D mask, allowed pairs [batch, n, n]); pairs are the union over heads, and over layers that differ."""
    if value is None:
        return None, None
    parts = list(cast(Mapping[str, Any], value).values()) if isinstance(value, Mapping) else [value]
    pairs = [each for part in parts if part is not None and (each := allowed_pairs(part, *size)) is not None]
    if pairs:
        return None, torch.stack([each.expand(size[0], -1, -1) for each in pairs]).any(0)
    if isinstance(value, Mapping):
        return None, None
    mask = as_tensor(value)
    mask = mask.reshape(-1, mask.shape[-1])
    if mask.shape != size:
        raise ValueError(f"attention_mask is {list(mask.shape)}, expected {list(size)} as the ids")
    return mask, None


def _zeros_and_ones(value: Any) -> str:
    parts = list(cast(Mapping[str, Any], value).values()) if isinstance(value, Mapping) else [value]
    for mask in [as_tensor(part) for part in parts if part is not None and not isinstance(part, BlockMask)]:
        if mask.ndim == 4 and bool(((mask == 0) | (mask == 1)).all() & (mask == 1).any()):
            return str(mask.dtype).removeprefix("torch.")
    return ""


def _isolated(allow: Tensor) -> Tensor:
    """Runs at the ends of sequences that read nothing else and that nothing else reads: padding in masks of pairs."""
    others = allow & ~torch.eye(allow.shape[-1], dtype=torch.bool)
    alone = _runs(~(others.any(1) | others.any(2)))
    return alone & ~alone.all(-1, keepdim=True)


def _runs(marked: Tensor) -> Tensor:
    ends = marked.long()
    return (ends.cumprod(-1) + ends.flip(-1).cumprod(-1).flip(-1)) > 0


def _padding(ids: Tensor, family: Family) -> Tensor:
    if ids.shape[-1] > 1 or family.pad is None:
        return torch.zeros(ids.shape[:2], dtype=torch.bool)
    run = _runs(ids[..., 0] == family.pad)
    if family.decoder:  # the last token of padding before the text is the one that decoders start with
        run &= ~run.long().cumprod(-1).bool() | F.pad(run[:, 1:], (0, 1))
    if family.pad in family.ends:  # one of them ends the text
        after = F.pad(run[:, :-1], (1, 0))
        run = run & (after | (run.long().cumprod(-1) > 0))
    return run & ~run.all(-1, keepdim=True)


def _positions(value: Any, size: tuple[int, int]) -> Tensor | None:
    """[batch, n], or [axes, batch, n]."""
    positions = integers({"position_ids": value}, "position_ids", (1, 2, 3))
    if positions is None or positions.ndim == 3:
        return positions
    positions = torch.atleast_2d(positions)
    if positions.shape[1] != size[1] or len(positions) not in (1, size[0]):
        raise ValueError(f"position_ids are {list(positions.shape)}, expected {list(size)} as the ids")
    return positions.expand(size)


def _blocks(batch: Mapping[str, Any], size: tuple[int, int], family: Family) -> Tensor:
    types = integers(batch, "token_type_ids", (1, 2))
    if types is None or not (family.prefix or family.images):
        return torch.full(size, -1)
    types = types.reshape(size)
    if family.prefix:
        return torch.where(types == 0, 0, -1)
    starts = F.pad(types.diff(dim=-1) != 0, (1, 0))
    return torch.where(types == 1, starts.cumsum(-1), -1)


def _answers(batch: Mapping[str, Any], size: tuple[int, int]) -> Tensor | None:
    name = next((name for name in ANSWERS if batch.get(name) is not None), None)
    if name is None:
        return None
    mask = as_tensor(batch[name])
    if mask.numel() != size[0] * size[1]:
        raise ValueError(f"{name} is {list(mask.shape)}, expected {list(size)} as the ids")
    return mask.reshape(size) != 0


def _is_read(key: str, read: set[str], problems: tuple[str, ...], family: Family) -> bool:
    plain = key.removeprefix("decoder_")
    if plain in read or _HARMLESS.fullmatch(plain) or any(problem.startswith(f"{key} ") for problem in problems):
        return True
    return not (_DECISIVE if key in family.takes else _TELLING).match(key.lower())


def _counts(batch: Mapping[str, Any], size: tuple[int, int]) -> tuple[str, Tensor] | None:
    for name in filter(_LOSS_MASK.fullmatch, batch):
        mask = as_tensor(batch[name])
        if mask.numel() == size[0] * size[1] and bool(((mask == 0) | (mask == 1)).all()):
            return name, mask.reshape(size) != 0
    return None
