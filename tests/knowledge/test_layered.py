"""Editing the entries of a base that belongs to layers: ids stay, others are untouched, mistakes change nothing."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from attnflow.knowledge.base import EntryLayout, LayeredKnowledge

LAYOUT = EntryLayout(3, gated=False)


class Editing(RuleBasedStateMachine):
    """Random edits against a dictionary of id -> (layer, entry)."""

    @initialize(seed=st.integers(0, 999))
    def begin(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        entries = self.rows(6)
        self.base = LayeredKnowledge(entries.clone(), [2, 1, 3], LAYOUT)
        self.model = {i: (layer, entries[i]) for i, layer in enumerate([0, 0, 1, 2, 2, 2])}

    def rows(self, count):
        return torch.randn(count, LAYOUT.entry_dim, generator=self.generator)

    @rule(layer=st.integers(0, 2), count=st.integers(1, 3))
    def insert(self, layer, count):
        entries = self.rows(count)
        ids = self.base.insert(layer, entries).tolist()
        assert not set(ids) & set(self.model)
        self.model |= {i: (layer, entry) for i, entry in zip(ids, entries, strict=True)}

    @rule(data=st.data())
    def update(self, data):
        ids = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, max_size=3, unique=True))
        entries = self.rows(len(ids))
        self.base.update(ids, entries)
        self.model |= {i: (self.model[i][0], entry) for i, entry in zip(ids, entries, strict=True)}

    @precondition(lambda self: len(self.model) > 3)
    @rule(data=st.data())
    def delete(self, data):
        chosen = data.draw(st.sampled_from(sorted(self.model)))
        layer = self.model[chosen][0]
        if sum(where == layer for where, _ in self.model.values()) == 1:
            with pytest.raises(ValueError, match=f"layer {layer} would be left without entries"):
                self.base.delete([chosen])
        else:
            self.base.delete([chosen])
            del self.model[chosen]

    @invariant()
    def holds_what_was_written(self):
        ids = list(self.model)
        assert self.base.num_entries == len(ids)
        assert self.base.layer_of(ids) == [layer for layer, _ in self.model.values()]
        assert torch.equal(self.base.get(ids), torch.stack([entry for _, entry in self.model.values()]))
        for layer in range(3):
            here = set(self.base.ids[self.base.rows(layer)].tolist())
            assert here == {i for i, (where, _) in self.model.items() if where == layer}


TestEditing = Editing.TestCase
TestEditing.settings = settings(max_examples=30, stateful_step_count=12, deadline=None)


@pytest.mark.parametrize("gated", [False, True])
def test_layout_tiles_the_entry(gated):
    layout = EntryLayout(4, gated)
    columns = [*range(99)][layout.value]
    for part in ("gate", "up") if gated else ("up",):
        columns += [*range(99)][layout.key(part)] + [layout.threshold(part)]
    assert sorted(columns) == list(range(layout.entry_dim))
    assert layout.entry_dim == (14 if gated else 9)


def test_a_mistake_changes_nothing():
    base = LayeredKnowledge(torch.randn(4, 7), [2, 2], LAYOUT)
    before = base.entries.detach().clone()
    bad = torch.full((1, 7), torch.nan)
    for error, message, act in (
        (ValueError, "NaN", lambda: base.insert(0, bad)),
        (ValueError, "NaN", lambda: base.update([1], bad)),
        (ValueError, r"entries must be \[entries, 7\]", lambda: base.insert(0, torch.zeros(1, 6))),
        (ValueError, "each of the 2 ids, got 1 entries", lambda: base.update([0, 1], torch.zeros(1, 7))),
        (ValueError, "layer must be at most 1", lambda: base.insert(2, torch.zeros(1, 7))),
        (KeyError, r"no entries with ids \[9\]", lambda: base.delete([1, 9])),
        (ValueError, "layer 0 would be left", lambda: base.delete([0, 1])),
    ):
        with pytest.raises(error, match=message):
            act()
    assert torch.equal(base.entries, before)
    assert base.ids.tolist() == [0, 1, 2, 3]
