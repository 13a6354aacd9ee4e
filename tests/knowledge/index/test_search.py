"""Exact and range search against brute force, shapes, and arguments that are refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnflow import MissingExtra
from attnflow.knowledge.index import EntryIndex, partition, upkeep
from attnflow.knowledge.index.exact import _candidates
from tests.knowledge.index.data import MODES, brute, built, clustered, read_all


@pytest.mark.parametrize("column", [None, 0, 2])
@pytest.mark.parametrize(("entries", "queries", "k"), [(1, 1, 1), (5, 3, 5), (700, 300, 9), (90_000, 3, 40)])
def test_exact_search_finds_the_best_and_counts_the_active(entries, queries, k, column):
    torch.manual_seed(0)
    rows, asked = torch.randn(entries, 8 + 3), torch.randn(queries, 8)
    hits = built(rows, 3, search="exact").search(asked, k, column)
    scores = brute(rows, asked, 8, column)
    best = scores.topk(k)
    torch.testing.assert_close(hits.scores, best.values.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.gather(1, hits.ids).float(), hits.scores, rtol=1e-5, atol=1e-5)
    assert all(len(set(found)) == k for found in hits.ids.tolist())
    assert torch.equal(hits.certificate.active, (scores > 0).sum(dim=1))
    assert torch.equal(hits.certificate.last, hits.scores[:, -1])
    assert (hits.certificate.total, hits.certificate.k) == (entries, k)


def test_rows_in_rising_order_replace_each_other():
    rows = torch.arange(200_000.0)[:, None]
    hits = built(rows, search="exact").search(torch.tensor([1.0]), 3)
    assert hits.ids.tolist() == [199_999, 199_998, 199_997]
    hits = built(-rows, search="exact").search(torch.tensor([1.0]), 3)
    assert hits.ids.tolist() == [0, 1, 2]


@given(seed=st.integers(0, 999), columns=st.integers(1, 30))
def test_candidates_are_the_scores_above_the_last(seed, columns):
    scores = torch.randn(4, columns, generator=torch.Generator().manual_seed(seed))
    values, slots = _candidates(scores, torch.zeros(4, 1), 100)
    for query in range(4):
        found = slots[query] >= 0
        above = (scores[query] > 0).nonzero()[:, 0]
        assert torch.equal(slots[query][found] - 100, above)
        assert torch.equal(values[query][found], scores[query, above])
        assert bool((values[query][~found] == -torch.inf).all())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("column", [None, 1])
def test_range_search_finds_all_above(monkeypatch, mode, column):
    rows = torch.cat([clustered(3000), torch.randn(3000, 2)], dim=1)
    index, queries = built(rows, 2, search=mode), clustered(5, seed=7)
    if mode == "approximate":
        monkeypatch.setattr(partition, "MOST", (1.0, 1.0))  # lists are read, however many
        read_all(index)
    scores = brute(rows, queries, 16, column)
    hits = index.range(queries, 14.0, column)
    assert hits.certificate.label == mode
    assert sum(map(len, hits)) > 5
    for query, one in enumerate(hits):
        assert set(one.ids.tolist()) == set((scores[query] > 14.0).nonzero()[:, 0].tolist())
        assert torch.equal(one.scores, one.scores.sort(descending=True).values)
        torch.testing.assert_close(one.scores, scores[query, one.ids].float())
        assert int(one.certificate.k) == len(one)
    if mode == "exact":
        assert torch.equal(hits.certificate.active, (scores > 0).sum(dim=1))
        assert not bool(hits.certificate.complete.any())
        assert bool(index.range(queries, 0.0, column).certificate.complete.all())
    else:
        assert hits.certificate.active is None
    assert index.range(queries, 1e9, column).ids.shape == (5, 0)


@pytest.mark.parametrize("mode", MODES)
def test_shapes_follow_the_queries(mode):
    index = built(clustered(300), search=mode)
    queries = clustered(6, seed=3)
    flat, cube, one = (index.search(q, 4) for q in (queries, queries.view(2, 3, 16), queries[0]))
    assert torch.equal(cube.ids.view(6, 4), flat.ids)
    assert cube.certificate.last.shape == (2, 3)
    assert one.ids.tolist() == flat.ids[0].tolist()
    assert one.certificate.last.shape == ()
    assert index.range(queries[0], 5.0).ids.ndim == 1
    assert index.search(queries[:0], 4).ids.shape == (0, 4)
    assert index.search(queries.double(), 4).scores.dtype == torch.float32
    assert torch.equal(index.search(queries.bfloat16().float(), 4).ids, index.search(queries.bfloat16(), 4).ids)


@pytest.mark.parametrize("mode", MODES)
def test_asking_for_more_than_there_is(mode):
    index = EntryIndex(16, search=mode)
    empty = index.search(clustered(2), 3)
    assert empty.ids.tolist() == [[-1] * 3] * 2
    assert empty.scores.tolist() == [[-torch.inf] * 3] * 2
    assert empty.certificate.total == 0
    assert index.range(clustered(2), 0.0).ids.shape == (2, 0)
    assert (index.mode, index.recall(clustered(2))) == (mode, 1.0)
    index.add(clustered(2))
    hits = index.search(clustered(1, seed=1), 5)
    assert sorted(hits.ids[0, :2].tolist()) == [0, 1]
    assert hits.ids[0, 2:].tolist() == [-1] * 3
    assert len(hits[0].ids) == 2
    if mode == "exact":
        assert bool(empty.certificate.complete.all())
        assert bool(hits.certificate.complete.all())
        assert float(hits.certificate.error_bound(9.0, "gelu")) == 0


def test_wrong_arguments_change_nothing():
    index, rows = EntryIndex(4, 1, search="approximate"), torch.ones(3, 5)
    index.build(rows)
    bad = rows.clone()
    bad[1, 4] = -torch.inf
    for call, message in [
        (lambda: index.add(bad), "row 1 of rows .* holds NaN or infinity .*large finite penalty"),
        (lambda: index.add(rows[:, :4]), r"rows \[entry \| thresholds\] must have shape \[n, 5\], got \[3, 4\]"),
        (lambda: index.build(bad), "row 1 of rows .* holds NaN"),
        (lambda: index.replace(torch.tensor([0]), bad[1:2]), "row 0 of rows .* holds NaN"),
        (lambda: index.replace(torch.tensor([0]), rows), "1 slots were given 3 rows"),
        (lambda: index.replace(torch.tensor([0, 0]), rows[:2]), "different from each other"),
        (lambda: index.replace(torch.tensor([3]), rows[:1]), r"positions in \[0, 3\), got 3"),
        (lambda: index.remove(torch.tensor([-1])), r"positions in \[0, 3\), got -1"),
        (lambda: index.remove(torch.tensor([1, 1])), "different from each other"),
        (lambda: index.search(torch.ones(5), 1), r"query must have shape \[4\] or \[..., 4\], got \[5\]"),
        (lambda: index.search(torch.full((2, 4), torch.nan), 1), "row 0 of query holds NaN"),
        (lambda: index.search(torch.full((4,), 1e300, dtype=torch.float64), 1), "row 0 of query holds NaN or infinity"),
        (lambda: index.search(torch.ones(4), 0), "k must be at least 1, got 0"),
        (lambda: index.search(torch.ones(4), 10**12), "k must be at most 1048576, got 1000000000000"),
        (
            lambda: index.search(torch.full((4,), 1e30), 1),
            "row 0 of query holds NaN or infinity .* or numbers above 1e\\+16",
        ),
        (lambda: index.search(torch.ones(4), 1, 1), "threshold_column must be at most 0, got 1"),
        (lambda: index.search(torch.ones(4), 1, -1), "threshold_column must be at least 0"),
        (
            lambda: EntryIndex(4).search(torch.ones(4), 1, 0),
            "threshold_column is 0, but there are no threshold columns",
        ),
        (lambda: index.range(torch.ones(4), float("nan")), "threshold must be a number"),
        (lambda: index.calibrate(torch.ones(0, 4)), "at least one query"),
        (lambda: EntryIndex(4, target_recall=0.0), r"target_recall must be in \(0, 1\]"),
        (lambda: EntryIndex(0), "dim must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert torch.equal(index.rows, rows)
    assert index.search(torch.ones(4), 3).scores.tolist() == [4.0] * 3


def test_without_faiss_auto_stays_exact_and_approximate_says_what_to_install(monkeypatch):
    monkeypatch.setattr(upkeep, "FEWEST", 100)
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    index = built(clustered(200))
    assert index.mode == "exact"
    assert "needs faiss, which is not installed" in index.reason
    with pytest.raises(MissingExtra, match=r"attnflow\[knowledge\]"):
        EntryIndex(4, search="approximate")
