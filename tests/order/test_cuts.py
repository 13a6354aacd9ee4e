"""Cuts against every set of positions and of pairs, on small random masks and stacks."""

from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnflow import masks
from attnflow.order import analyze
from tests.refused import refused


def flows(tables, source, target, closed):
    """Whether information of a source reaches a target: through every table once, or through one again and again."""
    n = len(tables[0])
    here = np.zeros(n, bool)
    here[list(source)] = True
    for table in tables * n if closed else tables:
        here = here | (table & here).any(axis=1)
    return here[list(target)].any()


def without_positions(tables, positions):
    left = [table.copy() for table in tables]
    for table in left:
        table[list(positions)] = False
        table[:, list(positions)] = False
    return left


def without_pairs(tables, pairs):
    left = [table.copy() for table in tables]
    for table in left:
        for query, key in pairs:
            table[query, key] = False
    return left


def fewest(tables, closed, candidates, without, ends):
    """The size of the smallest set that separates; None if no set does."""
    for size in range(len(candidates) + 1):
        for chosen in combinations(candidates, size):
            if not flows(without(tables, chosen), *ends, closed):
                return size
    return None


@st.composite
def questions(draw, max_size, max_layers):
    n, layers = draw(st.integers(2, max_size)), draw(st.integers(1, max_layers))
    bits = st.lists(st.booleans(), min_size=n * n, max_size=n * n)
    tables = [np.array(draw(bits), bool).reshape(n, n) for _ in range(layers)]
    role = draw(st.lists(st.sampled_from("  st"), min_size=n, max_size=n))
    ends = [[i for i in range(n) if role[i] == letter] for letter in "st"]
    rest = [i for i in range(n) if role[i] == " "]
    return tables, ends[0] or [rest[0] if rest else 0], ends[1] or [n - 1]


def checked(tables, source, target, stacked, what):
    if set(source) & set(target):
        return
    made = [masks.from_dense(torch.from_numpy(table)) for table in tables]
    flow = analyze(made if stacked else made[0])
    cut = flow.cut(source, target, what)
    n = len(tables[0])
    every = {(q, k) for table in tables for q, k in np.argwhere(table).tolist() if q != k}
    middle = [i for i in range(n) if i not in (*source, *target)]
    if what == "positions":
        size = fewest(tables, not stacked, middle, without_positions, (source, target))
        left = without_positions(tables, cut.positions)
    else:
        size = fewest(tables, not stacked, sorted(every), without_pairs, (source, target))
        left = without_pairs(tables, cut.pairs)
    assert cut.ok == cut.separated == (size is not None)
    assert bool(cut.path) == flows(tables, source, target, not stacked)
    if cut.separated:
        assert len(cut.positions or cut.pairs) == size
        assert not flows(left, source, target, not stacked)
    else:
        assert not set(cut.path) & set(middle)
    follows(cut.path, tables, source, target, stacked)
    assert type(cut).from_json(cut.to_json()) == cut


def follows(path, tables, source, target, stacked):
    if path:
        assert path[0] in source
        assert path[-1] in target
        assert not stacked or len(path) == len(tables) + 1
        for step, (key, query) in enumerate(pairwise(path)):
            assert tables[step if stacked else 0][query, key] or (stacked and key == query)


@settings(max_examples=200)
@given(questions(7, 1))
def test_the_fewest_positions(question):
    checked(*question, stacked=False, what="positions")


@settings(max_examples=150)
@given(questions(4, 1))
def test_the_fewest_pairs(question):
    checked(*question, stacked=False, what="pairs")


@settings(max_examples=100)
@given(questions(6, 3))
def test_the_fewest_positions_of_a_stack(question):
    checked(*question, stacked=True, what="positions")


@settings(max_examples=75)
@given(questions(4, 3))
def test_the_fewest_pairs_of_a_stack(question):
    checked(*question, stacked=True, what="pairs")


@settings(max_examples=200)
@given(questions(7, 3), st.booleans(), st.data())
def test_a_channel_is_the_only_one_if_nothing_flows_without_it(question, stacked, data):
    tables, source, target = question
    rest = [i for i in range(len(tables[0])) if i not in (*source, *target)]
    if not rest or set(source) & set(target):
        return
    channel = data.draw(st.lists(st.sampled_from(rest), min_size=1, unique=True))
    tables = tables if stacked else tables[:1]
    made = [masks.from_dense(torch.from_numpy(table)) for table in tables]
    found = analyze(made if stacked else made[0]).only_channel(channel, source, target)
    around = flows(without_positions(tables, channel), source, target, not stacked)
    assert found.separated == (not around)
    assert bool(found.path) == flows(tables, source, target, not stacked)
    assert found.ok == (not around and bool(found.path))
    assert around == (bool(found.path) and not set(channel) & set(found.path))
    follows(found.path, tables, source, target, stacked)


GIST = masks.causal(12) & ~masks.from_edges([(q, k) for q in range(8, 12) for k in range(6)], 12)


def test_sentences():
    flow = analyze(GIST)
    assert (
        str(flow.cut(range(6), range(8, 12))) == "all information from 0-5 to 8-11 passes positions 6, 7: 0 -> 6 -> 8"
    )
    assert str(flow.only_channel([6, 7], range(6), [11])) == (
        "positions 6, 7 are the only channel from 0-5 to 11: 0 -> 6 -> 11"
    )
    assert str(flow.only_channel([6], range(6), [11])) == (
        "position 6 is not the only channel from 0-5 to 11: 0 -> 7 -> 11 goes around"
    )
    leak = analyze([GIST, GIST | masks.from_edges([(9, 2)], 12)])
    assert str(leak.cut(range(6), range(8, 12))) == "no positions separate 8-11 from 0-5: 2 -> 9 is direct"
    assert str(leak.only_channel([6, 7], range(6), [8])).endswith("are the only channel from 0-5 to 8: 0 -> 6 -> 8")
    assert str(flow.cut([11], [0])) == "nothing flows from 11 to 0"
    assert not flow.only_channel([6], [11], [0]).ok
    assert str(flow.cut([4], [6], "pairs")) == "all information from 4 to 6 passes pairs (6, 4), (6, 5): 4 -> 6"
    assert flow.cut([11], [0]).ok


def test_of_several_smallest_cuts_it_is_the_one_nearest_the_targets():
    flow = analyze(masks.sliding_window(9, 2))
    assert flow.cut([0], [8]).positions == (7,)
    assert flow.cut([0], [8], "pairs").pairs == ((8, 7),)


def test_a_long_mask_that_is_numbered_anew():
    """Two documents, of which the second reads two positions of the first, in a random order of their positions."""
    n, generator = 3000, np.random.default_rng(0)
    order = generator.permutation(n)
    place = np.argsort(order)
    one = masks.document([1500, n - 1500]) | masks.from_edges([(q, k) for q in range(1500, n) for k in (900, 901)], n)
    flow = analyze(one.permute(order))
    cut = flow.cut(place[:800], place[2000:2010])
    assert sorted(order[list(cut.positions)].tolist()) == [900, 901]
    assert flow.only_channel(place[[900, 901]], place[:800], place[2500:]).ok
    assert not flow.only_channel(place[[900]], place[:800], place[2500:]).ok


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda flow: flow.cut([], [3]), "sources must hold at least one position, got none"),
        (lambda flow: flow.cut([0, 3], [3]), "sources and targets must not share positions, got 3 in both"),
        (lambda flow: flow.cut([0], [12]), r"targets must hold positions in \[0, 12\), got 12"),
        (lambda flow: flow.only_channel([0], [0, 1], [3]), "channel and sources must not share positions, got 0"),
        (lambda flow: flow.cut([0], [3], "layers"), 'what must be "positions" or "pairs"'),
    ],
)
def test_questions_without_an_answer(ask, message):
    with refused(ValueError, message):
        ask(analyze(GIST))


def test_what_is_too_large_is_refused():
    with pytest.raises(ValueError, match=r"a cut looks at every pair, and these are 32,016,000, more than 16,777,216"):
        analyze(masks.block_causal(8000, 4)).cut([0], [7999], "pairs")
