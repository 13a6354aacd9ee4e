"""One index over augmented rows: against brute force, through edits, with thresholds that could mislead a search."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from attnflow import MissingExtra
from attnflow.knowledge.index import EntryIndex, entry_index
from attnflow.knowledge.index.exact import _candidates
from attnflow.knowledge.index.lock import ReadersWriter

MODES = ("exact", "approximate")


def clustered(count, dim=16, clusters=40, seed=0, spread=0.3):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(clusters, dim, generator=torch.Generator().manual_seed(99))
    which = torch.randint(clusters, (count,), generator=generator)
    return centres[which] + spread * torch.randn(count, dim, generator=generator)


def built(rows, num_thresholds=0, **options):
    index = EntryIndex(rows.shape[1] - num_thresholds, num_thresholds, **options)
    index.build(rows)
    return index


def brute(rows, queries, dim, column=None):
    scores = queries.double() @ rows[:, :dim].double().T
    return scores if column is None else scores + rows[:, dim + column].double()


@pytest.mark.parametrize("column", [None, 0, 2])
@pytest.mark.parametrize(("entries", "queries", "k"), [(1, 1, 1), (5, 3, 5), (700, 300, 9), (90_000, 3, 40)])
def test_exact_search_finds_the_best_and_counts_the_active(entries, queries, k, column):
    torch.manual_seed(0)
    rows, asked = torch.randn(entries, 8 + 3), torch.randn(queries, 8)
    hits = built(rows, 3, search="exact").search(asked, k, column)
    scores = brute(rows, asked, 8, column)
    best = scores.topk(k)
    torch.testing.assert_close(hits.scores, best.values.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.gather(1, hits.slots).float(), hits.scores, rtol=1e-5, atol=1e-5)
    assert all(len(set(found)) == k for found in hits.slots.tolist())
    assert torch.equal(hits.certificate.active, (scores > 0).sum(dim=1))
    assert torch.equal(hits.certificate.last, hits.scores[:, -1])
    assert (hits.certificate.total, hits.certificate.k) == (entries, k)


def test_rows_in_rising_order_replace_each_other():
    rows = torch.arange(200_000.0)[:, None]
    hits = built(rows, search="exact").search(torch.tensor([1.0]), 3)
    assert hits.slots.tolist() == [199_999, 199_998, 199_997]
    hits = built(-rows, search="exact").search(torch.tensor([1.0]), 3)
    assert hits.slots.tolist() == [0, 1, 2]


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
def test_range_search_finds_all_above(mode, column):
    rows = torch.cat([clustered(3000), torch.randn(3000, 2)], dim=1)
    index, queries = built(rows, 2, search=mode), clustered(5, seed=7)
    if mode == "approximate":
        index._partition.set_probes(index._partition.num_lists)
    scores = brute(rows, queries, 16, column)
    hits = index.range(queries, 14.0, column)
    assert hits.certificate.label == mode
    assert sum(map(len, hits)) > 5
    for query, one in enumerate(hits):
        assert set(one.slots.tolist()) == set((scores[query] > 14.0).nonzero()[:, 0].tolist())
        assert torch.equal(one.scores, one.scores.sort(descending=True).values)
        torch.testing.assert_close(one.scores, scores[query, one.slots].float())
        assert int(one.certificate.k) == len(one)
    if mode == "exact":
        assert torch.equal(hits.certificate.active, (scores > 0).sum(dim=1))
        assert not bool(hits.certificate.complete.any())
        assert bool(index.range(queries, 0.0, column).certificate.complete.all())
    else:
        assert hits.certificate.active is None
    assert index.range(queries, 1e9, column).slots.shape == (5, 0)


@pytest.mark.parametrize("mode", MODES)
def test_shapes_follow_the_queries(mode):
    index = built(clustered(300), search=mode)
    queries = clustered(6, seed=3)
    flat, cube, one = (index.search(q, 4) for q in (queries, queries.view(2, 3, 16), queries[0]))
    assert torch.equal(cube.slots.view(6, 4), flat.slots)
    assert cube.certificate.last.shape == (2, 3)
    assert one.slots.tolist() == flat.slots[0].tolist()
    assert one.certificate.last.shape == ()
    assert index.range(queries[0], 5.0).slots.ndim == 1
    assert index.search(queries[:0], 4).slots.shape == (0, 4)
    assert index.search(queries.double(), 4).scores.dtype == torch.float32
    assert torch.equal(index.search(queries.bfloat16().float(), 4).slots, index.search(queries.bfloat16(), 4).slots)


@pytest.mark.parametrize("mode", MODES)
def test_asking_for_more_than_there_is(mode):
    index = EntryIndex(16, search=mode)
    empty = index.search(clustered(2), 3)
    assert empty.slots.tolist() == [[-1] * 3] * 2
    assert empty.scores.tolist() == [[-torch.inf] * 3] * 2
    assert empty.certificate.total == 0
    assert index.range(clustered(2), 0.0).slots.shape == (2, 0)
    assert (index.mode, index.recall(clustered(2))) == (mode, 1.0)
    index.add(clustered(2))
    hits = index.search(clustered(1, seed=1), 5)
    assert sorted(hits.slots[0, :2].tolist()) == [0, 1]
    assert hits.slots[0, 2:].tolist() == [-1] * 3
    assert len(hits[0].slots) == 2
    if mode == "exact":
        assert bool(empty.certificate.complete.all())
        assert bool(hits.certificate.complete.all())
        assert float(hits.certificate.error_bound(9.0, "gelu")) == 0


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
            self.index._partition.set_probes(self.index._partition.num_lists)
        queries = self.make(2)[:, :3]
        hits = self.index.search(queries, 4, 0)
        best = brute(expected, queries, 3, 0).topk(min(4, len(expected))).values.float()
        torch.testing.assert_close(hits.scores[:, : best.shape[1]], best)


Editing.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestEditing = Editing.TestCase


def test_recall_is_reached_on_clustered_rows_and_measured():
    index = built(clustered(8000, clusters=60), search="approximate")
    queries = clustered(200, seed=5, clusters=60)
    assert index.mode == "approximate"
    assert index.recall(queries) >= 0.99
    assert "lists hold" in index.reason
    assert index._partition.probes < index._partition.num_lists / 4
    index._partition.set_probes(1)
    found, truth = index.search(queries, 32).slots, index.search(queries, 32, mode="exact").slots
    same = np.mean([len(set(a) & set(b)) / 32 for a, b in zip(found.tolist(), truth.tolist(), strict=True)])
    assert index.recall(queries) == pytest.approx(same, abs=1e-3)
    assert same < 0.99


def test_equal_rows_do_not_count_as_missed():
    index = built(torch.ones(400, 4), search="approximate")
    assert index.recall(torch.ones(3, 4), 5) == 1.0


def test_auto_is_exact_for_few_and_for_random_rows(monkeypatch):
    monkeypatch.setattr(entry_index, "FEWEST", 2000)
    index = built(clustered(1999))
    assert (index.mode, index.reason) == ("exact", "fewer than 2,000 entries, where exact search is no slower")
    index.add(clustered(1, seed=1))
    assert index.mode == "approximate"
    random = built(torch.randn(4000, 16, generator=torch.Generator().manual_seed(0)))
    assert random.mode == "exact"
    assert random.reason.endswith("exact search is no slower")
    with pytest.raises(ValueError, match=r"no partition to search approximately .*lists hold"):
        random.search(torch.zeros(16), 1, mode="approximate")
    random.calibrate(random.rows[:50], k=1)  # each finds itself in the first lists
    assert random.mode == "approximate"
    index.calibrate(torch.randn(50, 16), k=500)
    assert index.mode == "exact"
    index.build(clustered(4000))
    assert (index.mode, "queries given" in index.reason) == ("exact", True)


def test_auto_goes_back_to_exact_when_most_are_removed(monkeypatch):
    monkeypatch.setattr(entry_index, "FEWEST", 2000)
    index = built(clustered(3000))
    index.remove(torch.arange(1990))
    assert index.mode == "approximate"
    index.remove(torch.arange(11))
    assert index.mode == "exact"


def test_rows_are_partitioned_anew_when_as_many_changed():
    index = built(clustered(500), search="approximate")
    first = index._partition
    index.add(clustered(300, seed=1))
    index.replace(torch.arange(199), clustered(199, seed=2))
    assert index._partition is first
    index.replace(torch.arange(1), clustered(1, seed=3))
    assert index._partition is not first
    assert index._partition.num_lists > first.num_lists
    assert index.recall(clustered(100, seed=4)) > 0.97


def test_recall_survives_growth_out_of_the_first_clusters():
    index = EntryIndex(16, search="approximate")
    for seed in range(12):
        index.add(clustered(700, seed=seed) + 0.5 * seed)
    queries = torch.cat([clustered(30, seed=50 + seed) + 0.5 * seed for seed in range(12)])
    assert index.recall(queries) > 0.97


@pytest.mark.parametrize("penalty", [100.0, 1e4, 1e9])
@pytest.mark.parametrize("mode", MODES)
def test_stacked_layers_do_not_see_each_other(mode, penalty):
    layers, each = 4, 800
    entries = torch.cat([clustered(each, seed=layer) for layer in range(layers)])
    owner = torch.arange(layers).repeat_interleave(each)
    thresholds = torch.randn(layers * each, 1, generator=torch.Generator().manual_seed(1)).expand(-1, layers).clone()
    thresholds[owner[:, None] != torch.arange(layers)] = -penalty
    rows = torch.cat([entries, thresholds], dim=1)
    index, queries = built(rows, layers, search=mode), clustered(40, seed=9)
    largest = float(brute(rows, queries, 16).max())
    assert penalty > largest > 10
    for layer in range(layers):
        hits = index.search(queries, 32, layer)
        own = rows[owner == layer]
        best = brute(own, queries, 16, layer).topk(32).values.float()
        found = hits.scores >= best[:, -1:] - 1e-4
        assert float(found.double().mean()) >= (1.0 if mode == "exact" else 0.97)
        assert bool((owner[hits.slots[found]] == layer).all())
        assert bool((owner[hits.slots] == layer).all())
        if mode == "approximate":  # what is read is not thinned by the layers that are out of reach
            assert index._partition.share(queries.numpy(), layer) < 0.2


def test_many_columns_of_thresholds_do_not_blur_the_partition():
    thresholds = 2 * torch.randn(6000, 16, generator=torch.Generator().manual_seed(0))
    index = built(torch.cat([clustered(6000), thresholds], dim=1), 16, search="approximate")
    queries = 3 * clustered(100, seed=3)
    index.calibrate(queries, 10, threshold_column=5)
    assert index.recall(queries, 10, threshold_column=5) >= 0.99
    assert index._partition.share(queries.numpy(), 5) < 0.2


def test_an_entry_with_a_large_threshold_is_not_hidden_by_its_neighbours():
    rows = torch.cat([clustered(4000), torch.zeros(4000, 1)], dim=1)
    rows[123, -1] = 1e3
    index = built(rows, 1, search="approximate")
    assert bool((index.search(clustered(50, seed=3), 1, 0).slots == 123).all())


def test_a_common_offset_does_not_blur_the_partition():
    queries = clustered(100, seed=3)
    index = built(clustered(4000) + 3000.0, search="approximate")
    index.calibrate(queries, k=10)
    assert index._partition.probes <= 40
    assert index.recall(queries, 10) >= 0.98


def test_wrong_arguments_change_nothing():
    index, rows = EntryIndex(4, 1, search="approximate"), torch.ones(3, 5)
    index.build(rows)
    bad = rows.clone()
    bad[1, 4] = -torch.inf
    for call, message in [
        (lambda: index.add(bad), "row 1 holds NaN or infinity .*large finite penalty"),
        (lambda: index.add(rows[:, :4]), r"rows must be \[n, 4 \+ 1 thresholds\], got shape \(3, 4\)"),
        (lambda: index.build(bad), "row 1 holds NaN"),
        (lambda: index.replace(torch.tensor([0]), bad[1:2]), "row 0 holds NaN"),
        (lambda: index.replace(torch.tensor([0]), rows), "1 slots were given 3 rows"),
        (lambda: index.replace(torch.tensor([0, 0]), rows[:2]), "different from each other"),
        (lambda: index.replace(torch.tensor([3]), rows[:1]), r"positions in \[0, 3\), got 3"),
        (lambda: index.remove(torch.tensor([-1])), r"positions in \[0, 3\), got -1"),
        (lambda: index.remove(torch.tensor([1, 1])), "different from each other"),
        (lambda: index.search(torch.ones(5), 1), r"queries must be \[..., 4\], got shape \(5,\)"),
        (lambda: index.search(torch.full((2, 4), torch.nan), 1), "query 0 holds NaN"),
        (lambda: index.search(torch.full((4,), 1e300, dtype=torch.float64), 1), "query 0 holds NaN or infinity"),
        (lambda: index.search(torch.ones(4), 0), "k must be at least 1, got 0"),
        (lambda: index.search(torch.ones(4), 1, 1), "threshold_column must be at most 0, got 1"),
        (lambda: index.search(torch.ones(4), 1, -1), "threshold_column must be at least 0"),
        (lambda: EntryIndex(4).search(torch.ones(4), 1, 0), "the rows have no thresholds"),
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
    monkeypatch.setattr(entry_index, "FEWEST", 100)
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    index = built(clustered(200))
    assert index.mode == "exact"
    assert "needs faiss, which is not installed" in index.reason
    with pytest.raises(MissingExtra, match=r"attnflow\[knowledge\]"):
        EntryIndex(4, search="approximate")


@pytest.mark.parametrize("mode", MODES)
def test_searches_during_changes_see_whole_states(mode):
    """Every row of generation g scores g; a search that mixed two generations would find both."""
    count, dim = 600, 8
    base = clustered(count, dim)
    base[:, 0] = 0

    def generation(number):
        rows = base.clone()
        rows[:, 0] = float(number)
        return rows

    index = EntryIndex(dim, search=mode)
    index.build(generation(0))
    query = torch.zeros(2, dim)
    query[:, 0] = 1.0
    stop, wrong, searched = threading.Event(), [], [0] * 3

    def search(worker):
        while not stop.is_set():
            try:
                hits = index.search(query, 5) if worker else index.range(query, -1.0)
                kinds = set(hits.scores.flatten().tolist())
                if len(kinds) != 1 or -torch.inf in kinds:
                    wrong.append(kinds)
            except Exception as error:  # whatever a thread raises is the test's failure
                wrong.append(error)
            searched[worker] += 1

    threads = [threading.Thread(target=search, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for number in range(1, 60):
        if number % 3 == 0:
            index.build(generation(number))
        elif number % 3 == 1:
            index.replace(torch.arange(len(index)), generation(number)[: len(index)])
        else:
            index.remove(torch.arange(0, len(index), 7))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert min(searched) > 0


@pytest.mark.parametrize("change", ["build", "add", "replace", "remove", "calibrate"])
def test_a_change_waits_for_the_search_under_way(monkeypatch, change):
    index = built(torch.eye(3), search="exact")
    begun, finish, done, hits = threading.Event(), threading.Event(), threading.Event(), []
    search = entry_index.best

    def slow(*arguments):
        begun.set()
        assert finish.wait(30)
        return search(*arguments)

    def alter():
        getattr(index, change)(*{"replace": (slots, -rows), "remove": (slots,)}.get(change, (-rows,)))
        done.set()

    slots, rows = torch.arange(3), torch.eye(3)
    monkeypatch.setattr(entry_index, "best", slow)
    threads = [
        threading.Thread(target=lambda: hits.append(index.search(torch.ones(3), 3))),
        threading.Thread(target=alter),
    ]
    threads[0].start()
    assert begun.wait(30)
    threads[1].start()
    assert not done.wait(0.05)
    finish.set()
    for thread in threads:
        thread.join()
    assert done.is_set()
    assert hits[0].scores.tolist() == [1.0] * 3


def test_readers_share_and_writers_do_not():
    lock, order, inside = ReadersWriter(), [], threading.Barrier(2, timeout=30)

    def read():
        with lock.reading():
            inside.wait()  # both are in at once, or this fails
            order.append("read")

    def write():
        with lock.writing():
            order.append("write")

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    for thread in readers:
        thread.join()
    with lock.reading():
        writer = threading.Thread(target=write)
        writer.start()
        while not lock._waiting:
            pass
        late = threading.Thread(target=lambda: [lock.reading().__enter__(), order.append("late")])
        late.start()
        assert order == ["read", "read"]
    writer.join()
    late.join()
    assert order == ["read", "read", "write", "late"]
