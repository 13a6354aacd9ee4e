"""`rollouts`: turns prompts and their sampled responses into a family of weighted tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnflow._core.checks import IntArray, index_array
from attnflow._core.checks import number as finite
from attnflow.masks.catalogue import causal
from attnflow.tasks.families import Family, TokenIds, beginning
from attnflow.tasks.prefixes import Trie
from attnflow.tasks.task import LabelTable, Task
from attnflow.tasks.tokens import TokenSequence, TokenTable

_Array = npt.NDArray[Any] | Tensor
Several = Sequence[TokenIds] | _Array
Numbers = Sequence[float | int | Sequence[float | int] | _Array] | _Array
"""For each response a number, or a number for each of its tokens."""


def rollouts(prompts: TokenIds | Several, responses: Several, weights: Numbers | None = None) -> Family:
    """Train on sampled responses: task i reads prompt i and response i, causally, and predicts the response's tokens.

    Merged, the sequences become their prefix tree, with the same values and gradients. G responses of C tokens to a
    prompt of P tokens take P + G (C - 1) positions instead of G (P + C - 1). Where responses diverge, one position
    carries several labels. Data tokens are numbered by the tree, so that equal prefixes share numbers.

    Args:
        prompts: token ids of the prompt that all responses answer, or of one prompt for each response. A prompt must
            not be empty, as it predicts a response's first token.
        responses: token ids of each response. An empty one is a task without positions and labels, as in stock losses.
        weights: one number for each response, or one for each of its tokens; 1 by default. They are the weights of the
            labels in `af.tasks.loss` and may be negative; with advantages the loss is REINFORCE's policy gradient.

    Raises:
        ValueError: no response has a token; a prompt is empty; prompts or weights do not match the responses; or NaN or
            infinity.

    >>> import attnflow as af
    >>> family = rollouts([5, 6, 7], [[8, 9], [8, 4, 3]], weights=[1.0, -0.5])
    >>> merged = af.tasks.merge(family)
    >>> merged.task.size, [(e.position, e.target_id, e.weight) for e in merged.task.labels]
    (5, [(2, 8, 1.0), (2, 8, -0.5), (3, 9, 1.0), (3, 4, -0.5), (4, 3, -0.5)])
    """
    answers = [index_array(f"responses[{i}]", each) for i, each in enumerate(_several("responses", responses))]
    if not any(map(len, answers)):
        raise ValueError(f"at least one response must have a token, got {len(answers)} without any")
    starts = _prompts(prompts, len(answers))
    sequences = [np.concatenate([start, answer]) for start, answer in zip(starts, answers, strict=True)]
    lowest = min(int(sequence.min()) for sequence in sequences)
    if lowest < 0:
        raise ValueError(f"token ids must be at least 0, got {lowest}: leave padding out, each task has its own length")
    factors = _by_token([1.0] * len(answers) if weights is None else weights, answers)
    trie = Trie.of_sequences(sequences)
    ids = np.concatenate(sequences)[trie.source]
    table = TokenTable.data(ids, trie.depth)
    rows = causal(max(map(len, sequences)) - 1).intervals()
    masks = {size: beginning(rows, "causal", n=size) for size in {0, *(len(sequence) - 1 for sequence in sequences)}}
    tasks: list[Task] = []
    for number, (start, answer, weight) in enumerate(zip(starts, answers, factors, strict=True)):
        path = trie.path(number)
        size = len(path) - 1 if len(answer) else 0
        target = path[len(start) :]
        place = np.arange(len(start) - 1, len(start) - 1 + len(answer))
        labels = LabelTable.columns(place, ids[target], trie.depth[target], target, number, weight)
        tasks.append(Task(TokenSequence(table, path[:size]), labels, masks[size]))
    return tuple(tasks)


def _several(name: str, values: object) -> list[object]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence with an entry for each response, got {type(values).__name__}")
    listed = list(cast(Iterable[object], values))
    if not listed:
        raise ValueError(f"{name} must have at least one entry, got none")
    return listed


def _prompts(prompts: object, count: int) -> list[IntArray]:
    listed = _several("prompts", prompts)
    each_has_one = np.ndim(cast(Any, listed[0])) > 0
    arrays = [index_array(f"prompts[{i}]", each) for i, each in enumerate(listed)] if each_has_one else []
    arrays = arrays or [index_array("prompts", prompts)] * count
    if len(arrays) != count:
        raise ValueError(f"expected one prompt for all {count} responses or one for each, got {len(arrays)} prompts")
    for number, each in enumerate(arrays):
        if not len(each):
            raise ValueError(
                f"prompt {number} is empty: nothing predicts the first token of its response; "
                "let it begin with the tokenizer's BOS token"
            )
    return arrays


def _by_token(weights: object, answers: list[IntArray]) -> list[npt.NDArray[np.float64]]:
    listed = _several("weights", weights)
    if len(listed) != len(answers):
        raise ValueError(f"weights must have an entry for each of the {len(answers)} responses, got {len(listed)}")
    columns: list[npt.NDArray[np.float64]] = []
    for number, (value, answer) in enumerate(zip(listed, answers, strict=True)):
        place = f"weights[{number}]"
        if np.ndim(cast(Any, value)) == 0:
            columns.append(np.full(len(answer), finite(place, value)))
            continue
        column = torch.as_tensor(cast(Any, value), dtype=torch.float64).detach().cpu().numpy()
        if column.shape != answer.shape:
            raise ValueError(
                f"{place} must be one number or one for each of the {len(answer)} tokens of the response, got shape "
                f"{column.shape}"
            )
        if not np.isfinite(column).all():
            raise ValueError(f"{place} must be finite, got {column[~np.isfinite(column)][0]}")
        columns.append(column)
    return columns
