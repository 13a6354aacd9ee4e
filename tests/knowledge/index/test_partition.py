"""Approximate search: when it is chosen, that it reaches its recall, and thresholds that could mislead it."""

import numpy as np
import pytest
import torch

from attnflow.knowledge.index import calibration, upkeep
from tests.knowledge.index.data import MODES, brute, built, clustered


def read(index, queries, column=None, k=32):
    """The part of the entries that such queries read."""
    columns = np.full(len(queries), -1 if column is None else column)
    asked = calibration.Questions("asked", queries.numpy(), columns)
    return calibration.measured(index._upkeep.partition, index.rows.numpy(), [asked], k).read


def test_recall_is_reached_on_clustered_rows_and_measured():
    index = built(clustered(8000, clusters=60), search="approximate")
    queries = clustered(200, seed=5, clusters=60)
    assert index.mode == "approximate"
    assert index.recall(queries) >= 0.99
    assert "recall@32" in index.reason
    assert read(index, queries) < 0.1
    index._upkeep.partition.probes, index._upkeep.partition.deviations = 1, dict.fromkeys((1, 512), -100.0)
    found, truth = index.search(queries, 32).ids, index.search(queries, 32, mode="exact").ids
    same = np.mean([len(set(a) & set(b)) / 32 for a, b in zip(found.tolist(), truth.tolist(), strict=True)])
    assert index.recall(queries) == pytest.approx(same, abs=1e-3)
    assert same < 0.99


def test_equal_rows_do_not_count_as_missed():
    index = built(torch.ones(400, 4), search="approximate")
    assert index.recall(torch.ones(3, 4), 5) == 1.0


def test_auto_is_exact_for_few_and_for_random_rows(monkeypatch):
    monkeypatch.setattr(upkeep, "FEWEST", 2000)
    index = built(clustered(1999))
    assert (index.mode, index.reason) == ("exact", "fewer than 2,000 entries, where exact search is no slower")
    index.add(clustered(1, seed=1))
    assert index.mode == "approximate"
    random = built(torch.randn(4000, 16, generator=torch.Generator().manual_seed(0)))
    assert random.mode == "exact"
    assert random.reason.endswith("exact search is no slower")
    with pytest.raises(ValueError, match=r"no partition to search approximately .*exact search is no slower"):
        random.search(torch.zeros(16), 1, mode="approximate")
    index.calibrate(torch.randn(50, 16), k=500)
    assert index.mode == "exact"
    index.build(clustered(4000))
    assert index.mode == "exact"


def test_auto_is_exact_below_the_least_number_and_does_not_start_afresh_around_it(monkeypatch):
    monkeypatch.setattr(upkeep, "FEWEST", 2000)
    index = built(clustered(3000))
    first = index._upkeep.partition
    index.remove(torch.arange(1000))
    assert index.mode == "approximate"
    for _ in range(3):
        index.remove(torch.arange(1))
        assert (index.mode, index.reason) == ("exact", "fewer than 2,000 entries, where exact search is no slower")
        assert index.search(clustered(1), 3).certificate.label == "exact"
        with pytest.raises(ValueError, match="no partition to search approximately"):
            index.search(clustered(1), 3, mode="approximate")
        index.add(clustered(1, seed=1))
        assert index.mode == "approximate"
        assert index._upkeep.partition is first
    index.remove(torch.arange(1001))
    assert index._upkeep.partition is None
    assert index.mode == "exact"


def test_rows_are_partitioned_anew_when_as_many_changed():
    index = built(clustered(500), search="approximate")
    first = index._upkeep.partition
    index.add(clustered(300, seed=1))
    index.replace(torch.arange(199), clustered(199, seed=2))
    assert index._upkeep.partition is first
    index.remove(torch.arange(1))
    assert index._upkeep.partition is not first


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
        assert bool((owner[hits.ids[found]] == layer).all())
        assert bool((owner[hits.ids] == layer).all())
        if mode == "approximate":  # what is read is not thinned by the layers that are out of reach
            assert read(index, queries, layer) < 0.2


def test_many_columns_of_thresholds_do_not_blur_the_partition():
    thresholds = 2 * torch.randn(6000, 16, generator=torch.Generator().manual_seed(0))
    index = built(torch.cat([clustered(6000), thresholds], dim=1), 16, search="approximate")
    queries = 3 * clustered(100, seed=3)
    index.calibrate(queries, 10, threshold_column=5)
    assert index.recall(queries, 10, threshold_column=5) >= 0.99
    assert read(index, queries, 5, 10) < 0.2


def test_an_entry_with_a_large_threshold_is_not_hidden_by_its_neighbours():
    rows = torch.cat([clustered(4000), torch.zeros(4000, 1)], dim=1)
    rows[123, -1] = 1e3
    index = built(rows, 1, search="approximate")
    assert bool((index.search(clustered(50, seed=3), 1, 0).ids == 123).all())


def test_a_common_offset_does_not_blur_the_partition():
    queries = clustered(100, seed=3)
    index = built(clustered(4000) + 3000.0, search="approximate")
    index.calibrate(queries, k=10)
    assert index._upkeep.partition.probes <= 40
    assert index.recall(queries, 10) >= 0.98
