"""Tokens of a row of messages, of a prompt with its completion, or of text, with the mask of its answers."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from attnflow._core.markup import plural
from attnflow._core.plain import kind_of

_GENERATION: Final = re.compile(r"\{%-?\s*generation")  # marks answers in a chat template
FORMS: Final = "input_ids, messages, prompt with completion, or text"
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


def tokenized(row: Mapping[str, Any], tokenizer: Any, remarks: list[str]) -> tuple[dict[str, Any], str, str]:
    """(the columns, with input_ids and completion_mask; what they come from; what is learned), as TRL makes them.

    The chat template is the tokenizer's, which transformers renders in a sandbox; a row brings none.
    """
    prompt, completion = row.get("prompt"), row.get("completion")
    paired = prompt is not None and completion is not None
    form = "messages" if "messages" in row else "prompt" if paired else "text"
    if form not in row:
        advice = next((advice for name, advice in _OTHER_FORMS.items() if name in row), "rename the columns")
        raise ValueError(f"expected {FORMS}, got {', '.join(sorted(row)) or 'an empty row'}: {advice}")
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
        """Apply the template; `ValueError` says why it refuses."""
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
            raise ValueError(
                "the chat template writes a list of parts as it is printed by Python: give content as text"
            )
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
        return (
            ids,
            mask,
            "the assistant's messages, by the length of what is before them (the chat template marks none)",
        )
