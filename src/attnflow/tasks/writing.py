"""A text on its way: which positions of a task can run, what they hold, which of them are final, and drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attnflow._core.checks import IntArray, preview
from attnflow.masks.intervals import IntervalRows
from attnflow.tasks.embedding import NO_ID
from attnflow.tasks.task import Task

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Facts:
    """What the order of a task says. A predictor is a pair (position, data token); the best of a token come first.

    Attributes:
        needs: [tokens, positions]: a position is made of a token, or reads it over any path.
        blanks: [tokens, positions]: a position is, or reads, a [MASK] that stands for a token.
        blank: the token that a position's [MASK] stands for, as it predicts it at the token's own place; or -1.
        row, data, head: the predictors: the position, the token, and its number among the position's tokens.
        draft: whether another predictor of the same token reads the same tokens and more, and so verifies it.
        source, ids: [positions, width]: the data tokens of a position, or -1, and its fixed ids.
        place: the position id of each token that is predicted.
    """

    task: Task
    needs: BoolArray
    blanks: BoolArray
    blank: IntArray
    row: IntArray
    data: IntArray
    head: IntArray
    draft: BoolArray
    source: IntArray
    ids: IntArray
    place: IntArray

    @property
    def num_tokens(self) -> int:
        return len(self.needs)

    @cached_property
    def relation(self) -> tuple[IntervalRows, IntArray | None]:
        """Who reads whom, with each position's number there."""
        return self.task.mask.relabelled()

    def numbers(self, positions: IntArray) -> IntArray:
        rank = self.relation[1]
        return positions if rank is None else rank[positions]

    def allow(self, rows: IntArray, keys: IntArray) -> BoolArray:
        return self.relation[0].to_bool(self.numbers(rows))[:, self.numbers(keys)]

    def below(self, rows: IntArray) -> BoolArray:
        inside = np.zeros(self.task.size, dtype=np.bool_)
        for row in rows.tolist():
            inside[self.task.flow.receptive_field(row).numpy()] = True
        return inside

    def without(self, tokens: IntArray) -> IntArray:
        return np.setdiff1d(np.arange(self.num_tokens), tokens)

    def missing(self, unknown: IntArray) -> IntArray:
        return self.needs[unknown].sum(axis=0)

    def stuck(self, known: IntArray) -> IntArray:
        """The tokens that are never written from the known ones on."""
        unknown = np.ones(self.num_tokens, dtype=np.bool_)
        unknown[known] = False
        missing = self.missing(np.flatnonzero(unknown))
        while len(now := np.unique(self.data[(missing[self.row] == 0) & unknown[self.data] & ~self.draft])):
            unknown[now] = False
            missing -= self.missing(now)
        return np.flatnonzero(unknown)

    def require_writable(self, known: IntArray, wanted: IntArray | None = None) -> None:
        stuck = self.stuck(known)
        refused = stuck if wanted is None else np.intersect1d(stuck, wanted)
        if not len(refused):
            return
        token = int(refused[0])
        rows = self.row[self.data == token]
        if not len(rows):
            raise ValueError(
                f"token {token} cannot be written: no position predicts it. Give it in the "
                "prompt, or decode a family in which it is predicted"
            )
        unread = stuck[self.needs[stuck, rows[0]]]
        raise ValueError(
            f"token {token} cannot be written: position {rows[0]}, which predicts it, reads tokens {preview(unread)}, "
            "which are neither known nor written before it. Give them in the prompt, or train a task that writes them"
        )


def facts_of(task: Task) -> Facts:
    """Raises `ValueError` if an input cannot be made of written tokens, or nothing can be written."""
    sequence, mask = task.sequence, task.mask
    provenance, ids = (each.take(sequence.index) for each in (sequence.table.provenance, sequence.table.ids))
    made = provenance.lengths > 0
    if (wrong := np.flatnonzero(made & (provenance.lengths != ids.lengths))).size:
        raise ValueError(
            f"input {wrong[0]} has {ids.lengths[wrong[0]]} ids, but is made of {provenance.lengths[wrong[0]]} data "
            "tokens: a decoder makes an input from exactly its tokens"
        )
    if task.size and int(mask.row_counts().min()) == 0:
        raise ValueError("a position attends to nothing: its softmax is undefined; allow it to attend to itself")
    table = task.targets.table
    table = table[table["data_index"] >= 0]
    if not len(table):
        raise ValueError("a decoder needs labels that are data tokens, and the task has none: nothing is written")
    row, data = np.unique(np.stack([table["position"], table["data_index"]]), axis=1)
    head = np.arange(len(row)) - np.searchsorted(row, row)
    count = np.bincount(row, minlength=task.size)
    place = np.zeros(int(table["data_index"].max()) + 1, dtype=np.int64)
    place[table["data_index"]] = table["target_position"]
    (at, of), several = np.unique(np.stack([row, place[data]]), axis=1, return_counts=True)
    if int(several.max()) > 1:
        first = int(several.argmax())
        raise ValueError(
            f"position {at[first]} predicts {several[first]} tokens at place {of[first]}, alternatives as in a tree of "
            "answers: decode a family of one answer"
        )
    stands = (count[row] == 1) & ~made[row] & (ids.lengths[row] == 1) & (sequence.position[row] == place[data])
    blank = np.full(task.size, -1)
    blank[row[stands]] = data[stands]
    num_tokens = 1 + max(int(data.max()), int(provenance.values.max(initial=-1)))
    carried, owner = sequence.carriers()
    standing = np.flatnonzero(blank >= 0)
    by_token = standing[np.argsort(blank[standing], kind="stable")]
    needs, blanks = np.zeros((2, num_tokens, task.size), dtype=np.bool_)
    for start, chunk in task.flow.reachability_by_rows(max(1, (1 << 23) // max(1, task.size))):
        for into, tokens, positions in ((needs, carried, owner), (blanks, blank[by_token], by_token)):
            if len(tokens):
                first = np.flatnonzero(np.diff(tokens, prepend=-1))
                reached = np.logical_or.reduceat(chunk.numpy()[:, positions], first, axis=1)
                into[tokens[first], start : start + len(chunk)] = reached.T
    best = np.lexsort((row, blank[row] >= 0, -needs.sum(axis=0)[row]))
    row, data, head = row[best], data[best], head[best]
    given, of_data = ids.padded(NO_ID), provenance.padded(-1)
    source = np.full(given.shape, -1)
    source[:, : of_data.shape[1]] = of_data
    return Facts(task, needs, blanks, blank, row, data, head, _drafts(needs, row, data), source, given, place)


def _drafts(needs: BoolArray, row: IntArray, data: IntArray) -> BoolArray:
    draft = np.zeros(len(row), dtype=np.bool_)
    order = np.argsort(data, kind="stable")
    for group in np.split(order, np.flatnonzero(np.diff(data[order])) + 1):
        for number in range(1, len(group)):
            above, own = needs[:, row[group[:number]]], needs[:, row[group[number]]]
            draft[group[number]] = bool((own[:, None] <= above).all(axis=0).any())
    return draft


@dataclass(frozen=True, eq=False)
class Branch:
    """A draft after its parent: the tokens until there, and how many each position still misses."""

    tokens: IntArray  # [tokens], -1 where unknown
    missing: IntArray  # [positions]
    parent: int = -1
    token: int = -1
    chances: Tensor | None = None  # of the draft, [vocabulary]; None: it was certain to be proposed


@dataclass(frozen=True, eq=False)
class Feed:
    """The rows of a pass: each a position in a branch; `chosen` are the best predictors that can run in each branch."""

    rows: IntArray
    branch: IntArray
    chosen: tuple[IntArray, ...]
    keep: int  # from the first row on that predicts

    @cached_property
    def _index(self) -> dict[tuple[int, int], int]:
        rows, branches = self.rows[self.keep :].tolist(), self.branch[self.keep :].tolist()
        return {at: number - len(rows) for number, at in enumerate(zip(rows, branches, strict=True))}

    def find(self, row: int, path: Sequence[int]) -> int | None:
        """The place, from the end, of a row that predicts and ran in one of the branches of a path."""
        return next((self._index[row, branch] for branch in path if (row, branch) in self._index), None)


class Writing:
    """What is known of one text, which positions are in the cache, and a tree of drafts; branch 0 has no draft."""

    def __init__(self, facts: Facts, tokens: IntArray) -> None:
        self.facts = facts
        self.held = np.zeros(facts.task.size, dtype=np.bool_)
        self._readers = facts.relation[0].cover()  # of each position, those that have not run for the last time
        self.branches = [Branch(tokens, facts.missing(np.flatnonzero(tokens < 0)))]

    @property
    def tokens(self) -> IntArray:
        return self.branches[0].tokens

    def path(self, branch: int) -> list[int]:
        """The branch and those that it follows."""
        up = [branch]
        while up[-1]:
            up.append(self.branches[up[-1]].parent)
        return up

    @property
    def _paths(self) -> BoolArray:
        """[branches, branches]: whether a branch is, or follows, another."""
        paths = np.eye(len(self.branches), dtype=np.bool_)
        for number in range(1, len(paths)):
            paths[number] |= paths[self.branches[number].parent]
        return paths

    def chosen(self, branch: int) -> IntArray:
        """The best predictor that can run of each unknown token."""
        here, facts = self.branches[branch], self.facts
        able = np.flatnonzero((here.missing[facts.row] == 0) & (here.tokens[facts.data] < 0))
        return able[np.unique(facts.data[able], return_index=True)[1]]

    def opened(self, branch: int) -> IntArray:
        """Those of them that write their token."""
        chosen = self.chosen(branch)
        return chosen[~self.facts.draft[chosen]]

    def next_place(self, branch: int) -> int | None:
        """The token that is written next, if there is exactly one."""
        opened = self.opened(branch)
        return int(self.facts.data[opened[0]]) if len(opened) == 1 else None

    def grow(self, parent: int, place: int, token: int, chances: Tensor | None = None) -> int:
        """The branch of a draft of the token at `place`, which is made unless it is there."""
        for number, other in enumerate(self.branches):
            if other.parent == parent and other.token == token:
                return number
        tokens = self.branches[parent].tokens.copy()
        tokens[place] = token
        missing = self.branches[parent].missing - self.facts.needs[place]
        self.branches.append(Branch(tokens, missing, parent, token, chances))
        return len(self.branches) - 1

    def feed(self) -> Feed:
        """Find what each branch must run: all at or below its predictors that neither the cache nor its path has."""
        facts, fed, chosen = self.facts, list[BoolArray](), list[IntArray]()
        rows, branch, predicts = list[IntArray](), list[IntArray](), list[BoolArray]()
        for number, here in enumerate(self.branches):
            before = self.held if not number else fed[here.parent]
            best = self.chosen(number)
            targets = np.unique(facts.row[best])
            fresh = facts.below(targets[~before[targets]]) & ~before
            fed.append(before | fresh)
            chosen.append(best)
            rows.append(np.flatnonzero(fresh))
            branch.append(np.full(len(rows[-1]), number))
            predicts.append(np.isin(rows[-1], targets))
        row, of, target = np.concatenate(rows), np.concatenate(branch), np.concatenate(predicts)
        leaves = self.unsettled(row)
        order = np.lexsort((row, of, target & ~leaves, leaves))  # what leaves the cache stands last
        keep = int(np.flatnonzero(target[order])[0]) if target.any() else len(row)
        return Feed(row[order], of[order], tuple(chosen), keep)

    def unsettled(self, rows: IntArray) -> BoolArray:
        """Which positions are, or read, a [MASK] whose token is not yet written."""
        return np.any(self.facts.blanks[np.ix_(self.tokens < 0, rows)], axis=0)

    def ids(self, feed: Feed) -> IntArray:
        """What the rows hold, [rows, width]: written tokens, drafts of their branch, or fixed ids."""
        facts = self.facts
        tokens = np.stack([branch.tokens for branch in self.branches])
        source, blank = facts.source[feed.rows], facts.blank[feed.rows]
        ids = np.where(source >= 0, tokens[feed.branch[:, None], source], facts.ids[feed.rows])
        filled = (blank >= 0) & (self.tokens[blank] >= 0)
        ids[filled, 0] = self.tokens[blank[filled]]
        return ids

    def allow(self, feed: Feed, slots: IntArray) -> BoolArray:
        """What the rows read, [rows, slots of the cache (a position or -1) + rows]."""
        allow = self.facts.allow(feed.rows, np.concatenate([slots, feed.rows]))
        allow[:, : len(slots)] &= slots >= 0
        allow[:, len(slots) :] &= self._paths[np.ix_(feed.branch, feed.branch)]
        return allow

    def settle(self, feed: Feed, branch: int, written: Mapping[int, int]) -> BoolArray:
        """Accept a branch and what was written after it; returns which rows stay in the cache."""
        facts = self.facts
        final = self._paths[branch, feed.branch] & ~self.unsettled(feed.rows)
        tokens, places = self.branches[branch].tokens.copy(), list(written)
        tokens[places] = list(written.values())
        missing = self.branches[branch].missing - facts.missing(np.array(places, dtype=np.int64))
        self.branches = [Branch(tokens, missing)]
        waiting = facts.row[(tokens[facts.data] < 0) & ~facts.draft]  # they run again, for what they predict
        final &= ~np.isin(feed.rows, waiting)
        self.held[feed.rows[final]] = True
        relation, _ = facts.relation
        self._readers = self._readers - relation.take(facts.numbers(feed.rows[final])).cover()
        return final

    def read_later(self, rows: IntArray) -> BoolArray:
        """Which positions are read by one that has not run for the last time: gist tokens, but not their context."""
        return self._readers[self.facts.numbers(rows)] > 0
