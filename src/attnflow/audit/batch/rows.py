"""Rows of data (token ids, messages or texts) as one batch, padded or packed as collators do.

A row of messages, of a prompt with its completion, or of text becomes token ids with the mask of its answers.
"""

from __future__ import annotations

import inspect
import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attnflow._core.markup import plural
from attnflow._core.plain import kind_of
from attnflow.audit.batch.reading import ANSWERS, IGNORED, Family
from attnflow.audit.packing import numbers_of

_MASKS: Final = (*ANSWERS, "loss_mask")
_WHOLE: Final = ("input_ids", "labels", "position_ids")
_TOKENS: Final = (*_WHOLE, "attention_mask", "token_type_ids", *_MASKS)  # columns of one number for each token
_LENGTHS: Final = "seq_lengths"  # of documents in TRL's packed rows, which may be as many as tokens
_DOCUMENTS: Final = re.compile("len|seq|doc|seg|bound|split", re.IGNORECASE)  # names of what separates documents

_GENERATION: Final = re.compile(r"\{%-?\s*generation")  # marks answers in a chat template
_FORMS: Final = "input_ids, messages, prompt with completion, or text"
_TEMPLATE: Final = ("tools", "chat_template_kwargs")
_USED: Final = {"messages": ("messages", *_TEMPLATE), "prompt": ("prompt", "completion", *_TEMPLATE), "text": ("text",)}
_OTHER_FORMS: Final = {  # a column of another form: what to do
    "conversations": 'write ShareGPT\'s conversations as messages: "from" is role (human is user, gpt is assistant), '
    '"value" is content',
    "chosen": "of a preference pair give the prompt with one answer as completion",
    "instruction": "join instruction and input as prompt, and name the output completion",
    "prompt": "a prompt needs a completion",
    "completion": "a completion needs a prompt",
}


@runtime_checkable
class DataRows(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class RowBatch:
    tensors: dict[str, Tensor]
    starts: tuple[int, ...]  # of packed rows: the position where each begins; () for padded rows
    notes: tuple[str, ...]  # what was made of the rows, and what was not read
    documents: str | None  # "rows" if each padded row is one document by its form; None if that is not known

    def place(self, sequence: int, position: int) -> tuple[int, int]:
        row = bisect_right(self.starts, position) - 1 if self.starts else sequence
        return row, position - self.starts[row] if self.starts else position


def as_batch(
    rows: object,
    tokenizer: Any = None,
    family: Family | None = None,
    *,
    pack: bool = False,
    limit: int | None = None,
    places: Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
) -> RowBatch:
    """Make a batch of the first `limit` rows, as collators of transformers and TRL do; messages call them `places`."""
    if isinstance(rows, str) or not isinstance(rows, DataRows):
        raise TypeError(
            "expected a batch as a mapping, a list of rows or a dataset with len() and [i], got "
            f"{type(rows).__name__}; of a loader or a stream pass what it gives first: next(iter(...))"
        )
    family, total = family or Family(), len(rows)
    count = total if limit is None else min(limit, total)
    if not count:
        raise ValueError("expected at least one row of data, got none")
    places = places or [f"row {index}" for index in range(count)]
    remarks, table = dict[str, list[str]](), list[_Row]()
    for index, place in zip(range(count), places, strict=False):
        try:
            values = rows[index]
        except (KeyError, IndexError, TypeError) as error:
            what = f"expected rows[{index}] to be a row, but this {type(rows).__name__} has none"
            raise TypeError(f"{what}: pass a list of dicts") from error
        try:
            row = _Row(values, tokenizer, family, rename or {})
            table.append(row)
            for column in sorted(table[0].given ^ row.given):
                has, other = ("has", "does not") if column in row.given else ("has no", "does")
                raise ValueError(f"it {has} {column}, and {places[0]} {other}: give all rows the same columns")
            row.label(family)
            if pack:
                row.pack(family)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        for remark in row.remarks:
            remarks.setdefault(remark, []).append(place)
    notes = [text if len(which) == count else f"{_few(which)}: {text}" for text, which in remarks.items()]
    notes += [f"only the first {count} of {total} rows were read"] if count < total else []
    if not pack:
        padding = getattr(tokenizer, "pad_token_id", None) if family.pad is None else family.pad
        return _padded(table, padding, notes)
    sizes = torch.tensor([len(row.columns["input_ids"]) for row in table])
    tensors = {name: torch.cat([row.columns[name] for row in table])[None] for name in table[0].columns}
    return RowBatch(tensors, tuple((sizes.cumsum(0) - sizes).tolist()), tuple(notes), None)


def _padded(table: Sequence[_Row], padding: int | None, notes: list[str]) -> RowBatch:
    joined = {name: [row.columns[name] for row in table] for name in table[0].columns}
    if len({len(ids) for ids in joined["input_ids"]}) > 1:
        joined.setdefault("attention_mask", [torch.ones_like(ids) for ids in joined["input_ids"]])
        notes += ["padded with token 0, as no model or tokenizer names the padding token"] if padding is None else []
    fill = {"input_ids": padding or 0, "decoder_input_ids": padding or 0, "labels": IGNORED}
    tensors = {name: pad_sequence(values, True, fill.get(name, 0)) for name, values in joined.items()}
    documents = "rows" if "input_ids" not in table[0].given else None  # messages and texts are not packed
    return RowBatch(tensors, (), tuple(notes), documents)


class _Row:
    def __init__(self, row: Any, tokenizer: Any, family: Family, rename: Mapping[str, str]) -> None:
        if not isinstance(row, Mapping):
            raise ValueError(f"expected an object with {_FORMS}, got {kind_of(row):.80}")
        values = {rename.get(name, str(name)): value for name, value in row.items() if value is not None}
        self.remarks: list[str] = []
        self.learned, form = "", "input_ids"
        if form not in values:
            values, form, self.learned = _tokenized(values, tokenizer, self.remarks)
        ids = _whole("input_ids", values.pop("input_ids"))
        size = len(tokenizer) if tokenizer is not None and family.vocabulary is None else None
        if size is not None and ids.max() >= size:
            raise ValueError(f"token {ids.max()} at position {ids.argmax()} is not one of the tokenizer's {size}")
        self.columns, unread = {"input_ids": ids}, list[str]()
        self.documents: Tensor | None = None  # their positions, each from 0
        for name, value in values.items():
            other_half = family.decoder and (name == "labels" or name.startswith("decoder_"))
            numbers = _whole(name, value) if name in _TOKENS and not family.classes else _numbers(value)
            if numbers is not None and (other_half or (len(numbers) == len(ids) and name != _LENGTHS)):
                self.columns[name] = numbers.long() if numbers.dtype == torch.bool else numbers
            elif numbers is not None and name in _TOKENS:
                raise ValueError(f"{name} has {len(numbers)} entries and input_ids {len(ids)}: it needs one per token")
            elif numbers is not None and _DOCUMENTS.search(name):
                self.documents = _positions(name, numbers, len(ids))
                self.remarks.append(f"documents: position_ids restart where {name} says, as in TRL's collator")
            else:
                unread.append(name)
        if unread:
            self.remarks.append(f"not read, as they hold no number for each token: {', '.join(sorted(unread))}")
        self.given = {form, *self.columns} if form == "input_ids" else {form}
        if self.documents is not None and not torch.equal(
            self.columns.setdefault("position_ids", self.documents), self.documents
        ):
            raise ValueError("its position_ids do not restart where its lengths say that a document begins")

    def label(self, family: Family) -> None:
        if "labels" in self.columns:
            return
        kept = self.columns.get("attention_mask", torch.ones_like(self.columns["input_ids"])) != 0
        masks = {name: self.columns.pop(name) for name in _MASKS if name in self.columns}
        if family.name and family.shift != 1:
            self.remarks.append(f"labels: none, and {family.name} does not learn the next token of its input")
            return
        for mask in masks.values():
            kept &= mask == 1
        self.columns["labels"] = torch.where(kept, self.columns["input_ids"], IGNORED)
        where = f"the tokens where {' and '.join(masks)} is 1" if masks else "all tokens, as no column marks answers"
        self.remarks.append(f"labels: {self.learned or where}")

    def pack(self, family: Family) -> None:
        """Number positions from 0, ignore the labels of first tokens, and drop what collators do not pack."""
        places = torch.arange(len(self.columns["input_ids"])) if self.documents is None else self.documents
        given, mask = self.columns.get("position_ids", places), self.columns.get("attention_mask")
        if family.decoder:
            raise ValueError(f"rows of {family.name}, which has an encoder and a decoder, are not packed: pad them")
        if mask is not None and (mask != 1).any():
            raise ValueError("its attention_mask is not 1 everywhere: packing drops it, so that its padding is read")
        if self.documents is None and (given.diff() <= 0).any():
            raise ValueError(f"its position_ids restart, which packing undoes: give {_LENGTHS}, or do not pack")
        if "labels" in self.columns:
            self.columns["labels"] = self.columns["labels"].masked_fill(places == 0, IGNORED)
        kept = {name: self.columns[name] for name in ("input_ids", "labels", *_MASKS) if name in self.columns}
        left = sorted(self.columns.keys() - kept.keys() - {"position_ids", "attention_mask"})
        self.remarks += [f"left out, as packing collators do: {', '.join(left)}"] if left else []
        self.columns = {**kept, "position_ids": places}


def _numbers(value: Any) -> Tensor | None:
    tensor = numbers_of(value)
    return tensor if tensor is not None and tensor.ndim == 1 and not tensor.is_complex() else None


def _whole(name: str, value: Any) -> Tensor:
    numbers = _numbers(value)
    items: list[Any] = list(value) if isinstance(value, list | tuple) else [] if numbers is None else numbers.tolist()
    kinds = (int,) if name in _WHOLE else (int, float, bool)  # masks may also be bool or 0.0 and 1.0
    what = (
        "" if items else "an empty list" if isinstance(value, list | tuple) or numbers is not None else kind_of(value)
    )
    for position, item in enumerate(items):
        item = item.item() if hasattr(item, "item") else item
        if type(item) not in kinds or item % 1 or not -(2**63) <= item < 2**63:
            what = what or f"{kind_of(item)} at position {position}"
    if what or numbers is None:
        raise ValueError(f"{name} must be one list of whole numbers, got {what}")
    if name in _MASKS and not ((numbers == 0) | (numbers == 1)).all():
        raise ValueError(f"{name} must hold 0 and 1, got {numbers.max().item()}")
    return numbers.long()


def _positions(name: str, numbers: Tensor, tokens: int) -> Tensor:
    """The positions of one row's documents, each from 0, by their lengths or boundaries."""
    bounds = len(numbers) > 1 and numbers[0] == 0 and numbers[-1] == tokens
    lengths = numbers.diff() if bounds else numbers
    if lengths.is_floating_point() or (lengths <= 0).any() or lengths.sum() != tokens:
        raise ValueError(
            f"{name} holds {numbers[:6].tolist()}: expected the lengths of its documents, which add up to its {tokens} "
            f"tokens, or boundaries that rise from 0 to {tokens}; leave the column out if it is about something else"
        )
    return torch.cat([torch.arange(length) for length in lengths.tolist()])


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _tokenized(row: Mapping[str, Any], tokenizer: Any, remarks: list[str]) -> tuple[dict[str, Any], str, str]:
    """(the columns, with input_ids and completion_mask; what they come from; what is learned), as TRL makes them."""
    prompt, completion = row.get("prompt"), row.get("completion")
    paired = prompt is not None and completion is not None
    form = "messages" if "messages" in row else "prompt" if paired else "text"
    if form not in row:
        advice = next((advice for name, advice in _OTHER_FORMS.items() if name in row), "rename the columns")
        raise ValueError(f"expected {_FORMS}, got {', '.join(sorted(row)) or 'an empty row'}: {advice}")
    if tokenizer is None:
        raise ValueError(
            "messages and text need a tokenizer: pass what af.load_model returns (on the command line --model or "
            "--tokenizer), or rows with input_ids"
        )
    start, learned = 0, "all tokens of text"
    others = {name: value for name, value in row.items() if name not in _USED[form]}
    if form == "messages":
        ids, mask, learned = _Chat(row, tokenizer).answers(_messages(form, row[form]))
        return {**others, "input_ids": ids, "completion_mask": mask}, form, learned
    if form == "text":
        ids = tokenizer(text=_ended(form, row[form], tokenizer, remarks))["input_ids"]
    else:
        if isinstance(prompt, str):
            alone = tokenizer(text=prompt)["input_ids"]
            ids = tokenizer(text=prompt + _ended("completion", completion, tokenizer, remarks))["input_ids"]
        else:
            chat, question = _Chat(row, tokenizer), _messages(form, prompt)
            alone = chat.render(question, add_generation_prompt=True)["input_ids"]
            ids = chat.render([*question, *_messages("completion", completion)])["input_ids"]
        pairs = enumerate(zip(alone, ids, strict=False))
        start = next((i for i, (a, b) in pairs if a != b), min(len(alone), len(ids)))
        learned = "the tokens of completion"
        if start < len(alone):
            remarks.append(
                f"the prompt's last {plural(len(alone) - start, 'token')} change when the completion follows: the "
                "model learns to continue another prompt than it will be given"
            )
    return {**others, "input_ids": ids, "completion_mask": [0] * start + [1] * (len(ids) - start)}, form, learned


def _ended(name: str, text: Any, tokenizer: Any, remarks: list[str]) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{name} must be text{' like prompt' if name == 'completion' else ''}, got {kind_of(text)}")
    end = tokenizer.eos_token or ""
    if not text.endswith(end):
        remarks.append(f"{name} gets the end token {end} behind it, as in TRL")
    return text if text.endswith(end) else text + end


def _messages(name: str, value: Any) -> list[dict[str, Any]]:
    messages: list[Any] = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if not messages:
        what = "an empty list" if isinstance(value, Sequence) and not len(value) else kind_of(value)
        raise ValueError(f"{name} must be a list of objects with role and content, got {what}")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            has = ", ".join(map(str, message)) if isinstance(message, Mapping) else kind_of(message)
            hint = f": {_OTHER_FORMS['conversations']}" if isinstance(message, Mapping) and "from" in message else ""
            raise ValueError(f"message {number} of {name} must have a role and content, got {has}{hint}")
    return cast(list[dict[str, Any]], messages)


class _Chat:
    def __init__(self, row: Mapping[str, Any], tokenizer: Any) -> None:
        tools, more = row.get("tools"), row.get("chat_template_kwargs") or {}
        taken = [name for name in more if name in inspect.signature(tokenizer.apply_chat_template).parameters]
        if taken:
            raise ValueError(f"chat_template_kwargs sets {', '.join(taken)}, which is not for a row to set")
        try:
            self.options = {**more, "tools": json.loads(tools) if isinstance(tools, str) else tools}
        except ValueError as error:
            raise ValueError(f"tools must be a list of objects, or that as JSON, got {tools!r:.40}") from error
        self.tokenizer = tokenizer

    def render(self, messages: list[dict[str, Any]], **more: bool) -> Any:
        if not self.tokenizer.chat_template:
            raise ValueError("messages need a chat template, and the tokenizer has none: give text or input_ids")
        parts = [str(m["content"]) for m in messages if not isinstance(m.get("content", ""), str | None)]
        hint = "; it may not know content as a list of parts: give text" if parts else ""
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **self.options) if parts else ""
            read = self.tokenizer.apply_chat_template(messages, return_dict=True, **self.options, **more)
        except Exception as error:  # a template raises whatever it likes
            why = (str(error).splitlines() or [""])[0]
            raise ValueError(f"the chat template refuses its messages: {type(error).__name__}: {why}{hint}") from error
        if any(part in text for part in parts):
            raise ValueError("the chat template writes a list of parts as Python prints it: give content as text")
        return read

    def answers(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[int], str]:
        """(tokens, mask of what is learned, in words): the assistant's tokens, or all where these are not known."""
        ids = self.render(messages)["input_ids"]
        if _GENERATION.search(self.tokenizer.get_chat_template(tools=self.options["tools"])):
            mask = self.render(messages, return_assistant_tokens_mask=True)["assistant_masks"]
            return ids, mask, "what the chat template marks as the assistant's"
        mask = [0] * len(ids)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                try:
                    before = self.render(messages[:number], add_generation_prompt=True)["input_ids"]
                    behind = self.render(messages[: number + 1])["input_ids"]
                except ValueError:
                    before = behind = [None]
                if ids[: len(before)] != before or ids[: len(behind)] != behind:
                    why = "the chat template marks no answers, and renders messages otherwise when more follow"
                    return ids, [1] * len(ids), f"all tokens, of prompts, too: {why}"
                mask[len(before) : len(behind)] = [1] * (len(behind) - len(before))
        learned = "the assistant's messages, by the length of what is before them (the chat template marks none)"
        return ids, mask, learned
