"""Random orders, random faults, plans of passes: what the audit says and does against the definitions."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import attnflow as af
from attnflow.audit import check, measure
from attnflow.audit.fields import Fields, Relation, batch_sets, plan

N, WIDTH = 5, 3


class Mixing(nn.Module):
    """A layer that lets exactly the pairs of `allow` flow."""

    def __init__(self, allow):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(N, N) * allow)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + torch.tanh(self.weight @ self.inner(hidden))


class Stack(nn.Module):
    def __init__(self, masks):
        super().__init__()
        self.layers = nn.ModuleList(Mixing(allow) for allow in masks)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def fields(masks):
    """Receptive fields after each layer, from the definition."""
    reach, grown = torch.eye(N, dtype=torch.bool), []
    for allow in masks:
        reach = ((allow | torch.eye(N, dtype=torch.bool)).int() @ reach.int()) > 0
        grown.append(reach)
    return grown


position = st.integers(0, N - 1)
relations = st.one_of(
    st.sets(st.tuples(position, position), max_size=6).map(lambda pairs: af.masks.from_edges(pairs, N).dense()),
    st.lists(st.booleans(), min_size=N * N, max_size=N * N).map(lambda b: torch.tensor(b).reshape(N, N)),
)
stacks = st.lists(relations, min_size=1, max_size=3)


@given(stacks)
@settings(max_examples=25)
def test_the_right_order_is_clean_and_measured(masks):
    model, signal = Stack(masks), torch.randn(2, N, WIDTH)
    order = [af.masks.from_dense(allow) for allow in masks]
    report = check(model, signal, order=order)
    assert report.verdict == ("clean" if report.forbidden else "nothing tested")
    assert report.coverage == 1.0
    flow = measure(model, signal)
    assert isinstance(flow, af.order.Flow)
    eye = torch.eye(N, dtype=torch.bool)
    assert all(torch.equal(found.dense(), allow | eye) for found, allow in zip(flow.masks, masks, strict=True))


@given(stacks, st.integers(0, 2), position, position)
@settings(max_examples=60)
def test_one_pair_too_many_is_found_where_it_first_shows(masks, layer, target, source):
    layer = min(layer, len(masks) - 1)
    faulty = [allow.clone() for allow in masks]
    faulty[layer][target, source] = True
    report = check(Stack(faulty), torch.randn(1, N, WIDTH), order=[af.masks.from_dense(allow) for allow in masks])
    extra = [wrong & ~right for wrong, right in zip(fields(faulty), fields(masks), strict=True)]
    first = next((depth for depth, pairs in enumerate(extra) if pairs.any()), None)
    assert (not report.violations) == (first is None)
    if first is not None:
        found = report.violations[0]
        assert first == layer == found.layer
        assert found.module == f"layers.{layer}"
        assert extra[layer][found.target, found.source]
        assert found.target == target


EVERY = torch.ones(6, dtype=torch.bool)


def relations(n):
    return st.lists(st.booleans(), min_size=n * n, max_size=n * n).map(lambda b: torch.tensor(b).reshape(1, n, n))


def pairs_tested(field, passes):
    """Pairs (i, j) that some pass tests, from the definition."""
    found = set()
    for selected in passes:
        for i, row in enumerate(field):
            if not (row & selected).any():
                found |= {(i, j) for j in selected.nonzero().flatten().tolist()}
    return found


@given(st.lists(relations(6), min_size=1, max_size=3), st.integers(1, 12))
@settings(max_examples=100)
def test_coverage_is_what_the_passes_test(layers, passes):
    fields = Fields(Relation(tuple(layers), False, "random"), 1)
    made = plan(fields, {len(layers): EVERY}, passes)
    assert len(made.passes) <= passes
    reach = torch.eye(6, dtype=torch.bool)
    for allow in layers:
        reach = ((allow[0] | torch.eye(6, dtype=torch.bool)).int() @ reach.int()) > 0
    assert torch.equal(fields.at(len(layers))[0], reach)
    forbidden = {(i, j) for i, j in itertools.product(range(6), repeat=2) if not reach[i, j]}
    assert pairs_tested(reach, [p[0] for p in made.passes]) <= forbidden
    if passes >= 12:  # as many as there are positions, twice over
        assert made.coverage == 1.0
        assert pairs_tested(reach, [p[0] for p in made.passes]) == forbidden


@pytest.mark.parametrize("n", [2, 7, 20])
def test_cuts_are_exhaustive_for_a_causal_order(n):
    fields = Fields(Relation((af.masks.causal(n).dense()[None],), True, "causal"), 3)
    everywhere = torch.ones(n, dtype=torch.bool)
    made = plan(fields, {1: everywhere, 2: everywhere, 4: everywhere}, 100)
    assert len(made.passes) == n - 1
    assert made.coverage == 1.0
    assert made.forbidden == 3 * n * (n - 1) // 2
    few = plan(fields, {4: everywhere}, 1)
    assert len(few.passes) == 1
    assert 0.4 < few.coverage <= 1.0


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8])
def test_every_pair_of_sequences_is_told_apart(batch):
    sets = batch_sets(batch, 4)
    pairs = {(a, b) for s in sets for a in range(batch) for b in range(batch) if s[a].all() and not s[b].any()}
    assert pairs == {(a, b) for a in range(batch) for b in range(batch) if a != b}
    assert len(sets) == 2 * (batch - 1).bit_length()


def test_pairs_that_nobody_sees_are_not_counted():
    fields = Fields(Relation((af.masks.causal(6).dense()[None],), True, "causal"), 1)
    made = plan(fields, {1: torch.arange(6) < 3}, 32)
    assert made.forbidden == 5 + 4 + 3
    assert made.coverage == 1.0
    assert len(made.passes) == 3
