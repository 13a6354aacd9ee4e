"""A family that drafts and verifies: next tokens, and [MASK]s after every token that draft several at once."""

import torch

from attnflow import masks, tasks
from attnflow.tasks import Label, Task, Token

MASK = 0


def speculative(text, horizon, ahead=0):
    """Each [MASK] predicts the token `ahead` places after its own."""
    text = [int(token) for token in text]
    family = list(tasks.causal_lm(text))
    for k in range(len(text) - 1 - ahead):
        places = range(k + 1, min(k + 1 + horizon, len(text) - ahead))
        inputs = [*(Token(text[i], i) for i in range(k + 1)), *(Token(MASK, i, ()) for i in places)]
        allow = torch.tril(torch.ones(len(inputs), len(inputs), dtype=torch.bool))
        allow[k + 1 :] = True
        labels = [Label(i, Token(text[i + ahead], i + ahead)) for i in places]
        family.append(Task(inputs, labels, masks.from_dense(allow)))
    return family
