"""The bound of what an edit adds to a layer, against the layer itself in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from attnflow.knowledge import edit
from attnflow.knowledge.base import EntryColumns
from attnflow.knowledge.editing.certificate import shift_bound
from attnflow.knowledge.editing.edit import edited_layers
from attnflow.knowledge.editing.edit_targets import places_of
from attnflow.knowledge.editing.facts import Fact
from attnflow.knowledge.editing.inputs import inputs_everywhere
from attnflow.models.subject import Subject
from tests.knowledge.test_edit import FRANCE, TEXT, WORDS, converted
from tests.models.saved import word_tokenizer

ACTIVATIONS = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda scores: functional.gelu(scores, approximate="tanh"),
    "silu": functional.silu,
}
WIDTH, ENTRIES = 6, 20


def layer(seed, gated, rank):
    """Keys, thresholds, a change of values and three places, at random."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    parts = ("gate", "up") if gated else ("up",)
    columns = EntryColumns(
        {part: normal(ENTRIES, WIDTH) for part in parts}, torch.zeros(0), {part: normal(ENTRIES) for part in parts}
    )
    return columns, normal(ENTRIES, rank) @ normal(rank, WIDTH), normal(3, WIDTH), normal


def weights(columns, activation, inputs):
    scores = [inputs @ key.T + columns.thresholds[part] for part, key in columns.keys.items()]
    return ACTIVATIONS[activation](scores[0]) * (scores[1] if len(scores) > 1 else 1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@given(
    seed=st.integers(0, 10_000),
    gated=st.booleans(),
    rank=st.sampled_from([1, 3]),
    far=st.sampled_from([0.0, 1e-6, 1e-2, 0.3, 1.0, 10.0, 1e3]),
)
def test_no_shift_exceeds_the_bound(activation, seed, gated, rank, far):
    columns, change, places, normal = layer(seed, gated, rank)
    found = shift_bound(5, columns, change, places, weights(columns, activation, places))
    inputs = torch.cat([places + far * functional.normalize(normal(3, WIDTH), dim=1) for _ in range(50)])
    shifts = (weights(columns, activation, inputs) @ change).norm(dim=1)
    distances = torch.cdist(inputs, places, compute_mode="donot_use_mm_for_euclid_dist").amin(dim=1)
    bounds = found.bound(distances)
    assert found.layer == 5
    assert bool((shifts <= bounds * (1 + 1e-9)).all())
    assert float(bounds[0]) == pytest.approx(found.bound(float(distances[0])))


@pytest.mark.parametrize("activation", ["gelu", "silu"])
@given(seed=st.integers(0, 10_000), gated=st.booleans())
def test_the_bound_is_reached_beside_a_place(activation, seed, gated):
    """Of a change of rank 1 at one place, to first order: the shift along its gradient."""
    columns, change, places, _ = layer(seed, gated, 1)
    place = places[:1].clone().requires_grad_()
    found = shift_bound(0, columns, change, places[:1], weights(columns, activation, places[:1]))
    length = (weights(columns, activation, place) @ change).norm()
    (along,) = torch.autograd.grad(length, place)
    assert found.shift == pytest.approx(float(length.detach()))
    assert found.slope == pytest.approx(float(along.norm()))


@pytest.mark.parametrize("gated", [False, True])
def test_a_layer_of_an_unknown_activation_has_no_bound(gated):
    columns, change, places, _ = layer(0, gated, 1)
    written = weights(columns, "gelu", places)
    assert shift_bound(0, columns, change, places, written) is not None
    assert shift_bound(0, columns, change, places, written.square()) is None


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_edit_reports_how_far_it_can_move_its_layers(family):
    tokenizer = word_tokenizer(["[PAD]", "[UNK]", *WORDS], pad_token="[PAD]")
    model, quiet = converted(family), "the river of Italy was blue"
    values = {layer: model.knowledge.columns(layer).values.detach().clone() for layer in (1, 2)}
    with edit(model, FRANCE, text=TEXT, tokenizer=tokenizer, layers=[1, 2], untouched=[quiet]) as handle:
        bounds = handle.report.certificate
        assert [bound.layer for bound in bounds] == [1, 2]
        assert all(0 < bound.largest_ratio < 1 and bound.checked > 50 for bound in bounds)
        assert "of other prompts, layers moved by at most" in str(handle)
        changes = {layer: model.knowledge.columns(layer).values.detach() - values[layer] for layer in (1, 2)}
    fact = Fact(**FRANCE)
    subject = Subject(model, tokenizer)
    (place,) = places_of(subject, fact, [])[:1]
    layers = edited_layers(model, [1, 2])
    for bound in bounds:
        read = inputs_everywhere(subject, {0: layers[bound.layer]}, [place.ids])[0][place.position]
        moved = float((read @ changes[bound.layer].double()).norm())
        assert moved == pytest.approx(bound.bound(0.0), rel=1e-4)
