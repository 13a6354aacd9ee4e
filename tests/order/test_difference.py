"""The difference of two flows, against dense tables."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnflow as af
from tests.refused import refused


def flows(draw, n, layers):
    tables = [
        torch.tensor(draw(st.lists(st.booleans(), min_size=n * n, max_size=n * n))).view(n, n) for _ in range(layers)
    ]
    return tables, af.order.analyze([af.masks.from_dense(table) for table in tables])


@given(st.data())
def test_against_dense_tables(data):
    n, layers = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    (new, one), (old, other) = flows(data.draw, n, layers), flows(data.draw, n, layers)
    found = one.difference(other)
    assert found.compared == layers
    assert found.ok == all(torch.equal(a, b) for a, b in zip(new, old, strict=True))
    by_layer = {each.layer: each for each in found.layers}
    for layer, (a, b) in enumerate(zip(new, old, strict=True)):
        if torch.equal(a, b):
            assert layer not in by_layer
            continue
        assert (by_layer[layer].extra, by_layer[layer].missing) == (int((a & ~b).sum()), int((b & ~a).sum()))
        assert list(by_layer[layer].extra_pairs) == [tuple(p) for p in (a & ~b).nonzero().tolist()][:5]
        assert list(by_layer[layer].missing_pairs) == [tuple(p) for p in (b & ~a).nonzero().tolist()][:5]


def test_a_single_mask_has_no_layer():
    found = af.order.analyze(af.masks.full(3)).difference(af.order.analyze(af.masks.causal(3)))
    assert str(found) == (
        "DIFFERENT in 1 of 1 layer: 3 extra, 0 missing\n3 extra pairs (query, key): (0, 1), (0, 2), (1, 2)"
    )
    assert found.rows() == [{"layer": None, "extra": 3, "missing": 0}]


def test_what_cannot_be_compared():
    flow = af.order.analyze(af.masks.causal(3))
    with pytest.raises(ValueError, match=r"flow of 3 positions in any number of layers, got 4 positions"):
        flow.difference(af.order.analyze(af.masks.causal(4)))
    with pytest.raises(ValueError, match=r"got 3 positions in 2 layers"):
        flow.difference(af.order.analyze([af.masks.causal(3)] * 2))
    with refused(TypeError, "expected a Flow to compare with, got Mask"):
        flow.difference(af.masks.causal(3))
