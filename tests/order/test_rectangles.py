"""Orders of what is not one square mask: heads, batches of one sequence, and keys that were there before."""

from functools import reduce
from operator import or_

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnflow import masks, testing
from attnflow.order import Flow, analyze
from tests.refused import refused
from tests.strategies import square_masks


@settings(max_examples=100)
@given(st.integers(0, 6).flatmap(lambda n: st.lists(tables(n, n), min_size=1, max_size=3)), st.booleans())
def test_heads_are_united(heads, in_a_batch):
    every = masks.per_head([masks.from_dense(table) for table in heads])
    flow = analyze(masks.batch([every]) if in_a_batch else every)
    assert np.array_equal(flow.reachability().numpy(), testing.closure(reduce(or_, heads)))
    assert np.array_equal(analyze([every] * 2).reachability().numpy(), testing.power(reduce(or_, heads), 2))


def tables(queries, keys):
    bits = st.lists(st.booleans(), min_size=queries * keys, max_size=queries * keys)
    return bits.map(lambda row: torch.tensor(row, dtype=torch.bool).reshape(queries, keys))


@st.composite
def rectangles(draw):
    n, m = draw(st.integers(0, 5)), draw(st.integers(0, 4))
    layers = draw(st.lists(tables(n, n + m), min_size=1, max_size=3))
    return layers, draw(st.one_of(st.none(), tables(m, m)))


@settings(max_examples=200)
@given(rectangles())
def test_keys_that_were_there_before_are_positions_below(rectangle):
    layers, before = rectangle
    n, m = len(layers[0]), layers[0].shape[1] - len(layers[0])
    whole = [torch.zeros(n + m, n + m, dtype=torch.bool) for _ in layers]
    for table, layer in zip(whole, layers, strict=True):
        table[:m, :m] = torch.eye(m, dtype=torch.bool) if before is None else before
        table[m:] = layer
    said = None if before is None else masks.from_dense(before)
    made = [masks.from_dense(layer) for layer in layers]
    one, stack = analyze(made[0], said), analyze(made, said)
    assert np.array_equal(one.reachability().numpy(), testing.closure(whole[0]))
    assert np.array_equal(stack.reachability().numpy(), testing.product(whole))
    for flow in (one, stack):
        assert (flow.num_before, flow.size) == (m, n + m)
        again = Flow.from_json(flow.to_json())
        assert (again.num_before, str(again)) == (m, str(flow))


def test_a_step_of_decoding_reads_what_the_whole_sequence_reads():
    """A cache of 5 keys under a window: with what the cache has read, the flow is that of the whole sequence."""
    whole = masks.sliding_window(8, 3)
    step = analyze(whole[5:, :], before=whole[:5, :5])
    assert np.array_equal(step.reachability().numpy(), analyze(whole).reachability().numpy())
    assert analyze(whole[5:, :]).path(0, 7) == []
    assert step.path(0, 7) == [0, 1, 3, 5, 7]
    assert str(step).startswith("8 positions (0-4 were there before), depth ")
    assert "before" not in str(analyze(whole))


@given(square_masks(5))
def test_a_square_mask_has_no_keys_before(mask):
    assert analyze(mask).num_before == 0
    assert analyze(mask).masks == (mask,)


def test_a_batch_of_one_sequence_keeps_its_padding_apart():
    flow = analyze(masks.batch([masks.causal(3)], size=5))
    assert flow.classes == [(0,), (1,), (2,), (3,), (4,)]
    assert flow.hasse.edges == [(0, 1), (1, 2)]


ROW = masks.causal(4)[3:, :]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: analyze(masks.full(4, 3)), r"at least as many keys as queries, got shape \(4, 3\): the last keys"),
        (lambda: analyze([ROW, masks.causal(4)]), r"one size, got \(1, 4\) and \(4, 4\) \(layer 2\)"),
        (lambda: analyze(ROW, before=masks.causal(4)), r"before is the mask of 3 keys .* got shape \(4, 4\)"),
        (lambda: analyze(masks.causal(4), before=masks.causal(1)), "before is the mask of 0 keys"),
        (lambda: analyze(masks.batch([masks.causal(2)] * 3)), r"one sequence, got those of 3: .*per_head"),
    ],
)  # fmt: skip
def test_what_has_no_order_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_what_was_before_may_have_heads_and_must_be_a_mask():
    here, heads = masks.from_dense(torch.ones(2, 5, dtype=torch.bool)), [masks.causal(3), masks.full(3)]
    assert analyze(here, before=masks.per_head(heads)).masks == analyze(here, before=masks.full(3)).masks
    with refused(TypeError, "expected a Mask, got Tensor"):
        analyze(here, before=torch.ones(3, 3).bool())


@pytest.mark.parametrize("change", [{"num_before": -1}, {"num_before": 9}, {"masks": []}])
def test_a_damaged_flow_is_refused(change):
    values = analyze(masks.from_dense(torch.ones(2, 5, dtype=torch.bool))).to_dict()
    with pytest.raises(ValueError, match="expected square masks of one size n and 0 <= num_before <= n"):
        Flow.from_dict(values | change)
