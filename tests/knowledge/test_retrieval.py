"""Which entries are kept, what that promises, and that sums of few rows are products with all."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from attnflow.knowledge import Retrieval
from attnflow.knowledge.retrieval import best, certify, sum_of_rows


@pytest.mark.parametrize(
    ("retrieval", "total", "queries", "training", "expected"),
    [
        (Retrieval(k=10, search="dense"), 99, 1, False, True),
        (Retrieval(k=10, search="dense"), 99, 1, True, True),
        (Retrieval(threshold=0.0, search="dense"), 99, 1, True, True),
        (Retrieval(k=99, search="exact"), 99, 1, True, True),
        (Retrieval(k=98, search="exact"), 99, 1, False, False),
        (Retrieval(k=24), 99, 1, False, False),
        (Retrieval(k=25), 99, 1, False, True),
        (Retrieval(k=25), 99, 1, True, False),  # what is trained is the function of k entries
        (Retrieval(k=6), 99, 128, False, False),
        (Retrieval(k=7), 99, 128, False, True),
        (Retrieval(threshold=0.0), 99, 128, False, False),
    ],
)
def test_when_all_entries_are_read(retrieval, total, queries, training, expected):
    assert retrieval.reads_all(total, queries, training) is expected


@pytest.mark.parametrize(("queries", "most"), [(1, 1024), (8, 64), (9, 16)])
def test_a_source_that_copies_is_left_sooner(queries, most):
    """`most` of 4,096 entries are as slow to copy as all are to read."""
    assert Retrieval(k=most).reads_all(4096, queries, copied=True)
    assert not Retrieval(k=most - 1).reads_all(4096, queries, copied=True)


@st.composite
def scored(draw):
    queries, entries = draw(st.integers(1, 4)), draw(st.integers(1, 20))
    values = st.integers(-3, 3) if draw(st.booleans()) else st.floats(-3, 3)  # with ties, and without
    rows = draw(st.lists(st.lists(values, min_size=entries, max_size=entries), min_size=queries, max_size=queries))
    if draw(st.booleans()):
        retrieval = Retrieval(k=draw(st.integers(1, 25)), search="exact")
    else:
        retrieval = Retrieval(threshold=draw(st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 4.0])))
    return torch.tensor(rows, dtype=torch.float64), retrieval


@given(scored())
def test_the_best_are_kept_and_the_certificate_says_what_was_left(case):
    scores, retrieval = case
    rows = best(scores, retrieval)
    certificate = certify(scores, rows, retrieval)
    for query, row in enumerate(scores):
        kept = rows[query][rows[query] >= 0]
        assert len(kept.unique()) == len(kept)
        left = row[~torch.zeros(len(row), dtype=torch.bool).scatter(0, kept, True)]
        if retrieval.k is not None:
            assert len(kept) == min(retrieval.k, len(row))
        else:
            assert sorted(kept.tolist()) == (row > retrieval.threshold).nonzero()[:, 0].tolist()
        one = certificate[query]
        assert bool((left <= one.last).all())
        assert int(one.left_out) == len(left)
        assert int(one.active) == int((row > 0).sum())
        assert bool(one.complete) == (not bool((left > 0).any())) or not bool(one.complete)
        for name, function in (("relu", functional.relu), ("gelu", functional.gelu), ("silu", functional.silu)):
            assert function(left).abs().sum() <= one.error_bound(1.0, name) + 1e-12


@given(scored(), st.integers(0, 999))
def test_sums_of_rows_are_products_with_the_whole_table(case, seed):
    scores, retrieval = case
    table = torch.randn(scores.shape[1], 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    rows = best(scores, retrieval)
    mask = torch.stack([torch.isin(torch.arange(scores.shape[1]), row) for row in rows])
    expected = scores.masked_fill(~mask, 0) @ table
    weights = scores.gather(-1, rows.clamp(min=0)).masked_fill(rows < 0, 0)
    torch.testing.assert_close(sum_of_rows(weights, rows, table), expected)
