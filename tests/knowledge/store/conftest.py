"""The places that every test of a store's semantics runs on."""

from __future__ import annotations

import pytest

from attnflow.knowledge import Store

BACKENDS = ["memory", "lancedb"]


def place_of(backend, directory):
    """Where a store of this backend goes."""
    return {"memory": "memory", "lancedb": str(directory / "store")}[backend]


@pytest.fixture(params=BACKENDS)
def place(request, tmp_path):
    return place_of(request.param, tmp_path)


@pytest.fixture
def store(place):
    with Store.open(place, dim=4, num_thresholds=2) as opened:
        yield opened


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "store"
