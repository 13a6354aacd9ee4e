"""Exact, approximate and range search against brute force."""

import re

import pytest
import torch

from attnflow.knowledge import Store
from attnflow.knowledge.store import store as store_module
from attnflow.knowledge.store.approximate import recall_of

MODES = ("exact", "approximate")


def clustered(count, dim=16, clusters=40, seed=0, spread=0.3):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(clusters, dim, generator=torch.Generator().manual_seed(99))
    which = torch.randint(clusters, (count,), generator=generator)
    return centres[which] + spread * torch.randn(count, dim, generator=generator)


def built(rows, num_thresholds=0, place="memory"):
    dim = rows.shape[1] - num_thresholds
    store = Store.open(place, dim=dim, num_thresholds=num_thresholds)
    store.insert(embeddings=rows[:, :dim], thresholds=rows[:, dim:])
    return store


def brute(rows, queries, dim, column=None):
    scores = queries.double() @ rows[:, :dim].double().T
    return scores if column is None else scores + rows[:, dim + column].double()


@pytest.mark.parametrize("column", [None, 0, 2])
@pytest.mark.parametrize(("entries", "queries", "k"), [(1, 1, 1), (5, 3, 5), (700, 300, 9), (90_000, 3, 40)])
def test_exact_search_finds_the_best_and_counts_the_active(entries, queries, k, column):
    torch.manual_seed(0)
    rows, asked = torch.randn(entries, 8 + 3), torch.randn(queries, 8)
    hits = built(rows, 3).search(asked, k, threshold_column=column)
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
    hits = built(rows).search(torch.tensor([1.0]), 3)
    assert hits.ids.tolist() == [199_999, 199_998, 199_997]
    hits = built(-rows).search(torch.tensor([1.0]), 3)
    assert hits.ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize("column", [None, 1])
def test_range_search_finds_all_above(column):
    rows = torch.cat([clustered(3000), torch.randn(3000, 2)], dim=1)
    store, queries = built(rows, 2), clustered(5, seed=7)
    scores = brute(rows, queries, 16, column)
    hits = store.range(queries, 14.0, threshold_column=column)
    assert sum(map(len, hits)) > 5
    for query, one in enumerate(hits):
        assert set(one.ids.tolist()) == set((scores[query] > 14.0).nonzero()[:, 0].tolist())
        assert torch.equal(one.scores, one.scores.sort(descending=True).values)
        torch.testing.assert_close(one.scores, scores[query, one.ids].float())
        assert int(one.certificate.k) == len(one)
    assert torch.equal(hits.certificate.active, (scores > 0).sum(dim=1))
    assert not bool(hits.certificate.complete.any())
    assert bool(store.range(queries, 0.0, threshold_column=column).certificate.complete.all())
    assert store.range(queries, 1e9, threshold_column=column).ids.shape == (5, 0)


@pytest.mark.parametrize("mode", MODES)
def test_shapes_follow_the_queries(mode):
    store, queries = built(clustered(300)), clustered(6, seed=3)
    flat, cube, one = (store.search(q, 4, mode=mode) for q in (queries, queries.view(2, 3, 16), queries[0]))
    assert torch.equal(cube.ids.view(6, 4), flat.ids)
    assert cube.certificate.last.shape == (2, 3)
    assert one.ids.tolist() == flat.ids[0].tolist()
    assert one.certificate.last.shape == ()
    assert store.range(queries[0], 5.0).ids.ndim == 1
    assert store.search(queries[:0], 4, mode=mode).ids.shape == (0, 4)
    assert store.search(queries.double(), 4, mode=mode).scores.dtype == torch.float32


@pytest.mark.parametrize("mode", MODES)
def test_asking_for_more_than_there_is(mode):
    store = Store.open("memory", dim=16)
    empty = store.search(clustered(2), 3, mode=mode)
    assert empty.ids.tolist() == [[-1] * 3] * 2
    assert empty.scores.tolist() == [[-torch.inf] * 3] * 2
    assert empty.certificate.total == 0
    assert store.range(clustered(2), 0.0).ids.shape == (2, 0)
    store.insert(embeddings=clustered(2))
    hits = store.search(clustered(1, seed=1), 5, mode=mode)
    assert sorted(hits.ids[0, :2].tolist()) == [0, 1]
    assert hits.ids[0, 2:].tolist() == [-1] * 3
    assert len(hits[0].ids) == 2
    if mode == "exact":
        assert bool(empty.certificate.complete.all())
        assert bool(hits.certificate.complete.all())
        assert float(hits.certificate.error_bound(9.0, "gelu")) == 0


def test_auto_is_exact_up_to_a_million_entries_and_approximate_beyond(monkeypatch, directory):
    monkeypatch.setattr(store_module, "MOST_EXACT", 500)
    store = built(clustered(500), place=directory)
    assert store.stats().mode == store.search(clustered(1), 3).certificate.label == "exact"
    store.insert(embeddings=clustered(1, seed=5))
    with Store.open(directory, read_only=True) as reader:  # it has no index, and cannot make one
        assert reader.stats().mode == reader.search(clustered(1), 3).certificate.label == "exact"
        there = reader.search(clustered(20, seed=1), 10, mode="approximate")
        assert "an approximate search has no index yet" in reader.stats().reason
        found = store.search(clustered(20, seed=1), 10)
        reader.refresh()
        assert reader.stats().mode == reader.search(clustered(1), 3).certificate.label == "approximate"
    for one in (found, there):
        assert one.certificate.label == "approximate"
        assert not bool(one.certificate.complete.any())
        assert bool(one.certificate.error_bound(1.0).isinf().all())
    assert store.stats().mode == "approximate"
    measured = r"reads \d+ lists of LanceDB's index and, .* found (99\.\d|100\.0) % of the ten best"
    assert re.search(measured, store.stats().reason)
    assert store.search(clustered(1), 3, mode="exact").certificate.label == "exact"


@pytest.mark.parametrize("layers", [0, 3])
def test_approximate_search_reaches_the_recall_that_it_reports(layers):
    """Entries of several layers are kept apart by penalties, as those of a converted model are."""
    rows = clustered(6000, clusters=300)
    if layers:
        columns = torch.full((len(rows), layers), -1e9)
        columns[torch.arange(len(rows)), torch.arange(len(rows)) % layers] = 0.0
        rows = torch.cat([rows, columns], dim=1)
    store, queries = built(rows, layers), clustered(200, clusters=300, seed=3)
    for column in range(layers) or [None]:
        found = store.search(queries, 10, threshold_column=column, mode="approximate")
        scores = brute(rows, queries, 16, column)
        assert recall_of(found.scores.numpy(), scores.topk(10).values.float().numpy()) >= 0.97
        torch.testing.assert_close(found.scores, scores.gather(1, found.ids).float(), rtol=1e-5, atol=1e-4)
    assert 0 < store._approximate.probes < 155


def test_an_approximate_search_sees_every_write(place):
    """What came after the index is compared, what went is not found, and an older version has no index."""
    with Store.open(place, dim=16) as store:
        store.insert(embeddings=clustered(400))
        store.snapshot("before")
        far = 9 * torch.eye(16)[:1]
        assert store.search(far, 1, mode="approximate").certificate.total == 400
        new = store.insert(embeddings=100 * far)
        assert store.search(far, 1, mode="approximate").ids.tolist() == [new.tolist()]
        store.upsert(ids=[7], embeddings=200 * far)
        assert store.search(far, 2, mode="approximate").ids.tolist() == [[7, int(new)]]
        store.compact()
        store.delete(new)
        assert store.search(far, 2, mode="approximate").ids.tolist()[0][0] == 7
        assert int(new) not in store.search(far, 30, mode="approximate").ids
        store.restore("before")
        every = store.search(far, 400)  # the index may miss some of the best: LanceDB draws its lists at random
        exact = dict(zip(every.ids[0].tolist(), every.scores[0].tolist(), strict=True))
        found = store.search(far, 3, mode="approximate")
        assert found.scores[0].tolist() == pytest.approx([exact[number] for number in found.ids[0].tolist()])
