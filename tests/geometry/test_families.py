"""The registry against how models use their weights, for every family."""

from __future__ import annotations

import pytest
import torch

from attnflow.geometry.live import LiveQueryKey, live_query_keys
from attnflow.geometry.score import score
from tests.geometry.usage import bypass_norms, used_form
from tests.geometry.zoo import ZOO


@pytest.mark.parametrize("name", ZOO)
def test_registry_gives_the_forms_that_the_model_uses(name):
    animal = ZOO[name]
    model = animal.build()
    places = live_query_keys(model)
    assert not any(live.place.discovered for live in places), f"{model.config.model_type} is not in the registry"
    bypass_norms(model)
    for live in places:
        width = max(live.query().shape[1], live.key().shape[1])
        used = used_form(model, live.name, lambda batch: model(**animal.inputs(batch)), width)
        assert _distance(used, _forms(live)) < 1e-5, live.name


def _forms(live: LiveQueryKey) -> torch.Tensor:
    query = live.query().detach().unflatten(0, (live.num_heads, -1))
    key = live.key().detach().unflatten(0, (live.num_kv_heads, -1))
    key = key.repeat_interleave(live.num_heads // live.num_kv_heads, 0)
    return query.mT @ key


def _distance(used: torch.Tensor, registered: torch.Tensor) -> float:
    """How far they are from a positive multiple of each other, relative to their size."""
    assert used.shape == registered.shape
    used, registered = used.double() / used.norm(), registered.double() / registered.norm()
    return (used - registered).abs().max().item() / registered.abs().max().item()


@pytest.mark.parametrize("name", ZOO)
def test_saved_model_has_the_scores_of_the_model(name, tmp_path):
    model = ZOO[name].build()
    model.save_pretrained(tmp_path)
    saved, live = score(tmp_path, attention="all"), score(model, attention="all")
    assert [_key(row) for row in saved] == [_key(row) for row in live]
    assert [row.symmetry for row in saved] == pytest.approx([row.symmetry for row in live], abs=1e-12)
    assert not saved.notes or "share" in saved.notes[0]


def _key(row):
    return row.layer, row.head, row.kind, row.tower
