"""Random adds, replacements and removals: the rows, their slots and what a search finds."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from attnflow.knowledge.index import EntryIndex
from tests.knowledge.index.data import MODES, brute, read_all


class Editing(RuleBasedStateMachine):
    """Adds, replacements and removals against a dictionary of names, which follows the moves."""

    @initialize(seed=st.integers(0, 999), mode=st.sampled_from(MODES))
    def begin(self, seed, mode):
        self.generator = torch.Generator().manual_seed(seed)
        self.index = EntryIndex(3, 1, search=mode, target_recall=1.0)
        self.rows, self.at, self.next = {}, [], 0

    def make(self, count):
        return torch.randn(count, 4, generator=self.generator)

    def some(self, data):
        return data.draw(st.lists(st.integers(0, len(self.at) - 1), unique=True, min_size=1, max_size=6))

    @rule(count=st.integers(0, 9))
    def add(self, count):
        rows = self.make(count)
        slots = self.index.add(rows)
        assert slots.tolist() == list(range(len(self.at), len(self.at) + count))
        for row in rows:
            self.rows[self.next] = row
            self.at.append(self.next)
            self.next += 1

    @rule(data=st.data())
    @precondition(lambda self: self.at)
    def replace(self, data):
        slots = self.some(data)
        rows = self.make(len(slots))
        self.index.replace(torch.tensor(slots), rows)
        self.rows.update({self.at[slot]: row for slot, row in zip(slots, rows, strict=True)})

    @rule(data=st.data())
    @precondition(lambda self: self.at)
    def remove(self, data):
        slots = self.some(data)
        gone = [self.at[slot] for slot in slots]
        for source, target in self.index.remove(torch.tensor(slots)).tolist():
            self.at[target] = self.at[source]
        del self.at[len(self.at) - len(slots) :]
        for name in gone:
            del self.rows[name]

    @invariant()
    def is_the_same(self):
        if not hasattr(self, "index"):
            return
        assert len(self.index) == len(self.at) == len(self.rows)
        assert set(self.at) == set(self.rows)
        if not self.at:
            return
        expected = torch.stack([self.rows[name] for name in self.at])
        assert torch.equal(self.index.rows, expected)
        if self.index.mode == "approximate":  # lists as they are, read to the last
            read_all(self.index)
        queries = self.make(2)[:, :3]
        hits = self.index.search(queries, 4, 0)
        best = brute(expected, queries, 3, 0).topk(min(4, len(expected))).values.float()
        torch.testing.assert_close(hits.scores[:, : best.shape[1]], best)


Editing.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestEditing = Editing.TestCase
