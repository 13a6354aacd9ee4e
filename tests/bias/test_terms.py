"""Terms against brute force, one pair at a time, straight from their definitions."""

import math

import pytest
import torch
from torch.nn import functional

from attnflow.bias.terms import Additive, Dense, Guidance, Offset, Product, Term, per_head
from tests.bias.cases import TERMS, Case

EVERY = slice(0, 9), slice(0, 11)


def term_of(kind, maps="kv", **sizes):
    return (
        Case(terms=((kind, maps),), mask="everything", queries=9, keys=11, dtype=torch.float64, **sizes)
        .build()
        .terms[0]
    )


def pairs(function, batch, groups, queries=9, keys=11):
    """A tile by a Python loop over function(batch, group, query, key)."""
    tile = torch.empty(batch, groups, queries, keys, dtype=torch.float64)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in tile.shape)).tolist():
        tile[tuple(index)] = function(*index)
    return tile


def test_guidance_is_the_papers_network_on_the_concatenation():
    width, hidden, queries, keys = 6, 5, 4, 7
    first, norm = torch.nn.Linear(2 * width, hidden).double(), torch.nn.LayerNorm(hidden).double()
    last = torch.nn.Linear(hidden, 1).double()
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    q, k = torch.randn(queries, width, dtype=torch.float64), torch.randn(keys, width, dtype=torch.float64)
    rows, columns = q @ first.weight[:, :width].T + first.bias, k @ first.weight[:, width:].T
    term = Guidance(rows[None, None], columns[None, None], norm.weight[None], norm.bias[None], last.weight, last.bias)
    network = torch.nn.Sequential(first, norm, torch.nn.GELU(), last)
    expected = torch.stack([torch.cat([network(torch.cat([qi, kj])) for kj in k]) for qi in q])
    torch.testing.assert_close(term.tile(slice(0, queries), slice(0, keys))[0, 0], expected, atol=1e-14, rtol=1e-14)


def test_guidance_by_its_equation():
    t = term_of("guidance")

    def one(b, g, i, j):
        x = t.rows[b, g, i] + t.columns[b, g, j]
        u = (x - x.mean()) / math.sqrt(x.var(correction=0) + 1e-5)
        z = t.scale[g] * u + t.shift[g]
        return (t.weight[g] * z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))).sum() + t.offset[g]

    torch.testing.assert_close(t.tile(*EVERY), pairs(one, 2, 2), atol=1e-13, rtol=1e-13)


def test_the_layer_norm_is_pytorchs_where_row_and_column_cancel():
    t = term_of("guidance")
    term = Guidance(t.rows, -t.rows, t.scale, t.shift, t.weight, t.offset)
    expected = functional.gelu(t.shift) @ t.weight.T
    diagonal = term.tile(slice(0, 9), slice(0, 9)).diagonal(dim1=2, dim2=3)
    torch.testing.assert_close(diagonal, (expected.diagonal() + t.offset)[None, :, None].expand(2, 2, 9))


def test_product_additive_dense():
    p, a, r, d = (term_of(kind) for kind in ("product", "additive", "additive with rows", "dense"))
    torch.testing.assert_close(p.tile(*EVERY), pairs(lambda b, g, i, j: p.rows[b, g, i] @ p.columns[b, g, j], 2, 2))
    torch.testing.assert_close(a.tile(*EVERY), pairs(lambda b, g, i, j: a.columns[b, g, j], 2, 2))
    torch.testing.assert_close(r.tile(*EVERY), pairs(lambda b, g, i, j: r.columns[b, g, j] - r.rows[b, g, i], 2, 2))
    torch.testing.assert_close(d.tile(*EVERY), d.values)


def test_offset_beyond_its_table_takes_the_last_bucket():
    table, bucket_of = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([0, 1, 2])
    positions = torch.tensor([[0, 5]])
    term = Offset(table, bucket_of, positions, positions, origin=1)
    assert term.tile(slice(0, 2), slice(0, 2)).tolist() == [[[[2.0, 3.0], [1.0, 2.0]]]]


@pytest.mark.parametrize("maps", ["one", "kv", "heads"])
@pytest.mark.parametrize("kind", TERMS)
def test_a_tile_is_a_part_of_the_whole(kind, maps):
    term = term_of(kind, maps)
    assert isinstance(term, Term)
    whole = term.tile(*EVERY)
    assert whole.shape[1:] == (term.groups, 9, 11)
    part = term.tile(slice(2, 7), slice(3, 4))
    torch.testing.assert_close(part, whole[:, :, 2:7, 3:4], atol=1e-14, rtol=0)


@pytest.mark.parametrize("kind", TERMS)
def test_tensors_go_out_and_in(kind):
    term = term_of(kind)
    doubled = term.with_tensors([2 * t if t.is_floating_point() else t for t in term.tensors().values()])
    assert type(doubled) is type(term)
    for name, tensor in term.tensors().items():
        assert torch.equal(getattr(doubled, name), 2 * tensor if tensor.is_floating_point() else tensor)
    with pytest.raises((ValueError, TypeError)):
        term.with_tensors([])


def test_a_tile_is_in_single_precision_whatever_the_tensors():
    assert (
        Product(torch.ones(1, 1, 2, 3).bfloat16(), torch.ones(1, 1, 2, 3).bfloat16())
        .tile(slice(0, 2), slice(0, 2))
        .dtype
        == torch.float32
    )
    assert Additive(torch.ones(1, 1, 2).half()).tile(slice(0, 2), slice(0, 2)).dtype == torch.float32
    assert Dense(torch.ones(1, 1, 2, 2).double()).tile(slice(0, 2), slice(0, 2)).dtype == torch.float64


def test_maps_serve_consecutive_heads():
    tile = torch.randn(2, 3, 4, 5)
    assert torch.equal(per_head(tile, 6), tile[:, [0, 0, 1, 1, 2, 2]])
    assert per_head(tile, 3) is tile
    assert per_head(tile[:, :1], 6).stride(1) == 0
