"""Terms against brute force, one pair at a time, straight from their definitions."""

import pytest
import torch

from attnflow.bias.terms import Guidance, Offset, Term
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
