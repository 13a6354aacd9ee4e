"""Products and depths by intervals against dense tables; long masks; what does not fit is refused."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import attnflow as af
from attnflow.masks.intervals import IntervalRows
from attnflow.order import bits, composition
from tests.strategies import square_masks

N = 20_000


@given(st.data())
def test_products_are_those_of_tables(data):
    a, b, c = (data.draw(st.integers(0, 9)) for _ in range(3))
    later, earlier = data.draw(arrays(np.bool_, (a, b))), data.draw(arrays(np.bool_, (b, c)))
    expected = later.astype(int) @ earlier.astype(int) > 0
    one, two = IntervalRows.from_bool(later), IntervalRows.from_bool(earlier)
    product = composition.compose(one, two, 1000)
    assert product is not None
    assert np.array_equal(product.to_bool(), expected)
    assert composition.compose(one, two, len(product.starts) - 1) is None


@given(st.data())
def test_products_with_ranges_from_the_first_key_on(data):
    """What later layers of causal kinds read: all keys up to one, and perhaps some more."""
    n = data.draw(st.integers(1, 9))
    later = data.draw(arrays(np.bool_, (n, n))) & data.draw(st.booleans())
    upto = data.draw(st.lists(st.integers(0, n), min_size=n, max_size=n))
    later |= np.arange(n) < np.array(upto)[:, None]
    earlier = data.draw(arrays(np.bool_, (n, n)))
    earlier = np.tril(earlier) | np.eye(n, dtype=bool) if data.draw(st.booleans()) else earlier
    product = composition.compose(IntervalRows.from_bool(later), IntervalRows.from_bool(earlier), 1000)
    assert product is not None
    assert np.array_equal(product.to_bool(), later.astype(int) @ earlier.astype(int) > 0)


@given(square_masks(10))
def test_depths_are_those_of_bit_matrices(mask):
    if not mask.num_queries:
        return
    flow = af.order.analyze(mask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composition, "LONG", 0)
        again = af.order.analyze(mask)
        assert again.depth == flow.depth
        assert again.is_dense == flow.is_dense
    depth = composition.depth_of(mask.relabelled()[0].with_diagonal())
    assert depth in (None, flow.depth)


@given(square_masks(9), st.data())
def test_long_masks_are_read_in_their_compact_numbering(mask, data):
    if not mask.num_queries:
        return
    flow = af.order.analyze(mask)
    source, target = (data.draw(st.integers(0, mask.num_queries - 1)) for _ in range(2))
    layers = data.draw(st.integers(0, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composition, "LONG", 0)
        again = af.order.analyze(mask)
        assert again.receptive_field(target, layers).tolist() == flow.receptive_field(target, layers).tolist()
        assert again.reachability(layers).tolist() == flow.reachability(layers).tolist()
        assert again.growth().tolist() == flow.growth().tolist()
        path = again.path(source, target)
        assert len(path) == len(flow.path(source, target))
        assert all(a == b or mask.allows(b, a) for a, b in pairwise(path))
        assert not path or (path[0], path[-1]) == (source, target)
        assert again.sparsify(window=2).mask == flow.sparsify(window=2).mask


def test_long_masks():
    assert af.order.analyze(af.masks.sliding_window(N, 512)).depth == -(-(N - 1) // 511)
    assert af.order.analyze(af.masks.dilated_window(N, 512, 16)).depth == -(-(N // 16 - 1) // 511)
    assert af.order.analyze(af.masks.causal(N)).is_dense
    assert not af.order.analyze(af.masks.attention_sink(N, 4, 1024)).is_dense


def test_what_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(bits, "_ROOM", 1000)
    monkeypatch.setattr(composition, "LONG", 200)
    mask = af.masks.causal(200)
    with pytest.raises(
        ValueError, match=r"the flow through 4 layers over 200 positions takes [\d.]+ GB as bit matrices"
    ):
        _ = af.order.analyze([mask] * 4).depth
    with pytest.raises(ValueError, match="an order of classes over 200 positions takes"):
        _ = af.order.analyze(mask).hasse
