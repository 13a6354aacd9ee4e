"""Random orders, random faults: what the audit says against what the relations imply."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import attnflow as af
from attnflow.audit import check, measure

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


def relation(pairs):
    allow = torch.zeros(N, N, dtype=torch.bool)
    for query, key in pairs:
        allow[query, key] = True
    return allow


position = st.integers(0, N - 1)
relations = st.one_of(
    st.sets(st.tuples(position, position), max_size=6).map(relation),
    st.lists(st.booleans(), min_size=N * N, max_size=N * N).map(lambda b: torch.tensor(b).reshape(N, N)),
)
stacks = st.lists(relations, min_size=1, max_size=3)


@given(stacks, st.sampled_from(["perturb", "quick"]))
@settings(max_examples=25)
def test_the_right_order_is_clean_and_measured(masks, mode):
    model, signal = Stack(masks), torch.randn(2, N, WIDTH)
    order = [af.masks.from_dense(allow) for allow in masks]
    report = check(model, signal, order=order, mode=mode)
    assert report.verdict == ("clean" if report.forbidden else "nothing tested")
    assert report.coverage == 1.0
    flow = measure(model, signal)
    assert isinstance(flow, af.order.Flow)
    eye = torch.eye(N, dtype=torch.bool)
    assert all(torch.equal(found.dense(), allow | eye) for found, allow in zip(flow.masks, masks, strict=True))


@given(stacks, st.integers(0, 2), position, position, st.sampled_from(["perturb", "quick"]))
@settings(max_examples=60)
def test_one_pair_too_many_is_found_where_it_first_shows(masks, layer, target, source, mode):
    layer = min(layer, len(masks) - 1)
    faulty = [allow.clone() for allow in masks]
    faulty[layer][target, source] = True
    report = check(
        Stack(faulty), torch.randn(1, N, WIDTH), order=[af.masks.from_dense(allow) for allow in masks], mode=mode
    )
    extra = [wrong & ~right for wrong, right in zip(fields(faulty), fields(masks), strict=True)]
    first = next((depth for depth, pairs in enumerate(extra) if pairs.any()), None)
    assert (not report.violations) == (first is None)
    if first is not None:
        found = report.violations[0]
        assert first == layer == found.layer
        assert found.module == f"layers.{layer}"
        assert extra[layer][found.target, found.source]
        assert found.target == target
