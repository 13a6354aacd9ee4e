"""One layer reading the best entries of a tensor, an index or any source; straight-through gradients; bounds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from attnflow.knowledge import GeneralizedCrossAttention, Retrieval
from attnflow.knowledge.attention import ACTIVATIONS
from attnflow.knowledge.reader import KnowledgeReader
from attnflow.knowledge.retrieval import BOUNDED, best
from tests.knowledge.readers import indexed
from tests.knowledge.test_attention import layer_and_inputs as attention_and_inputs

TOKENS = (2, 3)
THRESHOLDS = ["mlp", "coordinate"]


def layer_and_inputs(retrieval=None, layer=0, activation="relu", entries=30, **options):
    attention, hidden, rows = attention_and_inputs(activation=activation, entries=entries, **options)
    return KnowledgeReader(layer, attention, retrieval).eval(), hidden, rows


def keeping(scores, retrieval):
    """What is kept of gate scores, one query at a time."""
    mask = torch.zeros(scores.shape, dtype=torch.bool)
    for row, kept in zip(scores.flatten(0, -2), mask.flatten(0, -2), strict=True):
        if retrieval.k is None:
            kept |= row > retrieval.threshold
        else:
            kept[row.argsort(descending=True)[: retrieval.k]] = True
    return mask


def activated(scores, mask, attention):
    """Weights of what is kept, one query at a time; 0 elsewhere."""
    weights = torch.zeros_like(scores[0])
    for place in torch.cartesian_prod(*map(torch.arange, mask.shape[:-1])).tolist():
        kept = (*place, mask[tuple(place)])
        if mask[tuple(place)].any():
            up = scores[(1, *kept)] if attention.gated else 1
            weights[kept] = attention.activation(scores[(0, *kept)]) * up
    return weights


def by_hand(reader, hidden, entries, thresholds=None):
    """The function of the entries kept, with everything formed and then masked."""
    attention = reader.attention
    thresholds = attention.thresholds(entries) if thresholds is None else thresholds
    key = torch.einsum("ne,phek->phnk", entries, attention.key)
    scores = torch.einsum("btd,hdk,phnk->pbthn", hidden, attention.query, key) / math.sqrt(attention.key_dim)
    scores = scores + thresholds[:, None, None]
    weights = activated(scores, keeping(scores[0].detach(), reader.retrieval), attention)
    found = torch.einsum("bthn,ne,hed->btd", weights, entries, attention.value)
    return found + attention.output_bias


def softmax(scores):
    """A function of one's own."""
    return functional.softmax(scores, dim=-1)


retrievals = st.one_of(
    st.builds(Retrieval, k=st.integers(1, 30), search=st.just("exact")),
    st.builds(Retrieval, threshold=st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 3.0, 1e9])),
)
layers = {
    "seed": st.integers(0, 10**6),
    "heads": st.integers(1, 3),
    "gated": st.booleans(),
    "threshold": st.sampled_from(THRESHOLDS),
    "activation": st.sampled_from([*sorted(ACTIVATIONS), softmax]),
}


@settings(max_examples=50)
@given(retrieval=retrievals, training=st.booleans(), observed=st.booleans(), options=st.fixed_dictionaries(layers))
def test_the_function_is_that_of_the_entries_kept(retrieval, training, observed, options):
    reader, hidden, entries = layer_and_inputs(retrieval=retrieval, **options)
    readings = []
    if observed:
        reader.observer = readings.append
    found = reader.train(training)(hidden, entries)
    torch.testing.assert_close(found, by_hand(reader, hidden, entries), rtol=1e-10, atol=1e-10)
    assert len(readings) == observed


@settings(max_examples=40)
@given(retrieval=retrievals, options=st.fixed_dictionaries(layers))
def test_readings_hold_what_was_read(retrieval, options):
    reader, hidden, entries = layer_and_inputs(retrieval=retrieval, layer=3, **options)
    readings = []
    reader.observer = readings.append
    output = reader(hidden, entries)
    (reading,) = readings
    assert reading.layer == 3
    attention = reader.attention
    scores = attention.score(hidden, entries, attention.thresholds(entries))
    if reading.ids is None:
        assert retrieval.k == 30
        assert reading.certificate is None
        torch.testing.assert_close(reading.scores, scores)
        return
    rows = reading.ids.clamp(min=0)
    torch.testing.assert_close(reading.scores, scores.gather(-1, rows.expand(len(scores), *rows.shape)))
    assert not reading.weights[reading.ids < 0].any()
    mask = torch.zeros_like(scores[0], dtype=torch.int64).scatter_add(-1, rows, (reading.ids >= 0).long()).bool()
    assert torch.equal(mask, keeping(scores[0], retrieval))
    read = torch.einsum("bthk,bthke->bthe", reading.weights, entries[rows])
    torch.testing.assert_close(attention.write(read), output, rtol=1e-10, atol=1e-10)
    assert reading.certificate.last.shape == (math.prod(TOKENS) * options["heads"],)


@pytest.mark.parametrize("retrieval", [Retrieval(k=5, search="exact"), Retrieval(threshold=0.3)], ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_straight_through_gradients(threshold, activation, gated, retrieval):
    """Of a loss <g, y>: of the weights, as if all had been read; of the values, of the entries that were."""
    reader, hidden, entries = layer_and_inputs(
        retrieval=retrieval, gated=gated, threshold=threshold, activation=activation
    )
    attention = reader.train().attention
    direction = torch.randn(*TOKENS, 8, dtype=torch.float64)
    inputs = [hidden.requires_grad_(), entries.requires_grad_(), *attention.parameters()]
    found = torch.autograd.grad((reader(hidden, entries) * direction).sum(), inputs, allow_unused=True)

    scores = attention.score(hidden, entries, attention.thresholds(entries))
    mask = keeping(scores[0].detach(), retrieval)
    sparse = activated(scores.detach(), mask, attention)
    values = torch.einsum("ne,hed->hnd", entries, attention.value)
    through = torch.einsum("btd,hnd->bthn", direction, values.detach())
    everything = attention.activation(scores[0]) * (scores[1] if gated else 1)
    surrogate = (everything * through).sum() + torch.einsum("bthn,hnd,btd->", sparse, values, direction)
    surrogate = surrogate + (attention.output_bias * direction).sum()
    expected = torch.autograd.grad(surrogate, inputs, allow_unused=True)
    assert [ours is None for ours in found] == [theirs is None for theirs in expected]
    present = [[gradient for gradient in gradients if gradient is not None] for gradients in (found, expected)]
    torch.testing.assert_close(*present, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("retrieval", [Retrieval(k=5, search="exact"), Retrieval(threshold=0.3)], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_gradients_in_evaluation_are_those_of_the_function(gated, retrieval):
    reader, hidden, entries = layer_and_inputs(retrieval=retrieval, gated=gated, activation="gelu")
    inputs = [hidden.requires_grad_(), entries.requires_grad_(), *reader.attention.parameters()]
    direction = torch.randn(*TOKENS, 8, dtype=torch.float64)
    ours = torch.autograd.grad((reader(hidden, entries) * direction).sum(), inputs)
    expected = torch.autograd.grad((by_hand(reader, hidden, entries) * direction).sum(), inputs)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=150)
@given(retrieval=retrievals, options=st.fixed_dictionaries({**layers, "size": st.sampled_from([0.1, 1.0, 3.0])}))
def test_the_bound_holds(retrieval, options):
    bounded = options["activation"] in BOUNDED and not options["gated"]
    reader, hidden, entries = layer_and_inputs(retrieval=retrieval, **options)
    readings = []
    reader.observer = readings.append
    found = reader(hidden, entries)
    reader.observer = reader.retrieval = None
    dense = reader(hidden, entries)
    error = (found - dense).norm(dim=-1).flatten()
    rounding = 1e-12 * (1 + dense.norm(dim=-1).flatten())
    certificate = readings[0].certificate
    if bounded or certificate is None:
        bound = reader.error_bound(readings[0], entries)
        assert bound.shape == error.shape
        assert bool((error <= bound + rounding).all())
    else:
        with pytest.raises(ValueError, match="an error bound needs the activation relu, gelu, silu and no gate"):
            reader.error_bound(readings[0], entries)
    if certificate is not None and options["activation"] == "relu":
        complete = certificate.complete.view(*TOKENS, -1).all(dim=-1).flatten()
        assert bool((error[complete] <= rounding[complete]).all())


def test_the_bound_is_reached():
    """One token, one head, entries alike: what is left out is the count times the score times the norm."""
    attention = GeneralizedCrossAttention(1, 1, 1, threshold="constant", bias=False).double()
    for parameter in (attention.query, attention.key, attention.value):
        torch.nn.init.constant_(parameter, 2.0)
    reader = KnowledgeReader(0, attention, Retrieval(k=4, search="exact")).eval()
    readings = []
    reader.observer = readings.append
    entries, token = torch.ones(9, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    error = 9 * 4 * 2 - reader(token, entries)
    assert error.item() == pytest.approx(5 * 4 * 2)
    assert reader.error_bound(readings[0], entries).item() == pytest.approx(error.item())


@settings(max_examples=40)
@given(
    retrieval=retrievals,
    layer=st.integers(0, 1),
    observed=st.booleans(),
    options=st.fixed_dictionaries({k: v for k, v in layers.items() if k != "seed"}),
)
def test_an_index_gives_what_the_tensor_gives(retrieval, layer, observed, options):
    """In float32, which an index keeps."""
    pair = [layer_and_inputs(seed=7 + number, retrieval=retrieval, layer=number, **options) for number in range(2)]
    entries = pair[0][2].float()
    readers = [reader.float() for reader, _, _ in pair]
    source = indexed(readers, entries)
    hidden, reader, readings = pair[layer][1].float(), readers[layer], []
    if observed:
        reader.observer = readings.append
    with torch.no_grad():
        found, expected = reader(hidden, source), reader(hidden, entries)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    if observed and readings[0].ids is not None:
        ours, theirs = readings
        assert torch.equal(ours.ids >= 0, theirs.ids >= 0)
        torch.testing.assert_close(ours.certificate.last, theirs.certificate.last, rtol=1e-3, atol=1e-3)
        assert torch.equal(ours.certificate.left_out, theirs.certificate.left_out)
        assert torch.equal(ours.certificate.active, theirs.certificate.active)
        if options["activation"] in BOUNDED and not options["gated"]:
            torch.testing.assert_close(
                reader.error_bound(ours, source), reader.error_bound(theirs, entries), rtol=1e-2, atol=1e-2
            )


def test_gradients_through_an_index_reach_queries_and_values_of_what_was_read():
    reader, hidden, entries = layer_and_inputs(retrieval=Retrieval(k=5, search="exact"), activation="gelu")
    reader, hidden, entries = reader.float().train(), hidden.float(), entries.float()
    given = hidden.clone().requires_grad_()
    source = indexed([reader], entries)
    reader(given, source).square().sum().backward()
    ours = [given.grad, reader.attention.query.grad, reader.attention.value.grad]
    reader.zero_grad()
    expected = hidden.clone().requires_grad_()
    reader.eval()(expected, entries).square().sum().backward()
    theirs = [expected.grad, reader.attention.query.grad, reader.attention.value.grad]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_an_approximate_search_promises_nothing():
    torch.manual_seed(0)
    reader, hidden, _ = layer_and_inputs(heads=1, threshold="coordinate")
    reader, hidden = reader.float(), hidden.float()
    centres = torch.randn(40, 6) * 4
    entries = centres.repeat_interleave(100, 0) + 0.1 * torch.randn(4000, 6)
    source = indexed([reader], entries)
    readings = []
    reader.observer, reader.retrieval = readings.append, Retrieval(k=8, search="approximate")
    reader(hidden, source)
    assert readings[0].certificate.label == "approximate"
    assert bool(reader.error_bound(readings[0], source).isinf().all())
    with torch.no_grad():
        reader.attention.value.zero_()
    assert not reader.error_bound(readings[0], source).any()  # values of 0 are no error, whichever were missed
    reader.retrieval = Retrieval(k=8, search="exact")
    reader(hidden, source)
    assert readings[1].certificate.label == "exact"


def test_all_are_read_where_that_is_no_slower():
    reader, hidden, entries = layer_and_inputs(retrieval=Retrieval(k=5))
    readings = []
    reader.observer = readings.append
    dense = KnowledgeReader(0, reader.attention)(hidden, entries)
    assert torch.equal(reader(hidden, entries), dense)  # 5 x 16 >= 30
    assert readings.pop().certificate is None
    reader.train()
    reader(hidden, entries)  # a layer that is trained is the function that was asked for
    assert readings.pop().ids.shape[-1] == 5
    reader.retrieval = Retrieval(k=5, search="dense")
    assert torch.equal(reader(hidden, entries), dense)
    source = indexed([reader], entries)
    torch.testing.assert_close(reader.float().eval()(hidden.float(), source), dense.float(), rtol=1e-3, atol=1e-3)


def test_one_token_no_tokens_and_no_entries():
    for retrieval in (Retrieval(k=3, search="exact"), Retrieval(threshold=0.0), None):
        reader, hidden, entries = layer_and_inputs(retrieval=retrieval)
        reader.float()
        hidden, entries = hidden.float(), entries.float()
        for source in (entries, indexed([reader], entries)):
            torch.testing.assert_close(reader(hidden[0, 0], source), reader(hidden, source)[0, 0])
            assert reader(hidden[:, :0], source).shape == (2, 0, 8)
        nothing = reader(hidden, entries[:0])
        torch.testing.assert_close(nothing, reader.attention.output_bias.expand(nothing.shape))


def test_bad_sources():
    reader, hidden, entries = layer_and_inputs(retrieval=Retrieval(k=3, search="exact"), layer=1)
    reader, hidden, entries = reader.float(), hidden.float(), entries.float()
    with pytest.raises(ValueError, match="hidden must have width 8"):
        reader(hidden[..., :7], entries)
    with pytest.raises(ValueError, match="hidden must have width 8"):
        reader(hidden[..., :7], indexed([reader, reader], entries))
    with pytest.raises(ValueError, match=r"entries must be \[entries, 6\]"):
        reader(hidden, entries[:, :5])
    alone = indexed([reader], entries)  # has the columns of layer 0 only
    with pytest.raises(ValueError, match="threshold_column must be at most 1, got 2"):
        reader(hidden, alone)
    reader.retrieval = None
    with pytest.raises(ValueError, match=r"layer 1 needs .* 4 threshold columns"):
        reader(hidden, alone)
    reader.retrieval = Retrieval(k=3, search="approximate")
    with pytest.raises(ValueError, match="an approximate search needs the index of a store"):
        reader(hidden, entries)


@pytest.mark.parametrize(
    ("retrieval", "total", "queries", "training", "expected"),
    [
        (Retrieval(k=10, search="dense"), 99, 1, False, True),
        (Retrieval(k=10, search="dense"), 99, 1, True, True),
        (Retrieval(threshold=0.0, search="dense"), 99, 1, True, True),
        (Retrieval(k=99, search="exact"), 99, 1, True, True),
        (Retrieval(k=98, search="exact"), 99, 1, False, False),
        (Retrieval(k=24), 99, 1, False, False),
        (Retrieval(k=25), 99, 1, False, True),
        (Retrieval(k=25), 99, 1, True, False),  # what is trained is the function of k entries
        (Retrieval(k=6), 99, 128, False, False),
        (Retrieval(k=7), 99, 128, False, True),
        (Retrieval(threshold=0.0), 99, 128, False, False),
    ],
)
def test_when_all_entries_are_read(retrieval, total, queries, training, expected):
    assert retrieval.reads_all(total, queries, training) is expected


@pytest.mark.parametrize(("queries", "most"), [(1, 1024), (8, 64), (9, 16)])
def test_a_source_that_copies_is_left_sooner(queries, most):
    """`most` of 4,096 entries are as slow to copy as all are to read."""
    assert Retrieval(k=most).reads_all(4096, queries, copied=True)
    assert not Retrieval(k=most - 1).reads_all(4096, queries, copied=True)


def test_what_scores_as_much_as_the_threshold_is_left_out():
    rows = best(torch.tensor([[0.5, 1.0, 0.5, -1.0], [0.5, 1.0, 2.0, -1.0]]), Retrieval(threshold=0.5))
    assert rows.tolist() == [[1, -1], [2, 1]]
