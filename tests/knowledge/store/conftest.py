"""The backends that every test of a store's semantics runs on."""

from __future__ import annotations

import pytest

from attnflow.knowledge.store import Store

BACKENDS = ["memory", "lancedb", "milvus"]


@pytest.fixture(params=BACKENDS)
def place(request, tmp_path):
    """Where a store of this backend goes."""
    return {"memory": "memory", "lancedb": str(tmp_path / "store"), "milvus": f"milvus:{tmp_path}/store.db"}[
        request.param
    ]


@pytest.fixture
def store(place):
    with Store.open(place, dim=4, num_thresholds=2) as opened:
        yield opened
