"""Families with extra tokens: gist tokens that hold a context, and [MASK]s that look several tokens ahead."""

from __future__ import annotations

import numpy as np

from attnflow._core.checks import IntArray, boolean, index_array, integer
from attnflow.masks.catalogue import causal
from attnflow.masks.intervals import IntervalRows, offsets, ragged
from attnflow.masks.mask import Mask
from attnflow.tasks.families import Data, Family, TokenIds, beginning, fit
from attnflow.tasks.rollout_groups import Numbers, Several, rollouts
from attnflow.tasks.task import LabelTable, Task
from attnflow.tasks.tokens import Ragged, TokenSequence, TokenTable


def look_ahead(tokens: TokenIds, horizon: int, mask_token: int | None = None, chained: bool = True) -> Family:
    """Predict `horizon` tokens at once through extra [MASK]s behind each token (Samragh et al., arXiv:2507.11851).

    tau_i reads tokens 0..i, then [MASK]s d = 1..horizon-1 at positions i+d; token i predicts i+1, and [MASK] d predicts
    i+d+1, as far as they exist. No token reads a [MASK], so the model stays a causal one, which can check what the
    [MASK]s proposed. Merged: `af.masks.look_ahead(n - 1, horizon)` without the [MASK]s that have nothing to predict.

    Args:
        tokens: token ids, at least 2.
        horizon: tokens that are predicted at once.
        mask_token: vocabulary id of [MASK]; required, since no id is free in every vocabulary.
        chained: whether a [MASK] reads those before it; False are the registers of MuToR (arXiv:2505.10518).

    >>> [(label.position, label.data_index) for label in look_ahead([5, 6, 7, 8], 2, mask_token=0)[1].labels]
    [(1, 2), (2, 3)]
    """
    data = Data(tokens, 2, True, mask_token)
    n, horizon, chained = data.size, integer("horizon", horizon, 1), boolean("chained", chained)
    horizon = min(horizon, n - 1)
    fit(n - 1, (n - 1) * (n // 2 + horizon))
    rows = causal(n - 1).intervals()
    tasks: list[Task] = []
    for i in range(n - 1):
        count = min(i + horizon, n - 1)  # inputs: place p stands at position p, too
        place = np.arange(count)
        mask = beginning(rows, "causal", n=count) if chained else _masks_apart(count, i + 1)
        labels = data.labels(place[i:], place[i:] + 1, i)
        tasks.append(Task(TokenSequence(data.table, np.where(place > i, n + place, place)), labels, mask))
    return tuple(tasks)


def gist(
    context: TokenIds,
    answers: Several,
    count: int,
    gist_token: int,
    segment: int | None = None,
    weights: Numbers | None = None,
) -> Family:
    """Compress a context into gist tokens (Mu et al., arXiv:2304.08467): task i reads it through them, for answer i.

    The context and then `count` gist tokens read causally. An answer reads the gist tokens and itself, never the
    context; the last gist token predicts its first token. With `segment`, as in AutoCompressors (arXiv:2305.14788),
    `count` gist tokens follow each part of the context, and later parts read earlier ones only through these.

    The tasks are sparse. Merged, they share the context and the gist tokens, and answers that begin alike share their
    beginning. `task.densified()` computes something else: it lets answers read the context.

    Args:
        context: token ids of what is compressed, at least one.
        answers: token ids of each answer.
        count: gist tokens, at least 1, behind the context or behind each part of it.
        gist_token: vocabulary id of a gist token.
        segment: tokens of a part of the context; by default it is one part. The last part may be shorter.
        weights: of the answers or of their tokens, as in `rollouts`.

    Raises:
        ValueError: the context is empty, or as `rollouts` does for the answers.

    >>> gist([5, 6], [[8, 9, 3], [4]], count=1, gist_token=0)[0].mask.dense().int().tolist()
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    """
    ids = index_array("context", context)
    if not len(ids):
        raise ValueError("the context is empty: there is nothing to compress")
    count, gist_token = integer("count", count, 1), integer("gist_token", gist_token)
    length = len(ids) if segment is None else integer("segment", segment, 1)
    ends = np.minimum(np.arange(length, len(ids) + length, length), len(ids))  # of the parts, in the context
    is_gist = np.insert(np.zeros(len(ids), np.bool_), np.repeat(ends, count), True)
    prompt = np.insert(ids, np.repeat(ends, count), gist_token)
    family = rollouts(prompt, answers, weights)
    gists = ends + count * np.arange(len(ends))  # where those behind each part begin
    rows = _through_gists(gists, count, max(task.size for task in family))
    tokens = family[0].sequence.table  # the prompt, then the tree of the answers
    is_data = np.append(~is_gist, np.ones(len(tokens) - len(is_gist), np.bool_))
    number = np.cumsum(is_data) - 1  # of the data tokens, among which gist tokens do not count
    table = TokenTable(tokens.ids, tokens.position, Ragged(offsets(is_data), number[is_data]))
    tasks: list[Task] = []
    for task in family:
        targets = task.targets.table.copy()
        targets["data_index"] = number[targets["data_index"]]
        mask = beginning(rows, "gist", n=task.size)
        tasks.append(Task(TokenSequence(table, task.sequence.index), LabelTable(targets), mask))
    return tuple(tasks)


def _through_gists(gists: IntArray, count: int, size: int) -> IntervalRows:
    """Each position reads its own part up to itself, and the gist tokens behind the parts before it."""
    place, begins = np.arange(size), np.append(0, gists + count)
    part = np.searchsorted(begins, place, side="right") - 1
    reader, before = ragged(np.zeros(size, np.int64), part)
    return IntervalRows.of(size, size, (place, begins[part], place + 1), (reader, gists[before], gists[before] + count))


def _masks_apart(n: int, first: int) -> Mask:
    """A causal mask of n positions; those from `first` on do not read one another."""
    i = np.arange(n)
    after = i[first:]
    rows = IntervalRows.of(n, n, (i, 0, np.minimum(i + 1, first)), (after, after, after + 1))
    return Mask(rows, "masks_apart", {"n": n, "first": first})
