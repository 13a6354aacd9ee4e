"""Prefix trees against sets of prefixes, and the trees of a batch against its rows."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import attnflow as af
from attnflow.tasks.prefixes import Batch, PassCost, Trie, plan

SEQUENCES = st.lists(st.lists(st.sampled_from([-3, 0, 1, 2**62]), max_size=7), max_size=9)


def mask_of(trie: Trie, *window: object) -> af.masks.Mask:
    return af.masks.Mask(trie.ancestors(*window), "prefix_tree", {})


def path(trie: Trie, node: int) -> list[int]:
    return [] if node < 0 else [*path(trie, int(trie.parent[node])), node]


def beginnings(sequences: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(one[:length]) for one in sequences for length in range(1, len(one) + 1)}


@given(SEQUENCES)
def test_nodes_are_the_different_beginnings(sequences):
    trie = Trie.of_sequences(sequences)
    items = [(s, i) for s, one in enumerate(sequences) for i in range(len(one))]
    begin = {node: tuple(sequences[s][: i + 1]) for (s, i), node in zip(items, trie.node_of.tolist(), strict=True)}
    assert set(begin.values()) == beginnings(sequences)
    assert len(begin) == trie.size == len(beginnings(sequences))
    for node, (s, i) in enumerate(items[source] for source in trie.source.tolist()):
        assert begin[node] == tuple(sequences[s][: i + 1])
        assert s == min(t for t, one in enumerate(sequences) if tuple(one[: i + 1]) == begin[node])
        assert trie.depth[node] == i
        parent = int(trie.parent[node])
        assert (begin[parent] if parent >= 0 else ()) == begin[node][:-1]


@given(SEQUENCES)
def test_numbers_are_depth_first_and_the_mask_holds_ancestors(sequences):
    trie = Trie.of_sequences(sequences)
    paths = [path(trie, node) for node in range(trie.size)]
    mask = mask_of(trie)
    if trie.size:
        assert mask == af.masks.tree(trie.parent)
    for node, above in enumerate(paths):
        below = [other for other in range(trie.size) if node in paths[other]]
        assert below == list(range(node, trie.end[node]))
        assert mask.keys(node).tolist() == above
        assert trie.head[node] <= node
        assert set(range(trie.head[node], node + 1)) <= set(above)
        assert trie.parent[trie.head[node]] != trie.head[node] - 1 or trie.head[node] == 0
        assert len(mask.intervals().row(node)) <= np.log2(max(trie.size, 1)) + 1


@given(SEQUENCES, st.integers(1, 9), st.integers(1, 3))
def test_a_window_reads_the_last_of_the_path(sequences, window, step):
    trie = Trie.of_sequences(sequences)
    columns = 5 + step * trie.depth
    mask = mask_of(trie, columns, window)
    for node in range(trie.size):
        assert mask.keys(node).tolist() == [u for u in path(trie, node) if columns[node] - columns[u] < window]


@pytest.mark.parametrize("sequences", [[], [[]], [[], []]])
def test_no_items(sequences):
    trie = Trie.of_sequences(sequences)
    assert (trie.size, mask_of(trie).shape) == (0, (0, 0))


COSTS = [PassCost(1.0, 0.0, 1.0), PassCost(10.0, 1.0, 1.0), PassCost(0.0, 1.0, 0.0)]


@st.composite
def batches(draw):
    rows, length = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    table = st.lists(st.lists(st.integers(0, 1), min_size=length, max_size=length), min_size=rows, max_size=rows)
    ids, real = (np.array(draw(table), np.int64) for _ in range(2))
    labels = np.array(draw(table)) * 2 + np.array(draw(table)) - 100 * np.array(draw(table))
    labels[labels < 0] = -100
    before = np.zeros_like(real)
    before[:, 1:] = real[:, :-1]
    labels[before == 0] = -100
    start = draw(st.integers(0, 3))
    columns = np.broadcast_to(np.arange(length), ids.shape)
    starts = np.array(draw(table)).astype(bool) | (columns == 0) if draw(st.booleans()) else columns == 0
    positions = columns - np.maximum.accumulate(np.where(starts, columns, 0), axis=1) + start
    packed = starts if starts[:, 1:].any() else None
    given = labels if draw(st.booleans()) else None
    return Batch(ids, real.astype(bool), positions, given, draw(st.booleans()), packed)


IDS = np.array([[5, 6, 7, 8, 5, 6, 9, 9]])
PACKED = Batch(IDS, IDS > 0, np.arange(8)[None] % 4, starts=np.arange(8)[None] % 4 == 0)


@example(PACKED, PassCost(1.0, 0.0, 0.0), True, 2)
@given(batches(), st.sampled_from(COSTS), st.booleans(), st.none() | st.integers(1, 8))
def test_every_token_sees_what_it_saw_in_its_row(batch, cost, one_row, window):
    chosen = plan(batch, cost, one_row)
    if not batch.real.any():
        assert chosen is None
        return
    rows, width = chosen.shape
    allowed = chosen.allowed(window)
    assert (chosen.place >= 0).tolist() == batch.real.tolist()
    assert chosen.tokens == batch.real.sum()
    assert not one_row or rows == 1
    if rows == 1:
        assert np.array_equal(chosen.mask(window).dense().numpy(), allowed[0])
    for row, column in zip(*np.nonzero(batch.real), strict=True):
        place = int(chosen.place[row, column])
        at, slot = divmod(place, width)
        assert chosen.ids.flat[place] == batch.ids[row, column]
        assert chosen.positions.flat[place] == batch.positions[row, column]
        first = 0 if batch.starts is None else np.flatnonzero(batch.starts[row, : column + 1])[-1]
        seen = [k for k in range(first, column + 1) if batch.real[row, k] and (window is None or column - k < window)]
        assert sorted(chosen.place[row, seen] % width) == np.flatnonzero(allowed[at, slot]).tolist()


@given(batches(), st.sampled_from(COSTS), st.booleans())
def test_every_label_stands_once_after_a_slot_of_its_token(batch, cost, one_row):
    chosen = plan(batch, cost, one_row)
    if chosen is None or batch.labels is None:
        assert chosen is None or (chosen.labels is None and chosen.label_place is None)
        return
    _, width = chosen.shape
    allowed, used = chosen.allowed(), []
    for row, column in zip(*np.nonzero(batch.labels[:, 1:] != -100), strict=True):
        at, slot = divmod(int(chosen.label_place[row, column]), width - 1)
        used.append((at, slot))
        assert chosen.labels[at, slot + 1] == batch.labels[row, column + 1]
        assert chosen.ids[at, slot] == batch.ids[row, column]
        assert chosen.positions[at, slot] == batch.positions[row, column]
        node = int(chosen.place[row, column]) % width
        assert allowed[at, slot, slot]
        assert set(np.flatnonzero(allowed[at, slot])) - {slot} == set(np.flatnonzero(allowed[at, node])) - {node}
    assert len(set(used)) == len(used) == (chosen.labels != -100).sum() == (chosen.label_place >= 0).sum()


def test_ids_that_do_not_fit():
    ids = np.array([[2**62, -(2**62)]])
    with pytest.raises(ValueError, match="more than 64 bits"):
        Batch(ids, ids == ids, np.array([[0, 1]])).keys()
