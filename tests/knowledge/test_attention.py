"""Generalized cross-attention: one function in three orders of evaluation, and a feed-forward layer when folded."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from attnflow.knowledge import GeneralizedCrossAttention
from attnflow.knowledge.attention import ACTIVATIONS, sparsemax

ORDERS = ("naive", "folded", "query_side")


def layer_and_inputs(seed=0, heads=2, gated=False, threshold="mlp", activation="gelu", entries=11, size=1.0):
    torch.manual_seed(seed)
    layer = GeneralizedCrossAttention(8, 4, 6, heads, activation, gated, threshold).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=size)
    return layer, torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(entries, 6, dtype=torch.float64)


def by_hand(layer, hidden, entries):
    """The paper's equations for one token at a time, with loops."""
    result = torch.zeros_like(hidden)
    bounds = layer.thresholds(entries)
    for place in torch.cartesian_prod(torch.arange(hidden.shape[0]), torch.arange(hidden.shape[1])).tolist():
        token = hidden[tuple(place)]
        for head in range(layer.num_heads):
            query = token @ layer.query[head]
            scores = [
                torch.stack([query @ (entry @ layer.key[part, head]) for entry in entries]) / math.sqrt(layer.key_dim)
                + bounds[part, head]
                for part in range(layer.parts)
            ]
            weights = layer.activation(scores[0]) * (scores[1] if layer.gated else 1)
            for weight, entry in zip(weights, entries, strict=True):
                result[tuple(place)] += weight * (entry @ layer.value[head])
    return result + layer.output_bias


@pytest.mark.parametrize("threshold", ["mlp", "coordinate"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_orders_compute_the_equations(order, gated, threshold):
    layer, hidden, entries = layer_and_inputs(gated=gated, threshold=threshold)
    torch.testing.assert_close(layer(hidden, entries, order), by_hand(layer, hidden, entries), rtol=1e-12, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    heads=st.integers(1, 3),
    gated=st.booleans(),
    threshold=st.sampled_from(["mlp", "coordinate"]),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    entries=st.integers(1, 13),
)
def test_orders_agree_in_values_and_gradients(seed, heads, gated, threshold, activation, entries):
    layer, hidden, base = layer_and_inputs(seed, heads, gated, threshold, activation, entries)
    hidden.requires_grad_()
    base.requires_grad_()
    direction = torch.randn_like(hidden)
    results = {}
    for order in ORDERS:
        output = layer(hidden, base, order)
        gradients = torch.autograd.grad((output * direction).sum(), [hidden, base, *layer.parameters()])
        results[order] = [output, *gradients]
    for order in ORDERS[1:]:
        torch.testing.assert_close(results[order], results["naive"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("heads", [1, 3])
def test_folded_relu_is_the_ordinary_feed_forward_layer(heads):
    """Heads are a wider one."""
    layer, hidden, entries = layer_and_inputs(heads=heads, activation="relu")
    folded = layer.fold(entries)
    first = folded.scores[0].movedim(0, 1).flatten(1)
    wide = functional.relu(hidden @ first + folded.thresholds[0].flatten()) @ folded.values.flatten(0, 1)
    for found in (folded(hidden), layer(hidden, entries)):
        torch.testing.assert_close(found, wide + folded.output_bias, rtol=1e-12, atol=1e-12)


def test_an_edited_entry_is_seen_at_once_by_all_but_the_folded():
    layer, hidden, entries = layer_and_inputs()
    folded = layer.fold(entries)
    before = folded(hidden)
    entries[4] = torch.randn(6)
    torch.testing.assert_close(folded(hidden), before, rtol=0, atol=0)
    assert not torch.allclose(layer(hidden, entries), before)
    torch.testing.assert_close(layer.fold(entries)(hidden), layer(hidden, entries), rtol=1e-12, atol=1e-12)


def test_layers_may_contradict_each_other_about_one_entry():
    """One base for all layers (knowledge, sec. 3.1): what a layer reads off an entry is its projections'."""
    layer, hidden, entries = layer_and_inputs()
    other = copy.deepcopy(layer)
    other.value.data.neg_()
    says, denies = (each(hidden, entries) - each.output_bias for each in (layer, other))
    torch.testing.assert_close(denies, -says)
    assert says.abs().min() > 0


def test_an_entry_says_what_its_neuron_says():
    """Trained jointly, all that can be read of entries can be read of the neurons of the folded layer."""
    layer, hidden, entries = layer_and_inputs(heads=1, activation="relu")
    folded = layer.fold(entries)
    first, values = folded.scores[0, 0], folded.values[0]
    neurons = functional.relu(hidden @ first + folded.thresholds[0, 0])
    for number, entry in enumerate(entries):
        alone = layer(hidden, entry[None]) - layer.output_bias
        torch.testing.assert_close(neurons[..., number, None] * values[number], alone, rtol=1e-12, atol=1e-12)


def test_four_entries_answer_any_number_of_questions():
    """The number of entries bounds no number of facts (knowledge, sec. 6.3)."""
    angles = torch.arange(64, dtype=torch.float64) * (2 * math.pi / 64)
    questions = torch.stack([angles.cos(), angles.sin()], dim=1)
    layer = GeneralizedCrossAttention(2, 2, 2, activation="relu", threshold="constant").double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.query[0], layer.key[0, 0], layer.value[0] = torch.eye(2), torch.eye(2), torch.eye(2)
        answers = layer(questions, torch.cat([torch.eye(2), -torch.eye(2)]).double())
    assert (answers @ questions.mT).argmax(dim=1).tolist() == list(range(64))


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9))
def test_sparsemax_is_the_nearest_point_of_the_simplex(scores):
    scores = torch.tensor(scores, dtype=torch.float64)
    weights = sparsemax(scores)
    assert weights.min() >= 0
    assert weights.sum().item() == pytest.approx(1)
    # Optimality: entries with weight are all the same distance below their score, others no farther.
    gap = scores - weights
    assert gap[weights > 0].max().item() == pytest.approx(gap[weights > 0].min().item())
    assert bool((gap[weights == 0] <= gap[weights > 0].min() + 1e-12).all())


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "sparsemax"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("threshold", ["mlp", "coordinate"])
def test_without_gradients_entries_are_read_in_blocks(monkeypatch, threshold, gated, activation):
    monkeypatch.setattr("attnflow.knowledge.attention._CACHED", 1)  # 64 entries a block, the last one is short
    layer, hidden, entries = layer_and_inputs(3, 2, gated, threshold, activation, entries=150)
    expected = layer(hidden, entries, "naive")
    with torch.no_grad():
        torch.testing.assert_close(layer(hidden, entries), expected.detach(), rtol=1e-12, atol=1e-12)
        assert layer(hidden[:, :0], entries).shape == (2, 0, 8)
