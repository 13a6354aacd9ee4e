"""Families of training tasks on one sample, as sequences of `Task`; positions and data indices count from 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnflow._core.checks import IntArray, boolean, divides, index_array, integer, size
from attnflow._core.checks import permutation as permuted
from attnflow.masks.catalogue import block_causal, causal, full
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask
from attnflow.tasks.task import LabelTable, Task
from attnflow.tasks.tokens import Ragged, TokenSequence, TokenTable

Family = tuple[Task, ...]
TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]] | Tensor
Masked = Sequence[int] | Literal["random"] | None
Clean = Literal["block", "causal"]
_Read = Callable[[int, int], tuple[IntArray, Mask]]  # from the first and last place of a block to what it reads

_MOST_POSITIONS: Final = 1 << 27  # of all subtasks of a family together: 1 GB


def causal_lm(tokens: TokenIds) -> Family:
    """Predict every token from those before it: tau_k reads tokens 0..k and predicts token k + 1 (hasse, eq. 30-31).

    Merged: `af.masks.causal(n - 1)`.

    >>> [task.size for task in causal_lm([5, 6, 7])]
    [1, 2]
    """
    return multi_token_prediction(tokens, horizon=1)


def multi_token_prediction(tokens: TokenIds, horizon: int) -> Family:
    """Predict the next `horizon` tokens at once (Gloeckle et al., arXiv:2404.19737): causal, several labels each.

    tau_k reads tokens 0..k and predicts tokens k+1..k+horizon at position k, as far as they exist.
    Merged: `af.masks.causal(n - 1)`; the head of a label is `label.data_index - label.position - 1`.

    >>> [label.data_index for label in multi_token_prediction([5, 6, 7, 8], horizon=2)[0].labels]
    [1, 2]
    """
    data = Data(tokens, minimum=2)
    n = data.size - 1
    horizon = min(integer("horizon", horizon, 1), n)
    place, ahead = np.arange(n), np.arange(1, horizon + 1)
    target = place[:, None] + ahead
    there = target <= n
    labels = data.labels(np.repeat(place, there.sum(axis=1)), target[there], np.repeat(place, there.sum(axis=1)))
    cuts = np.append(0, np.cumsum(there.sum(axis=1))).tolist()
    rows = causal(n).intervals()
    parts = [labels.part(first, last) for first, last in pairwise(cuts)]
    return tuple(  # views: all tasks together take the memory of the longest
        Task(TokenSequence(data.table, place[: k + 1]), parts[k], beginning(rows, "causal", n=k + 1)) for k in range(n)
    )


def block_two_stream(
    tokens: TokenIds,
    block: int,
    predict_first: bool = False,
    mask_token: int | None = None,
    clean: Clean = "block",
) -> Family:
    """Generate block by block: tau_k reads k blocks and `block` [MASK]s in the place of the next (hasse, sec. 4.2).

    The mask of tau_k is `block_causal`; its labels are the tokens of the masked block. [MASK] is one embedding, at the
    positions of the block to predict (the paper gives three different sets; order.md).
    Merged: `af.masks.block_two_stream(N, block, predict_first)`.

    Args:
        tokens: N blocks of token ids, N >= 2 (or 1 with `predict_first`).
        block: tokens per block; must divide their number.
        predict_first: add the task that predicts block 0 from nothing, which the paper leaves out.
        mask_token: vocabulary id of [MASK]; required, since no id is free in every vocabulary.
        clean: what a clean token reads: "block", all blocks up to its own, or "causal", the tokens up to itself. The
            merged mask of "causal" is causal on the clean tokens (SBD, I-DLM); decode it by the same `clean`.

    >>> [task.size for task in block_two_stream([5, 6, 7, 8, 9, 9], 2, mask_token=0)]
    [4, 6]
    """
    data = Data(tokens, 1, True, mask_token)
    n = data.size
    block, predict_first = integer("block", block, 1), boolean("predict_first", predict_first)
    num_blocks = divides("the number of tokens", n, block)
    if num_blocks < 2 and not predict_first:
        raise ValueError(
            f"block_two_stream needs at least 2 blocks, got {n} tokens in 1 block of {block}; "
            "pass more tokens, a smaller block, or predict_first=True"
        )
    fit(num_blocks, n * (num_blocks + 1) // 2)
    return _denoising(data, block, None, _streams(n, block, clean), start=0 if predict_first else block)


def butterfly(
    tokens: TokenIds, block: int | None = None, masked: Masked = None, mask_token: int | None = None
) -> Family:
    """Predict every token from both sides (hasse, sec. 4.3): tau_k replaces token k by the mean of its neighbours.

    The mask of tau_k is j <= i <= k or k <= i <= j: information flows from both ends to the centre k. This is eq. 50
    corrected; eq. 48 as printed puts all positions into one class. The averaged token is the mean of *token*
    embeddings, at position k. Merged: `af.masks.butterfly(n)`.

    With `block` the centre is a span. tau_k reads the tokens before block k causally and those after it from the end
    backwards. In place of the block stand [MASK]s, which read both sides and one another and carry the labels.
    `af.tasks.infill` writes such spans.

    Args:
        tokens: token ids; with `block` a whole number of blocks, at least 2.
        block: tokens of a span; by default each token is predicted alone, from the mean of its neighbours.
        masked: with `block`, places that hold [MASK], as in `block_diffusion`; by default all of each block.
        mask_token: with `block`, and required there, vocabulary id of [MASK].

    >>> butterfly([5, 6, 7])[1].inputs[1]
    Token(id=(5, 7), position=1, provenance=frozenset({0, 2}))
    >>> [token.ids[0] for token in butterfly([5, 6, 7, 8], block=2, mask_token=0)[1].inputs]
    [5, 6, 0, 0]
    """
    data = Data(tokens, 2, block is not None, mask_token)
    n = data.size
    if block is not None:
        block = integer("block", block, 1)
        if divides("the number of tokens", n, block) < 2:
            raise ValueError(f"butterfly needs at least 2 blocks, got {n} tokens in 1 block of {block}")
        fit(n // block, n // block * n)
        place = np.arange(n)
        return _denoising(data, block, masked, lambda first, last: (place, towards(n, first, last)))
    if masked is not None:
        raise ValueError("masked needs block=...; without block, each token is predicted from all others")
    fit(n, n * n)
    place = np.arange(n)
    neighbours = Ragged.of([[j for j in (k - 1, k + 1) if 0 <= j < n] for k in range(n)])
    ids = [sorted(row) for row in Ragged(neighbours.indptr, data.ids[neighbours.values]).lists()]
    table = TokenTable.stack([data.table.take(place), TokenTable(Ragged.of(ids), place, neighbours)])
    labels = data.labels(place, place, place)
    return tuple(
        Task(TokenSequence(table, np.where(place == k, n + k, place)), labels.part(k, k + 1), towards(n, k, k + 1))
        for k in range(n)
    )


def _streams(n: int, block: int, clean: Clean, noisy: Clean = "block") -> _Read:
    """What a masked block and the clean tokens before it read; the block reads all of these."""
    for name, stream in (("clean", clean), ("noisy", noisy)):
        if stream not in ("block", "causal"):
            raise ValueError(f'{name} must be "block" or "causal", got {stream!r}')
    place, blocks = np.arange(n), block_causal(n, block).intervals() if clean == noisy == "block" else None
    ends = {"causal": place + 1, "block": (place // block + 1) * block}

    def read(first: int, last: int) -> tuple[IntArray, Mask]:
        if blocks is not None:
            return place[:last], beginning(blocks, "block_causal", n=last, block=block)
        own = ends["causal"][first:last] if noisy == "causal" else np.full(last - first, last)
        rows = IntervalRows.build(place[:last], 0, np.append(ends[clean][:first], own), last, last)
        parameters = {"n": last, "first": first, "clean": clean, "noisy": noisy}
        return place[:last], Mask(rows, "block_behind_clean", parameters)

    return read


def _denoising(data: Data, block: int, masked: Masked, read: _Read, start: int = 0) -> Family:
    n = data.size
    weights = _hidden(masked, n, block, start)
    noised = np.where(weights > 0, n, 0)
    tasks: list[Task] = []
    for first in range(start, n, block):
        own = first + np.flatnonzero(weights[first : first + block])
        if len(own):
            place, mask = read(first, first + block)
            inside = (place >= first) & (place < first + block)
            labels = data.labels(own, own, len(tasks), weights[own])
            tasks.append(Task(TokenSequence(data.table, place + noised[place] * inside), labels, mask))
    return tuple(tasks)


def masked_lm(tokens: TokenIds, masked: Masked, mask_token: int | None = None) -> Family:
    """Predict hidden tokens from all others (BERT, arXiv:1810.04805): one task, full attention.

    With `masked="random"` it is the loss of LLaDA (arXiv:2502.09992): each call hides m of n tokens, with m uniform in
    1..n, and each label weighs 1/m. Unlike LLaDA, which hides each token by itself, the number of them is drawn.

    Args:
        tokens: token ids.
        masked: places that hold [MASK] and carry the labels, each once; None for all; or "random": anew in each call,
            by torch's generator.
        mask_token: vocabulary id of [MASK]; required, since no id is free in every vocabulary.

    >>> [label.position for label in masked_lm([5, 6, 7], [1], mask_token=0)[0].labels]
    [1]
    """
    data = Data(tokens, 1, True, mask_token)
    return _denoising(data, data.size, masked, lambda _, last: (np.arange(last), full(last)))


def permutation_lm(tokens: TokenIds, permutation: Sequence[int], mask_token: int | None = None) -> Family:
    """Predict in any order (XLNet, arXiv:1906.08237, eq. 3): tau_t predicts token permutation[t] from those before.

    tau_t reads tokens permutation[0..t-1], causally in that order, and one [MASK] at the place to predict. Merged:
    `af.masks.permutation_lm(permutation)` without the content token permutation[n - 1], which nothing reads.

    >>> [task.labels[0].data_index for task in permutation_lm([5, 6, 7], [2, 0, 1], mask_token=0)]
    [2, 0, 1]
    """
    data = Data(tokens, 1, True, mask_token)
    n = data.size
    order = permuted("permutation", permutation, n)
    fit(n, n * (n + 1) // 2)
    tasks: list[Task] = []
    for t in range(n):
        steps = np.argsort(order[: t + 1])  # the steps 0..t by place, so that inputs stand in reading order
        inputs, position = order[steps], np.flatnonzero(steps == t)
        inputs[position] += n
        labels = data.labels(position, order[[t]], t)
        tasks.append(Task(TokenSequence(data.table, inputs), labels, causal(t + 1).permute(steps)))
    return tuple(tasks)


def block_diffusion(
    tokens: TokenIds,
    block: int,
    masked: Masked = None,
    mask_token: int | None = None,
    *,
    clean: Clean = "block",
    noisy: Clean = "block",
    next_token: bool = False,
    prompt: int = 0,
) -> Family:
    """Denoise block by block (BD3-LM, arXiv:2503.09573): tau_b reads clean blocks 0..b-1 and block b, partly masked.

    The labels are the masked tokens of block b; a block without masked tokens makes no task. Merged, it is
    `af.masks.block_diffusion` with the clean blocks first and without the last one, which is dead (order.md).

    With `masked="random"` each call masks m tokens of each block, with m uniform in 1..block, and each of their labels
    weighs 1/m. The summed loss of a block is then, in expectation, at least -log p(block) / block in any order of
    decoding (arXiv:2110.02037, eq. 5), such as that of `af.tasks.generate_blocks` with `per_pass`.

    With `clean="causal"` the clean stream is that of a causal model, as where one is trained further: SBD
    (arXiv:2509.04185), TiDAR (arXiv:2511.08923) and I-DLM, whose blocks are causal, too (`noisy="causal"`). They also
    keep the causal model's own task (`next_token=True`). DiffusionGemma is `clean="causal"` behind a prompt.

    Args:
        tokens: token ids, after `prompt` a whole number of blocks.
        block: tokens per block.
        masked: places that hold [MASK]; by default all, which is `block_two_stream(..., predict_first=True)`; or
            "random": anew in each call, by torch's generator (a worker of a DataLoader has its own).
        mask_token: vocabulary id of [MASK]; required, since no id is free in every vocabulary.
        clean: what clean tokens read: their blocks and those before ("block"), or the tokens before them ("causal").
        noisy: the same inside a masked block, which in both cases reads all clean tokens before it.
        next_token: add the tasks of `causal_lm`; only with `clean="causal"`, since they would leak inside a block.
        prompt: tokens at the start that are never masked; with `clean="block"`, a whole number of blocks.

    >>> [task.size for task in block_diffusion([5, 6, 7, 8], 2, masked=[3], mask_token=0)]
    [4]
    """
    data = Data(tokens, 1, True, mask_token)
    n = data.size
    block, prompt = integer("block", block, 1), integer("prompt", prompt, 0, n)
    if boolean("next_token", next_token) and clean != "causal":
        raise ValueError('next_token needs clean="causal": inside a clean block, each token would read its label')
    num_blocks = divides("the number of tokens" + " after the prompt" * (prompt > 0), n - prompt, block)
    if clean == "block":
        divides("the length of the prompt", prompt, block)
    fit(num_blocks, n * (num_blocks + 1) // 2)
    denoising = _denoising(data, block, masked, _streams(n, block, clean, noisy), prompt)
    if not denoising:
        raise ValueError(f"no block holds a [MASK]: {n} tokens, a prompt of {prompt}, masked={masked!r}")
    return (*(causal_lm(data.ids) if next_token else ()), *denoising)


def butterfly_as_printed(n: int) -> Mask:
    """Butterfly attention by eq. 58 of the paper as printed, which is off by one: never train with it.

    The paper gives its centre rows as `(j < i-2n+2) or (i-n+1 < j < 2n-2) or (j = i)`. The strict `i-n+1 < j` drops the
    right neighbour of every centre that has one, so n - 1 of the n subtasks are not embedded; ours has `<=`.

    >>> import attnflow as af
    >>> af.masks.butterfly(4).difference(butterfly_as_printed(4))
    [(6, 3), (7, 4), (8, 5)]
    """
    n = integer("n", n)
    a = max(n - 1, 0)
    length = size("3n - 2", 2 * a + n)
    t, centre = np.arange(a), 2 * a + np.arange(n)
    streams = (t, 0, t + 1), (a + t, a + t, 2 * a)
    centres = (centre, 0, centre - 2 * n + 2), (centre, centre - n + 2, 2 * a), (centre, centre, centre + 1)
    return Mask(IntervalRows.of(length, length, *streams, *centres), "butterfly_as_printed", {"n": n})


class Data:
    """A sample: token i of `table` is data token i at place i; where `masks`, token n + i is [MASK] there."""

    def __init__(self, tokens: TokenIds, minimum: int, masks: bool = False, mask_token: int | None = None) -> None:
        self.ids = index_array("tokens", tokens)
        self.size = len(self.ids)
        if self.size < minimum:
            raise ValueError(f"this family needs at least {minimum} tokens, got {self.size}: nothing to predict")
        if int(self.ids.min(initial=0)) < 0:
            raise ValueError(f"tokens must be at least 0, got {self.ids.min()}")
        place = np.arange(self.size)
        self.table = TokenTable.data(self.ids)
        if masks:
            blank = np.full(self.size, mask_id(mask_token))
            nothing = Ragged(np.zeros(self.size + 1, np.int64), np.zeros(0, np.int64))
            blanks = TokenTable(Ragged.single(blank), place, nothing)
            self.table = TokenTable.stack([self.table, blanks])

    def labels(self, position: IntArray, data_index: IntArray, task: object, weight: object = 1.0) -> LabelTable:
        return LabelTable.columns(position, self.ids[data_index], data_index, data_index, task, weight)


def beginning(rows: IntervalRows, name: str, **parameters: int) -> Mask:
    """The mask of the first n positions, as views of a longer mask's rows, which must not read later positions."""
    n = parameters["n"]
    last = int(rows.indptr[n])
    return Mask(IntervalRows(rows.indptr[: n + 1], rows.starts[:last], rows.ends[:last], n), name, parameters)


def mask_id(mask_token: int | None) -> int:
    """Return the id of [MASK], which a caller must name: any default would be a word of some vocabulary."""
    if mask_token is None:
        raise ValueError(
            "mask_token is required: pass tokenizer.mask_token_id or, where the tokenizer has no [MASK], an id that no "
            "text holds, such as a reserved one"
        )
    return integer("mask_token", mask_token)


def fit(subtasks: int, positions: int) -> None:
    if positions > _MOST_POSITIONS:
        raise ValueError(
            f"the family has {subtasks:,} subtasks with {positions:,} positions ({8 * positions / 1e9:,.1f} GB); "
            f"at most {_MOST_POSITIONS:,} fit: take a shorter sample or larger blocks"
        )


def _hidden(masked: Masked, n: int, block: int, start: int = 0) -> npt.NDArray[np.float64]:
    """The weight of each place: 0 if not masked, 1 if masked, 1 / m where m places of its block were drawn."""
    if masked is None:
        return np.ones(n)
    weights = np.zeros(n)
    if not isinstance(masked, str):
        weights[_places("masked", masked, n)] = 1.0
        return weights
    if masked != "random":
        raise ValueError(f'masked must be places, None for all of them, or "random", got {masked!r}')
    for first in range(start, n, block):
        count = int(torch.randint(1, block + 1, ()))
        weights[first + torch.randperm(block)[:count].numpy()] = 1 / count
    return weights


def _places(name: str, values: Sequence[int], n: int) -> IntArray:
    places = index_array(name, values, n)
    if not len(places) or len(np.unique(places)) < len(places):
        raise ValueError(f"{name} must name at least one place, and each once, got {places.tolist()}")
    return np.sort(places)


def towards(n: int, first: int, last: int) -> Mask:
    """The mask j <= i < first or last <= i <= j, where both sides flow to [first, last), which reads everything."""
    i = np.arange(n)
    rows = IntervalRows.build(i, np.where(i < last, 0, i), np.where(i < first, i + 1, n), n, n)
    centre = {"centre": first} if last - first == 1 else {"first": first, "last": last}
    return Mask(rows, "butterfly_subtask", {"n": n, **centre})
