import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnflow as af
from attnflow.tasks.trie import Trie

SEQUENCES = st.lists(st.lists(st.sampled_from([-3, 0, 1, 2**62]), max_size=7), max_size=9)


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
    mask = trie.mask()
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
    mask = trie.mask(columns, window)
    for node in range(trie.size):
        assert mask.keys(node).tolist() == [u for u in path(trie, node) if columns[node] - columns[u] < window]


def test_the_largest_child_comes_first():
    trie = Trie.of_sequences([[1, 9], [1, 2, 3], [1, 2, 4], [1, 8], [7]])
    order = [1, 2, 3, 4, 9, 8, 7]
    flat = [1, 9, 1, 2, 3, 1, 2, 4, 1, 8, 7]
    assert [flat[source] for source in trie.source] == order


@pytest.mark.parametrize("sequences", [[], [[]], [[], []]])
def test_no_items(sequences):
    trie = Trie.of_sequences(sequences)
    assert (trie.size, trie.mask().shape) == (0, (0, 0))


def test_offsets_must_cover_the_keys():
    with pytest.raises(ValueError, match="offsets must rise from 0 to the number of keys, 3"):
        Trie.of(np.arange(3), np.array([0, 2]))


def comb(teeth: int) -> list[list[int]]:
    """An agent's history with a branch at each turn."""
    return [[*range(turn), 10**6 + turn] for turn in range(teeth)]


def test_a_comb_has_few_intervals():
    trie = Trie.of_sequences(comb(500))
    assert trie.size == 999
    assert len(trie.mask().intervals().starts) <= 2 * trie.size


def test_64k_nodes_in_well_under_a_second():
    generator = np.random.default_rng(0)
    prompt = generator.integers(0, 50_000, 1_024)
    sequences = [np.concatenate([prompt, generator.integers(0, 50_000, 1_007)]) for _ in range(64)]
    start = time.process_time()
    trie = Trie.of_sequences(sequences)
    mask = trie.mask()
    taken = time.process_time() - start
    assert trie.size == 1_024 + 64 * 1_007
    assert len(mask.intervals().starts) < 2 * trie.size
    assert taken < 1.0
