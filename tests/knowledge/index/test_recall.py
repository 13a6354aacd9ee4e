"""The promised recall under inserts, updates and deletes, against scores in float64; and what is said of it."""

import numpy as np
import pytest
import torch

from attnflow.knowledge.index import calibration, upkeep
from tests.knowledge.index.data import brute, built, clustered

TARGET = 0.99
SIZES = (1, 10, 32, 100)


class Clusters:
    """Rows [entry | thresholds] around centres of their own; no two are alike."""

    def __init__(self, draw, count, dim, thresholds=0, spread=0.3, offset=0.0, unit=False):
        self.draw, self.thresholds, self.spread, self.unit = draw, thresholds, spread, unit
        self.centres = draw.standard_normal((count, dim)) + offset * draw.standard_normal(dim)

    def rows(self, count):
        which = np.arange(count) % len(self.centres)
        entries = self.centres[which] + self.spread * self.draw.standard_normal((count, self.centres.shape[1]))
        if self.unit:
            entries /= np.linalg.norm(entries, axis=1, keepdims=True)
        return np.concatenate([entries, self.draw.standard_normal((count, self.thresholds))], axis=1).astype(np.float32)


def found(index, rows, queries, columns, k):
    """Of each query alone, the share of the k best that a search finds; rounding aside, equal scores are equal."""
    shares = []
    for query, column in zip(queries.astype(np.float32), columns, strict=True):
        scores = rows[:, : index.dim].astype(np.float64) @ query.astype(np.float64)
        if column is not None:
            scores += rows[:, index.dim + column]
        least = np.partition(scores, -k)[-k] - 1e-5 * np.abs(scores).max()
        ids = index.search(torch.from_numpy(query), k, column).ids.numpy()
        assert len(set(ids.tolist())) == k
        shares.append(float((scores[ids] >= least).mean()))
    return shares


def unlike(draw, rows, dim, count):
    """Random directions, and sums of two rows."""
    first, second = (rows[draw.integers(len(rows), size=count), :dim] for _ in range(2))
    return np.concatenate([draw.standard_normal((count, dim)), first + second])


@pytest.mark.parametrize("search", ["auto", "approximate"])
@pytest.mark.parametrize("parts", [1, 7])
def test_new_facts_are_found_after_inserts_and_after_the_old_ones_are_gone(monkeypatch, search, parts):
    monkeypatch.setattr(upkeep, "FEWEST", 700)
    draw = np.random.default_rng(0)
    old, new = Clusters(draw, 100, 32), Clusters(draw, 50, 32)
    index = built(torch.from_numpy(old.rows(6000)), search=search)
    assert index.mode == "approximate"
    for part in np.split(new.rows(840), parts):
        index.add(torch.from_numpy(part))
    for left in (6840, 840, 699):
        index.remove(torch.arange(len(index) - left))
        rows = index.rows.numpy()
        for queries in (new.rows(100), rows[-100:], unlike(draw, rows, 32, 50)):
            assert np.mean(found(index, rows, queries, [None] * 100, 10)) >= TARGET
    assert index.mode == ("exact" if search == "auto" else "approximate")


def test_growth_and_decay_in_width_64():
    draw = np.random.default_rng(1)
    old, new = Clusters(draw, 80, 64, spread=0.35), Clusters(draw, 80, 64, spread=0.35)
    index = built(torch.from_numpy(old.rows(6000)), search="approximate")

    def check(*kinds):
        rows = index.rows.numpy()
        for queries in (*(kind.rows(60) for kind in kinds), unlike(draw, rows, 64, 30)):
            assert np.mean(found(index, rows, queries, [None] * 60, 10)) >= TARGET

    check(old)
    for _ in range(3):
        index.add(torch.from_numpy(new.rows(600)))
        check(old, new)
    while len(index) > 500:
        gone = draw.choice(len(index), min(1300, len(index) - 500), replace=False)
        index.remove(torch.from_numpy(gone))
        check(old, new)


@pytest.mark.parametrize("seed", range(4))
def test_any_mixture_of_inserts_updates_and_deletes(seed):
    draw, dim, thresholds = np.random.default_rng(seed), 16, 2 * (seed % 2)

    def others():
        spread, offset = draw.choice([0.05, 0.3, 0.5]), draw.choice([0.0, 1.0])
        return Clusters(draw, int(draw.integers(1, 60)), dim, thresholds, spread, offset, unit=seed % 3 == 0)

    kinds = [others()]
    index = built(torch.from_numpy(kinds[0].rows(3000)), thresholds, search="approximate")
    rows, born = index.rows.numpy().copy(), np.zeros(3000)
    shares = {name: {k: [] for k in SIZES} for name in ("any", "latest", "unlike")}
    for step in range(1, 11):
        if draw.random() < 0.5:
            kinds.append(others())
        kind = kinds[-1] if draw.random() < 0.7 else kinds[draw.integers(len(kinds))]
        match draw.choice(["insert", "insert", "update", "delete"]):
            case "insert":
                new = kind.rows(int(draw.integers(1, 800)))
                for part in np.array_split(new, draw.integers(1, 4)):
                    index.add(torch.from_numpy(part))
                rows, born = np.concatenate([rows, new]), np.concatenate([born, np.full(len(new), step)])
            case "update":
                where = draw.choice(len(rows), int(draw.integers(1, 500)), replace=False)
                new = kind.rows(len(where))
                index.replace(torch.from_numpy(where), torch.from_numpy(new))
                rows[where], born[where] = new, step
            case "delete":
                count = int(draw.integers(1, len(rows) // 2))
                oldest = draw.random() < 0.5
                where = np.argsort(born, kind="stable")[:count] if oldest else draw.choice(len(rows), count, False)
                for source, target in index.remove(torch.from_numpy(where)).tolist():
                    rows[target], born[target] = rows[source], born[source]
                rows, born = rows[: len(index)], born[: len(index)]
        assert np.array_equal(rows, index.rows.numpy())
        if len(rows) <= SIZES[-1]:
            continue
        latest = rows[np.flatnonzero(born == born.max())]
        asked = {
            "any": rows[draw.integers(len(rows), size=8), :dim] + 0.1 * draw.standard_normal((8, dim)),
            "latest": latest[draw.integers(len(latest), size=8), :dim],
            "unlike": unlike(draw, rows, dim, 4),
        }
        columns = [None] * 8 if not thresholds else [None, 0, 1, 0] * 2
        for name, queries in asked.items():
            for k in SIZES:
                shares[name][k] += found(index, rows, queries, columns, k)
    for name, of_size in shares.items():
        for k, values in of_size.items():
            assert np.mean(values) >= TARGET, (name, k, np.mean(values))


def test_a_search_for_more_than_was_measured_is_exact():
    index = built(clustered(8000), search="approximate")
    queries, most = clustered(20, seed=3), max(index._upkeep.partition.deviations)
    for k in (most + 1, 3 * most):
        assert torch.equal(index.search(queries, k).ids, index.search(queries, k, mode="exact").ids)
    index.calibrate(queries, k=1000)
    assert max(index._upkeep.partition.deviations) == 1000
    assert index.recall(queries, 1000) >= TARGET


@pytest.mark.parametrize("column", [None, 1])
def test_a_range_search_holds_the_recall_for_old_and_new_rows(column):
    draw = np.random.default_rng(0)
    old, new = Clusters(draw, 60, 16, 2), Clusters(draw, 30, 16, 2)
    index = built(torch.from_numpy(old.rows(6000)), 2, search="approximate")
    index.add(torch.from_numpy(new.rows(300)))
    for kind in (old, new):
        queries = torch.from_numpy(kind.rows(60)[:, :16])
        scores = brute(index.rows, queries, 16, column)
        for rank in (5, 50, 2000):
            bound = float(scores.topk(rank).values[:, -1].mean())
            hits = index.range(queries, bound, column)
            true = (scores > bound).sum(dim=1)
            assert bool((scores.gather(1, hits.ids.clamp(min=0)) > bound - 1e-3)[hits.ids >= 0].all())
            assert float((hits.ids >= 0).sum() / true.sum()) >= TARGET


def test_what_is_said_of_the_recall_is_measured_after_each_change(monkeypatch):
    counts, measured = [], calibration.measured
    monkeypatch.setattr(calibration, "measured", lambda *given: counts.append(1) or measured(*given))
    index = built(clustered(3000), search="approximate")
    assert not counts  # nobody asked
    index.add(clustered(50, seed=3))
    first = index.measure()
    assert index.measure() is first
    assert "like the latest" in index.reason
    assert len(counts) == 1
    index.remove(torch.arange(3))
    assert index.measure() is not first
    assert len(counts) == 2
    exact = built(clustered(3000), search="exact")
    assert (exact.measure(), exact.reason) == (None, "exact search was asked for")


def test_a_recall_that_is_found_too_low_is_mended(monkeypatch):
    index = built(clustered(4000), search="approximate")
    index._upkeep.partition.probes, index._upkeep.partition.deviations = 1, dict.fromkeys((1, 512), -100.0)
    queries = torch.randn(50, 16)
    assert index.recall(queries) < TARGET
    now = index.measure()
    assert now.recall >= TARGET
    assert f"recall@32 {now.kinds[0].recall:.3f}" in index.reason
    assert index.recall(queries) >= TARGET

    def useless(partition, *_):
        partition.probes, partition.deviations = 1, dict.fromkeys((1, 512), -100.0)
        return {8: 0.01}

    # Where calibration does not help, searches read everything.
    monkeypatch.setattr(calibration, "calibrate", useless)
    index.add(clustered(1))
    index._upkeep.partition.deviations = dict.fromkeys((1, 512), -100.0)
    assert index.measure().recall == 1.0
    assert torch.equal(index.search(queries, 9).ids, index.search(queries, 9, mode="exact").ids)


def test_a_recall_of_one_is_exact(monkeypatch):
    monkeypatch.setattr(upkeep, "FEWEST", 500)
    index = built(clustered(2000), target_recall=1.0)
    assert (index.mode, index.reason) == ("exact", "a recall of 1 needs exact search")
    index = built(clustered(2000), search="approximate", target_recall=1.0)
    assert index.recall(torch.randn(50, 16)) == 1.0


@pytest.mark.slow
def test_the_measured_case_at_full_size():
    """200,000 entries of width 256, 60,000 inserts, then deletes until 15,000 are left."""
    draw = np.random.default_rng(1)
    old, new = (Clusters(draw, 2000, 256, spread=0.35) for _ in range(2))
    index = built(torch.from_numpy(old.rows(200_000)))

    def check(*kinds):
        rows = index.rows.numpy()
        for queries in (*(kind.rows(100) for kind in kinds), unlike(draw, rows, 256, 50)):
            for k in (10, 32):
                assert np.mean(found(index, rows, queries, [None] * 100, k)) >= TARGET

    assert index.mode == "approximate"
    check(old)
    for part in np.array_split(new.rows(60_000), 12):
        index.add(torch.from_numpy(part))
    check(old, new)
    for left in (195_000, 130_000, 40_000, 21_000):
        index.remove(torch.arange(len(index) - left))
        check(new)
    assert index.measure() is None or index.measure().recall >= TARGET
    index.remove(torch.arange(6000))
    assert index.mode == "exact"
    check(new)
