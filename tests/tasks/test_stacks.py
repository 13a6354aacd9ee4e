"""Tasks with a mask per layer, and sparse forms of merged tasks: proofs and values against brute force."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnflow as af
from attnflow import masks, testing
from attnflow.tasks import Label, Task, Token


@st.composite
def stacks(draw, max_size=6, layers=None, ids=9):
    """(tokens, labels, tables) of a task over few different tokens, with a random mask in each layer."""
    n, layers = draw(st.integers(1, max_size)), draw(st.integers(1, 3)) if layers is None else layers
    index = st.integers(0, 3)
    tokens = [
        (draw(st.integers(0, ids)), draw(st.integers(0, 1)), draw(st.frozensets(index, max_size=2))) for _ in range(n)
    ]
    tables = [draw(st.lists(st.booleans(), min_size=n * n, max_size=n * n)) for _ in range(layers)]
    labels = draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, ids), index), max_size=4))
    return tokens, labels, tables


def build(stack):
    tokens, labels, tables = stack
    n = len(tokens)
    return Task(
        [Token(*token) for token in tokens],
        [Label(place, target=Token(id, 0, (index,))) for place, id, index in labels],
        [masks.from_dense(torch.tensor(table).reshape(n, n)) for table in tables],
    )


@settings(max_examples=200)
@given(stacks(), st.integers(0, 3))
def test_leaks_are_those_of_the_product(stack, cut):
    task = build(stack)
    tables = [mask.dense() for mask in task.masks]
    for layers in (None, min(cut, task.num_layers)):
        first = tables if layers is None else tables[:layers]
        flows = testing.product(first) if first else np.eye(task.size, dtype=bool)
        report = af.tasks.check(task, layers)
        expected = {
            (number, place)
            for number, label in enumerate(task.labels)
            for place, token in enumerate(task.inputs)
            if flows[label.position, place] and label.data_index in token.provenance
        }
        assert {(task.labels.index(leak.label), leak.carrier) for leak in report.leaks} <= {
            (task.labels.index(task.labels[number]), place) for number, place in expected
        }
        assert len(report.leaks) == len(expected)
        assert report.dead == tuple(
            place for place in range(task.size) if not any(flows[label.position, place] for label in task.labels)
        )
        assert report.layers == (task.num_layers if layers is None else layers)
        for leak in report.leaks:
            assert (leak.witness[0], leak.witness[-1]) == (leak.carrier, leak.position)
            assert len(leak.witness) in (1, len(first) + 1)
            steps = zip(first, pairwise(leak.witness), strict=len(leak.witness) > 1)
            assert all(here == there or table[there, here] for table, (here, there) in steps)


def test_a_stack_proves_what_a_closure_cannot():
    """Layer 1 reads one back, layer 2 nothing: two steps back never arrive, though the closure of layer 1 says so."""
    tokens = [Token(id, i) for i, id in enumerate([5, 6, 7, 8])]
    window, itself = masks.sliding_window(3, 2), masks.sliding_window(3, 1)
    labels = [Label(2, target=tokens[0])]
    assert not af.tasks.check(Task(tokens[:3], labels, window)).ok
    report = af.tasks.check(Task(tokens[:3], labels, [window, itself]))
    assert report.ok
    assert str(report).startswith("no label leaks within 2 layers")
    leak = af.tasks.check(Task(tokens[:3], labels, [window, window])).leaks[0]
    assert leak.route == "layer 1: 0 -> 1, layer 2: 1 -> 2"


def test_as_plain_data():
    tokens = [Token(id, place) for place, id in enumerate(range(20, 31))]
    layers = [masks.sliding_window(10, 3), masks.dilated_window(10, 2, 3), masks.causal(10)]
    stack = Task(tokens[:10], [Label(i, target=tokens[i + 1]) for i in range(10)], layers)
    again = Task.from_dict(stack.to_dict())
    assert again == stack
    assert hash(again) == hash(stack)
    assert (again.num_layers, again.masks) == (3, stack.masks)
    assert stack != Task(stack.inputs, stack.labels, masks.causal(stack.size))
    assert stack != Task(stack.inputs, stack.labels, stack.masks[:2])


@pytest.mark.parametrize(
    "family", [af.tasks.causal_lm, af.tasks.butterfly, partial(af.tasks.block_two_stream, block=2, mask_token=63)]
)
@pytest.mark.parametrize(("window", "anchors"), [(None, None), (3, None), (2, 2)])
def test_sparse_forms_keep_the_order(family, window, anchors):
    merged = af.tasks.merge(family(range(10)))
    sparse = merged.task.sparsified(window=window, anchors=anchors)
    assert np.array_equal(testing.closure(sparse.mask.dense()), testing.closure(merged.task.mask.dense()))
    assert sparse.depth == testing.depth(sparse.mask.dense())
    assert af.tasks.check(sparse, sparse.depth).ok
    assert (sparse.inputs, sparse.labels) == (merged.task.inputs, merged.task.labels)
