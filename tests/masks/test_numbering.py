"""Masks that are numbered inside: combined, compared and sliced in the numbering that keeps them small, or refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnflow import masks
from attnflow.masks import numbering
from attnflow.masks.intervals import IntervalRows
from tests.strategies import mask_pairs, square_masks

N = 131_072


@given(st.data())
def test_stretches_are_those_of_the_renamed_keys(data):
    n = data.draw(st.integers(1, 24))
    names = data.draw(st.lists(st.integers(0, n + 3), min_size=n, max_size=n, unique=True))
    pairs = data.draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(1, n)), min_size=1, max_size=8))
    starts, ends = (np.array(side, np.int32) for side in zip(*((s, max(s + 1, e)) for s, e in pairs), strict=True))
    rows, new_key = IntervalRows(np.arange(len(pairs) + 1), starts, ends, n), np.array(names)
    made = numbering.pieces_of(rows, new_key, 1000)
    assert made is not None
    sets = [set[int]() for _ in starts]
    for interval, start, end in zip(*(part.tolist() for part in made), strict=True):
        assert sets[interval].isdisjoint(range(start, end))
        sets[interval].update(range(start, end))
    assert sets == [set(new_key[s:e].tolist()) for s, e in zip(starts, ends, strict=True)]
    assert numbering.pieces_of(rows, new_key, len(made[0])) is not None
    fewest = sum(1 for keys in sets for key in keys if key - 1 not in keys)
    assert numbering.pieces_of(rows, new_key, fewest - 1) is None


@given(mask_pairs(9), st.sampled_from([0, 1, 4, 1000]))
def test_a_budget_changes_no_answer(pair, budget):
    """However few intervals may be made anew: the tables of small masks are looked through instead."""
    a, b = pair
    one, two = a.dense(), b.dense()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numbering, "RENAMED", budget)
        assert torch.equal((a & b).dense(), one & two)
        assert torch.equal((a | b).dense(), one | two)
        assert (a == b) == torch.equal(one, two)
        assert a.difference(b, limit=100) == [tuple(place) for place in (one != two).nonzero().tolist()]


@given(square_masks(), st.data())
def test_a_mask_equals_itself_under_other_numbers(mask, data):
    order = np.array(data.draw(st.permutations(range(mask.num_queries))), dtype=np.int64)
    again = masks.from_dense(mask.dense()[order][:, order]).permute(np.argsort(order))
    assert again == mask
    assert mask.difference(again) == []


def intervals(mask):
    return len(mask.numbered_keys()[0].starts)


def test_relabelled_masks_combine_in_as_many_intervals_as_they_need():
    causal = masks.causal(N)
    dilated = masks.dilated_window(N, 512, 16)
    everywhere = masks.global_tokens(N, range(0, N, 64))
    assert dilated & causal == dilated
    both = everywhere & causal
    assert intervals(both) < 4 * N
    assert both.keys(130).tolist() == [0, 64, 128, 130]
    assert both.keys(128).tolist() == list(range(129))
    assert intervals(everywhere | masks.sliding_window(N, 8)) < 8 * N
    assert masks.longformer(N, N, range(0, N, 64)) == masks.full(N)


def test_differences_of_long_masks():
    dilated = masks.dilated_window(N, 512, 16)
    other = dilated & ~masks.from_edges([(7, 7), (N - 1, N - 17)], N)
    assert dilated.difference(other) == [(7, 7), (N - 1, N - 17)]
    assert dilated != other


def test_a_slice_takes_no_more_than_its_rows():
    dilated = masks.dilated_window(N, 512, 16)
    assert dilated[40:42, 8:42].dense().nonzero().tolist() == [[0, 0], [0, 16], [0, 32], [1, 1], [1, 17], [1, 33]]


def test_what_fits_in_no_numbering_is_refused_with_what_it_would_take():
    generator = np.random.default_rng(0)
    one, two = (masks.causal(N).permute(generator.permutation(N)) for _ in range(2))
    for attempt in (lambda: one & two, lambda: one | two, one.intervals):
        with pytest.raises(
            ValueError, match=r"takes about [\d,]+ intervals of keys \([\d.,]+ GB\), more than [\d,]+ of a mask"
        ):
            attempt()


def test_long_blocks():
    mask = masks.big_bird(10**6, 100)
    assert mask.row_counts()[5 * 10**5] == 100 * 7
    assert mask.shape == (10**6, 10**6)
    with pytest.raises(ValueError, match=r"big_bird\(n=1000000, num_random=3000\) takes about"):
        masks.big_bird(10**6, 100, num_random=3000)


@pytest.mark.parametrize("dilation", [4, 64])
def test_windows_with_gaps_and_global_tokens_combine_at_131_072(dilation):
    """Neither numbering keeps both small: the global tokens in front of the residue classes do."""
    n, window = 131_072, 64
    tokens = np.arange(0, n, 100)
    one, two = masks.dilated_window(n, window, dilation), masks.global_tokens(n, tokens)
    both, either = one & two, one | two
    for query in [0, 1, 99, 100, 65_500, 65_501, n - 1]:
        dilated = set(range(query, -1, -dilation)[:window])
        others = set(range(n)) if query % 100 == 0 else {*tokens.tolist(), query}
        assert both.keys(query).tolist() == sorted(dilated & others)
        assert either.keys(query).tolist() == sorted(dilated | others)
    assert both == two & one
