"""What a call's bias is for a few queries, in tiles, the map made of it, and its reasoning graph."""

import csv
import io
import math
from dataclasses import replace

import networkx
import pytest
import torch

from attnflow.bias import BiasMap
from attnflow.bias.attention import weights_of
from attnflow.bias.graph import BiasEdge
from attnflow.bias.hf.capture import observe
from attnflow.bias.map import LayerMap, energy
from tests.bias.cases import MASKS, Case, Guidance, bias_of
from tests.memory import Largest

TERMS = [
    (("guidance", "one"),),
    (("guidance", "heads"), ("additive", "one")),
    (("product", "kv"), ("offset", "heads")),
    (("dense", "one"), ("user", "heads"), ("additive with rows", "kv")),
]
ROWS = [0, 1, 2, 5, 20, 21, 36]


def dense(call):
    """(B [heads, q, k], allowed, weights, weights without B) of everything at once, from the reference."""
    every = slice(0, call.query.shape[2]), slice(0, call.key.shape[2])
    bias = bias_of(call.terms, call.num_heads, *every)
    bias = bias.expand(1, call.num_heads, -1, -1)[0].double()
    allowed = call.allow.dense()
    allowed = torch.ones_like(bias, dtype=torch.bool) if allowed is None else allowed
    if allowed.ndim == 4:
        allowed = allowed.expand(1, call.num_heads, -1, -1)[0]
    with_it, without = weights_of(call)[0], weights_of(replace(call, terms=()))[0]
    return bias, allowed, with_it, without


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("terms", TERMS, ids=lambda t: "+".join(k for k, _ in t))
def test_rows_of_a_call_are_those_of_the_whole(terms, mask):
    call = Case(terms=terms, mask=mask, batch=1, softcap=20.0, sinks=mask == "causal").build()
    bias, allowed, weights, without = dense(call)
    found = observe(call, len(terms), ROWS, heads=[3, 1])
    raw = bias.masked_fill(~allowed, 0.0)
    mean = raw.sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True).clamp(min=1)
    centred = (raw - mean).masked_fill(~allowed, 0.0)
    expected = {"raw": raw, "bias": centred, "allowed": allowed, "weights": weights, "weights_without": without}
    for name, whole in expected.items():
        torch.testing.assert_close(getattr(found, name).double(), whole[[3, 1]][:, ROWS].double(), rtol=1e-5, atol=2e-6)
    mean_over_heads = observe(call, len(terms), ROWS)
    assert mean_over_heads.bias.shape == (1, len(ROWS), 37)
    torch.testing.assert_close(mean_over_heads.bias[0].double(), centred.mean(0)[ROWS], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(mean_over_heads.weights[0], weights.mean(0)[ROWS], rtol=1e-5, atol=2e-6)
    assert torch.equal(mean_over_heads.allowed[0], allowed.any(0)[ROWS])


def test_rows_are_centred_over_the_allowed_keys_and_shifts_are_invisible():
    call = Case(terms=(("guidance", "one"),), mask="causal", batch=1).build()
    term = call.terms[0]
    shifted = replace(call, terms=(replace(term, offset=term.offset + 7.0),))
    a, b = (observe(c, 1, range(37)) for c in (call, shifted))
    counts = a.allowed.sum(-1)
    assert counts.tolist() == [list(range(1, 38))]
    assert (a.bias.double().sum(-1) / counts).abs().max() < 1e-6
    torch.testing.assert_close(a.bias, b.bias, rtol=0, atol=1e-5)
    torch.testing.assert_close(b.raw[0, -1], a.raw[0, -1] + 7.0)
    assert not a.bias[~a.allowed].any()


def test_terms_beyond_the_bias_belong_to_the_scores_without_it():
    call = Case(terms=(("product", "one"), ("dense", "one")), mask="everything", batch=1).build()
    found = observe(call, 1, ROWS)
    expected = weights_of(replace(call, terms=call.terms[1:]))[0].mean(0)[ROWS]
    torch.testing.assert_close(found.weights_without[0], expected)
    torch.testing.assert_close(found.raw[0], call.terms[0].tile(slice(0, 37), slice(0, 37))[0, 0, ROWS])


def test_memory_is_bounded_by_a_tile():
    """400 queries of 6,000 keys with 64 hidden units: 154 million numbers at once, had they been."""
    case = Case(batch=1, num_heads=8, queries=400, keys=6000, hidden=64, head_dim=8)
    call = case.build()
    with Largest() as largest:
        found = observe(call, 1, range(400))
    assert found.raw.shape == (1, 400, 6000)
    assert largest.numel <= 2_400_000  # the result itself, and no score or hidden layer is larger


@pytest.mark.parametrize(("d", "rank_8"), [(64, 0.90), (576, 0.835)])
def test_energy_of_a_random_network(d, rank_8):
    """Three quarters of a random-init DAA bias, row-centred, have rank 1, with and without a mask; most has rank 8."""
    ones, eights, masked = [], [], []
    for _ in range(4):
        first, last, n = torch.nn.Linear(2 * d, 64), torch.nn.Linear(64, 1), 256
        q, k = torch.randn(n, d), torch.randn(n, d)
        rows, columns = q @ first.weight[:, :d].T + first.bias, k @ first.weight[:, d:].T
        term = Guidance(
            rows[None, None], columns[None, None], torch.ones(1, 64), torch.zeros(1, 64), last.weight, last.bias
        )
        bias = term.tile(slice(0, n), slice(0, n))[0, 0].detach()
        everything = torch.ones(n, n, dtype=torch.bool)
        ones.append(energy(bias, everything, 1))
        eights.append(energy(bias, everything, 8))
        masked.append(energy(bias, everything.tril(), 1))
    assert [sum(ones) / 4, sum(masked) / 4] == pytest.approx([0.75, 0.75], abs=0.05)
    assert sum(eights) / 4 == pytest.approx(rank_8, abs=0.025)


def test_energy_under_a_mask():
    n, causal = 48, torch.ones(48, 48, dtype=torch.bool).tril()
    keys, rows = torch.randn(n), torch.randn(n, 1)
    assert energy(keys + rows, causal, 1) > 0.999  # a product of one number fits a bias per key over any pairs,
    means = keys.cumsum(0) / torch.arange(1, n + 1)
    assert torch.linalg.matrix_rank((keys - means[:, None]).tril()) == n - 1  # whose centred matrix is not of rank 1
    noise = torch.randn(n, n)
    assert energy(keys + rows, ~torch.zeros(n, n, dtype=torch.bool), 1) == pytest.approx(1.0)
    found = [energy(noise, causal, rank) for rank in (1, 2, 4, 8)]
    assert found == sorted(found)
    assert found[0] < 0.35
    assert math.isnan(energy(rows.expand(n, n), causal, 1))  # softmax sees none of it


def make(queries=(0, 1, 2, 3), heads=(), layers=(0, 2), seed=0, produced=(), base=True):
    """A causal map of four tokens."""
    generator = torch.Generator().manual_seed(seed)
    maps, size = max(len(heads), 1), 4
    allowed = torch.ones(size, size, dtype=torch.bool).tril()[list(queries)].expand(maps, -1, -1)

    def one(layer):
        raw = torch.randn(maps, len(queries), size, generator=generator).masked_fill(~allowed, 0.0)
        mean = raw.sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True)
        weights = [torch.rand(maps, len(queries), size, generator=generator) for _ in range(3)]
        weights = [(w * allowed) / (w * allowed).sum(-1, keepdim=True) for w in weights]
        centred = (raw - mean).masked_fill(~allowed, 0.0)
        return LayerMap(
            layer, f"layers.{layer}.attn", centred, raw, allowed, *weights[:2], weights[2] if base else None
        )

    names = ("a", " b", "\n", "<d>")
    return BiasMap("tiny", names, tuple(queries), tuple(one(i) for i in layers), heads, True, produced)


def test_csv_has_a_line_for_each_allowed_pair(tmp_path):
    found = make(heads=(1, 3))
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert found.save(tmp_path / "map.csv").read_text() == found.to_csv()
    assert len(rows) == 2 * 2 * 10
    assert [(r["layer"], r["head"], r["query"], r["key"]) for r in rows[:3]] == [
        ("0", "1", "0", "0"), ("0", "1", "1", "0"), ("0", "1", "1", "1"),
    ]  # fmt: skip
    assert rows[-1]["query_token"] == "<d>"
    assert rows[5]["key_token"] == "↵"
    row = next(r for r in rows if (r["layer"], r["head"], r["query"], r["key"]) == ("2", "3", "3", "1"))
    layer = found.layer(2)
    assert float(row["bias"]) == pytest.approx(float(layer.bias[1, 3, 1]))
    assert float(row["raw"]) == pytest.approx(float(layer.raw[1, 3, 1]))
    assert float(row["weight_base"]) == pytest.approx(float(layer.weights_base[1, 3, 1]))
    assert next(csv.DictReader(io.StringIO(make(base=False).to_csv())))["weight_base"] == ""


def test_values_are_means_over_layers_and_heads():
    found = make(heads=(1, 3))
    torch.testing.assert_close(found.values("bias", 2, 3), found.layer(2).bias[1])
    torch.testing.assert_close(found.values("raw"), torch.stack([one.raw for one in found]).mean((0, 1)))
    assert found.row(-1) == 3
    assert make(queries=(1, 3)).row(3) == 1
    assert set(found.energy(2)) == {0, 2}
    assert "layer 2: strength" in repr(found)


def test_strength_and_weight_moved():
    found = make().layer(0)
    pairs = found.bias[found.allowed]
    assert found.strength == pytest.approx(float(pairs.square().mean().sqrt()), rel=1e-5)
    by_query = (found.weights - found.weights_without).abs().sum(-1) / 2
    assert found.moved == pytest.approx(float(by_query.mean()), rel=1e-5)
    assert 0 < found.moved < 1


def table(values, allowed=None, causal=True, tokens=None):
    """A map of one layer with these row-centred biases."""
    bias = torch.tensor(values)[None]
    allowed = torch.ones_like(bias, dtype=torch.bool) if allowed is None else allowed
    n = bias.shape[-1]
    one = LayerMap(0, "x", bias, bias, allowed, bias.softmax(-1), bias.softmax(-1))
    names = tuple(tokens or [f"t{i}" for i in range(n)])
    return BiasMap("tiny", names, tuple(range(n)), (one,), causal=causal)


BIAS = [[9.0, 0.0, 0.0], [2.0, -2.0, 0.0], [1.0, 0.5, -1.5]]
TRIANGLE = torch.ones(1, 3, 3, dtype=torch.bool).tril()


def test_edges_are_positive_and_no_loops():
    found = table(BIAS, TRIANGLE)
    assert found.graph(top_k=3).edges == (BiasEdge(0, 1, 2.0), BiasEdge(0, 2, 1.0), BiasEdge(1, 2, 0.5))
    assert found.graph(top_k=1).edges == (BiasEdge(0, 1, 2.0), BiasEdge(0, 2, 1.0))
    assert found.graph(threshold=1.0).edges == (BiasEdge(0, 1, 2.0), BiasEdge(0, 2, 1.0))
    assert found.graph(threshold=0.4, top_k=1).edges == found.graph(top_k=1).edges
    assert found.graph() == found.graph(top_k=2)
    assert found.graph(layer=0).about == "layer 0; the 2 strongest keys of each query"


def test_a_causal_graph_is_acyclic_and_a_bidirectional_one_may_not_be():
    assert make().graph(top_k=4).is_acyclic
    both = table([[0.0, 3.0], [1.0, 0.0]], causal=False).graph()
    assert both.edges == (BiasEdge(1, 0, 3.0), BiasEdge(0, 1, 1.0))
    assert not both.is_acyclic


def test_networkx():
    graph = table(BIAS, TRIANGLE, tokens=['say "5"', "a\\b", "\n"]).graph(top_k=2)
    found = graph.to_networkx()
    assert isinstance(found, networkx.DiGraph)
    assert dict(found.nodes(data="token")) == {0: 'say "5"', 1: "a\\b", 2: "\n"}
    assert sorted(found.edges(data="bias")) == [(0, 1, 2.0), (0, 2, 1.0), (1, 2, 0.5)]


def test_the_strongest_edges():
    torch.manual_seed(0)
    n = 40
    triangle = torch.ones(1, n, n, dtype=torch.bool).tril()
    graph = table(torch.randn(n, n).tril().tolist(), triangle).graph(top_k=5)
    kept = graph.strongest(30)
    assert min(edge.bias for edge in kept.edges) >= sorted((e.bias for e in graph.edges), reverse=True)[29]
    assert graph.strongest(10_000) is graph


def test_no_edges():
    empty = table([[0.0, 0.0], [0.0, 0.0]]).graph()
    assert empty.edges == empty.nodes == ()
    assert empty.is_acyclic
