"""How likely a language model makes answers to prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence


class Answers(NamedTuple):
    """What a model makes of answers to prompts.

    Attributes:
        scores: the mean log-probability of the tokens of each answer, in nats, float32.
        first: whether each of its tokens is the model's most likely one.
        rows: logits of the token after each prompt, float32.
    """

    scores: Float[Tensor, " pairs"]
    first: Bool[Tensor, " pairs"]
    rows: Float[Tensor, "pairs vocabulary"]


def token_ids(tokenizer: Any, text: str, *, answer: bool = False) -> list[int]:
    """The ids of a prompt; or of what follows it, a space before it and nothing special around it."""
    if answer:
        return cast("list[int]", tokenizer(f" {text.strip()}", add_special_tokens=False)["input_ids"])
    return cast("list[int]", tokenizer(text)["input_ids"])


def batch(model: nn.Module, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Sequences of ids side by side, padded at their ends, as keyword arguments of a forward pass."""
    device = next(model.parameters()).device
    lengths = torch.tensor([len(row) for row in rows], device=device)
    ids = pad_sequence([torch.tensor(list(row), device=device) for row in rows], batch_first=True)
    mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "use_cache": False}


def answers_of(model: nn.Module, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Answers:
    """Scores of answers after their prompts; differentiable.

    Cost: one forward pass over all pairs, padded to the longest; the logits of the answers alone are made float32.
    """
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    return answers_in(cast(Any, model)(**batch(model, rows)).logits, prompts, answers)


def answers_in(
    logits: Float[Tensor, "pairs tokens vocabulary"],
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> Answers:
    """Likewise, from the logits of that pass."""
    scores, first, rows = list[Tensor](), list[Tensor](), list[Tensor]()
    for row, prompt, answer in zip(logits, prompts, answers, strict=True):
        said = row[len(prompt) - 1 : len(prompt) + len(answer) - 1].float()
        wanted = torch.tensor(list(answer), device=row.device)
        scores.append(said.log_softmax(dim=-1).gather(-1, wanted[:, None]).mean())
        first.append((said.detach().argmax(dim=-1) == wanted).all())
        rows.append(said[0])
    return Answers(torch.stack(scores), torch.stack(first), torch.stack(rows))
