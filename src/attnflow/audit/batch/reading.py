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

from attnflow.audit import packing
from attnflow.audit.packing import LENGTHS, allowed_pairs, as_tensor, integers, other_positions, read_packing
from attnflow.models.subject import Loaded, unwrapped

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
)  # as is_decoder or not
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


def model_of(given: Any) -> Any:
    model = given.model if isinstance(given, Loaded) else given
    return unwrapped(model) if isinstance(model, nn.Module) else model


def family_of(model_or_config: Any) -> Family:
    model = model_of(model_or_config)
    if model is None:
        return Family()
    if not isinstance(model, nn.Module):
        if not hasattr(model, "model_type"):
            raise TypeError(
                "model_or_config must be a model, its configuration or what af.load_model returned, got "
                f"{type(model).__name__}; leave it out if you have none"
            )
        return _family(str((getattr(model, "architectures", None) or [""])[0]), model)
    getter = getattr(model, "get_base_model", None)  # wrappers, such as PEFT's, have another class
    inner = getter() if callable(getter) else getattr(model, "module", None)
    config = getattr(model, "config", None)
    if not isinstance(inner, nn.Module) or not hasattr(inner, "config") or not hasattr(config, "model_type"):
        inner = model
    takes = frozenset(inspect.signature(inner.forward).parameters)
    if not hasattr(config, "model_type"):
        return Family(name=type(model).__name__, takes=takes)
    family = _family(type(inner).__name__, config)
    stops = _ends(getattr(inner, "generation_config", None))  # of a chat model they end its turns
    return replace(family, takes=takes, ends=tuple(dict.fromkeys((*family.ends, *stops))))


def _family(name: str, config: Any) -> Family:
    text = getattr(config, "text_config", None) or config
    kind = str(config.model_type)
    decoder = bool(getattr(config, "is_encoder_decoder", False)) and "CausalLM" not in name
    masked, generates = _MASKED.search(name) is not None, _CAUSAL.search(name) is not None
    shift = 0 if decoder or masked or kind in _UNSHIFTED else 1 if generates else None
    is_decoder = getattr(text, "is_decoder", None)  # only families that may be either have it
    both_ways = getattr(text, "use_bidirectional_attention", None) in (True, "all")
    both_ways |= False in (getattr(text, "is_causal", True), getattr(text, "causal", True))
    both_ways |= getattr(text, "attn_type", None) == "bi"
    causal: bool | None = False if masked else True if generates and kind != "cpmant" else None  # by its segments
    if decoder or kind == "paligemma" or kind in _ALWAYS_CAUSAL:
        causal = True
    elif both_ways or is_decoder is not None:
        causal = not both_ways and bool(is_decoder)
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


def _ends(config: Any) -> tuple[int, ...]:
    ends = getattr(config, "eos_token_id", None)
    return tuple(i for i in (ends if isinstance(ends, list | tuple) else [ends]) if isinstance(i, int))


def _id(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


@dataclass(frozen=True, eq=False)
class BatchReading:
    """What the entries of a batch mean; B sequences of n positions."""

    ids: Tensor | None  # [B, n, width] token ids; several at one position are averaged, -100 fills up
    labels: Tensor | None  # [B, n], -100 where there is none; None without labels of this form
    targets: Tensor | None  # [B, n, several] of `af.tasks.Collator`, each at the position that predicts it
    real: Tensor  # bool [B, n], no padding
    padding: Tensor  # bool [B, n], a run of the padding token at an end of the sequence, whatever the mask says
    mask: Tensor | None  # [B, n], the 2D attention mask as it is; None without one
    positions: Tensor | None  # [B, n]; None without position ids, or where they have several axes
    allow: Tensor | None  # bool [B, n, n], from a mask of pairs; None without one
    numbers: str  # the type of a mask of pairs that holds zeros and ones or bool; "" for any other mask
    starts: Mapping[str, Tensor]  # {what says so: bool [B, n], where a document begins behind another one}
    documents: Tensor  # [B, n], the number of each position's document within its sequence
    blocks: Tensor  # [B, n], positions of one block read one another in both directions; -1 elsewhere
    answers: Tensor | None  # bool [B, n], what a mask in the batch says belongs to an answer; None without one
    counts: tuple[str, Tensor] | None  # (name, bool [B, n]) of a mask of the labels that count; None without one
    problems: tuple[str, ...]  # why boundaries of documents cannot be believed
    axes: int  # of position ids that are not read, as they have several; else 0
    single: bool  # each sequence is one document, as the caller says
    patched: bool  # the caller says that the model keeps the documents of a counting mask apart
    unknown: tuple[str, ...]  # entries that may name documents, positions or losses, and were not read

    @property
    def shape(self) -> tuple[int, int]:
        return self.real.shape[0], self.real.shape[1]

    def parts(self) -> list[tuple[int, Tensor]]:
        """Each document: its row, and where its real positions are, bool [n]."""
        rows = enumerate(zip(self.documents, self.real, strict=True))
        return [(row, (d == number) & real) for row, (d, real) in rows for number in d[real].unique().tolist()]

    def ended(self, ends: tuple[int, ...]) -> Tensor:
        """Where a real token is one of the `ends`, bool [B, n]."""
        assert self.ids is not None
        return torch.isin(self.ids[..., 0], torch.tensor(ends)) & self.real


def read_batch(batch: Mapping[str, Any], family: Family, documents: packing.Documents = None) -> BatchReading:
    """The contents of a batch whose labels are taken as `family` takes them; `documents` are those of `check_batch`."""
    prefix = "decoder_" if family.decoder or batch.get("decoder_input_ids") is not None else ""
    ids = integers(batch, f"{prefix}input_ids", (1, 2, 3))
    name = next((name for name in _LABELS if batch.get(name) is not None), "labels")
    labels = None if family.classes else integers(batch, name, (1, 2, 4))
    if ids is None and labels is None:
        raise ValueError(
            f"expected {prefix}input_ids or labels among the batch's entries, got {sorted(batch)}: pass what the data "
            "loader gives to the model"
        )
    if flat := cast(Tensor, labels if ids is None else ids).ndim == 1:
        ids, labels = (None if value is None else value[None] for value in (ids, labels))
    rows, columns, *_ = cast(Tensor, labels if ids is None else ids).shape
    size = rows, columns
    targets, plain = None, labels
    if labels is not None and labels.shape[:2] != size:
        raise ValueError(f"labels are {list(labels.shape)} and {prefix}input_ids {list(cast(Tensor, ids).shape)}")
    if labels is not None and labels.ndim == 4:
        if labels.shape[2] != _ROWS:
            raise ValueError(f"expected labels [batch, n] or those of an af.tasks.Collator, got {list(labels.shape)}")
        targets, plain = labels[:, :, 0, 1:], None
    ids = ids[..., None] if ids is not None and ids.ndim == 2 else ids
    mask, allow, numbers = _masks(batch.get(f"{prefix}attention_mask"), size)
    made = ids if ids is not None or plain is None else plain[..., None]  # a decoder's inputs are made of its labels
    padding = torch.zeros(size, dtype=torch.bool) if made is None else _padding(made, family)
    if prefix and ids is None and plain is not None:
        mask = ((plain != IGNORED) & ~padding).long() if mask is None else mask
    real = mask != 0 if mask is not None else ~padding | (allow is not None)
    real = real if allow is None else real & ~_isolated(allow)
    positions, titles = _positions(batch.get(f"{prefix}position_ids"), size), dict[str, str]()
    if positions is None and (more := other_positions(batch, size)) is not None:
        titles, positions = {"position_ids": more[0]}, more[1]
    counted = positions if targets is None else None  # else several stand for one token, where no document begins
    starts, problems = read_packing(batch, real, mask, counted, from_lowest=allow is not None)
    starts = {titles.get(key, key): begins for key, begins in starts.items()}
    told, begins = packing.starts_by(batch, documents, real, flat)
    starts |= {} if begins is None else {told: begins}
    answers = next((found for name in ANSWERS if (found := _per_token(batch, name, size)) is not None), None)
    losses = ((name, _per_token(batch, name, size, strict=False)) for name in filter(_LOSS_MASK.fullmatch, batch))
    counts = next(((name, mask) for name, mask in losses if mask is not None), None)
    read = {*ANSWERS, name, *starts, *titles.values(), *(counts or ())[:1], *("labels",) * (name == "shift_labels")}
    starts = {key: begins for key, begins in starts.items() if begins.any() or not LENGTHS.fullmatch(key)}
    starts = dict(sorted(starts.items(), key=lambda item: item[0] != told))
    several = 0 if positions is None or positions.ndim < 3 else len(positions)
    return BatchReading(
        ids=ids,
        labels=plain,
        targets=targets,
        real=real,
        padding=padding,
        mask=mask,
        positions=None if several else positions,
        allow=allow,
        numbers=numbers,
        starts=starts,
        documents=next(iter(starts.values()), torch.zeros_like(real)).cumsum(-1),
        blocks=_blocks(batch, size, family),
        answers=answers,
        counts=counts,
        problems=problems,
        axes=several,
        single=told == "rows",
        patched=told == "attention_mask",
        unknown=tuple(k for k in batch if batch[k] is not None and not _is_read(k, read, problems, family)),
    )


def _masks(value: Any, size: tuple[int, int]) -> tuple[Tensor | None, Tensor | None, str]:
    """(2D mask, allowed pairs [B, n, n], type of zeros and ones); of several heads and layers the union of pairs."""
    layered = isinstance(value, Mapping)
    parts = [part for part in (cast(Any, value).values() if layered else [value]) if part is not None]
    pairs = [allow for part in parts if (allow := allowed_pairs(part, *size)) is not None]
    numbers = ""
    for part in [as_tensor(part) for part in parts if not isinstance(part, BlockMask)]:
        if part.ndim == 4 and not numbers and bool(((part == 0) | (part == 1)).all() & (part == 1).any()):
            numbers = str(part.dtype).removeprefix("torch.")
    if pairs:
        return None, torch.stack([allow.expand(size[0], -1, -1) for allow in pairs]).any(0), numbers
    if layered or not parts:
        return None, None, ""
    mask = as_tensor(value)
    mask = mask.reshape(-1, mask.shape[-1])
    if mask.shape != size:
        raise ValueError(f"attention_mask is {list(mask.shape)}, expected {list(size)} as the ids")
    return mask, None, ""


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
    """[B, n], or [axes, B, n]."""
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


def _per_token(batch: Mapping[str, Any], name: str, size: tuple[int, int], strict: bool = True) -> Tensor | None:
    """A mask of tokens, bool [B, n]; None if it is missing or, unless `strict`, has another form."""
    if batch.get(name) is None:
        return None
    mask = as_tensor(batch[name])
    fits = mask.numel() == size[0] * size[1]
    if strict and not fits:
        raise ValueError(f"{name} is {list(mask.shape)}, expected {list(size)} as the ids")
    return mask.reshape(size) != 0 if fits and (strict or ((mask == 0) | (mask == 1)).all()) else None


def _is_read(key: str, read: set[Any], problems: tuple[str, ...], family: Family) -> bool:
    plain = key.removeprefix("decoder_")
    if plain in read or _HARMLESS.fullmatch(plain) or any(problem.startswith(f"{key} ") for problem in problems):
        return True
    return not (_DECISIVE if key in family.takes else _TELLING).match(key.lower())


def moved(values: Tensor, offset: int, fill: int | bool) -> Tensor:
    """`values[:, i + offset]` at i, `fill` outside of the row."""
    rolled = values.roll(-offset, 1)
    rolled[:, slice(-offset, None) if offset > 0 else slice(-offset)] = fill
    return rolled


def beside_ends(begins: Tensor, ends: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """(documents that begin one token early, one token late, by the end tokens before them), bool [batch, n].

    Rows that begin with an end token have these in front of documents, and in ChatML a newline follows each.
    """
    count = real.cumsum(-1)
    first, last = real & (count == 1), real & (count == count[:, -1:])
    plain = (last & ends).any(-1, keepdim=True) & ~(first & ends).any(-1, keepdim=True)
    off = begins & ~moved(ends, -1, False) & plain
    late = off & moved(ends, -2, False) & ~moved(begins, -1, False)
    return off & ends & ~late & moved(real & ~ends & ~begins, 1, False), late
