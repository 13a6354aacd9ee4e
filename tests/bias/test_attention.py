"""Terms pair by pair; `attention`: the choice of an implementation, and what holds whatever computes it."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from attnflow import masks
from attnflow.bias import attention, dense
from attnflow.bias.attention import choose
from attnflow.bias.call import Allow
from attnflow.bias.terms import diagonal_sums
from tests.bias.cases import TERMS, Additive, Case, Dense, Guidance, Offset, Term, make_call, outcome

BACKENDS = ["reference", "tiled"]


def run(call, backend):
    """The call through the public function."""
    options = {name: getattr(call, name) for name in ("scale", "softcap", "sinks")}
    return attention(call.query, call.key, call.value, call.terms, call.allow, backend=backend, **options)[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", ["everything", "causal", "window"])
def test_without_terms_it_is_scaled_dot_product_attention(mask, backend):
    call = Case(terms=(), mask=mask).build()
    expected = scaled_dot_product_attention(
        call.query, call.key, call.value, attn_mask=call.allow.dense(), enable_gqa=True
    )
    torch.testing.assert_close(run(call, backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", TERMS)
def test_a_bias_is_an_additive_mask(kind, backend):
    call = Case(terms=((kind, "heads"),), mask="everything").build()
    bias = call.terms[0].tile(slice(0, 37), slice(0, 37))
    expected = scaled_dot_product_attention(call.query, call.key, call.value, attn_mask=bias, enable_gqa=True)
    torch.testing.assert_close(run(call, backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sinks", [False, True])
def test_what_softmax_cannot_see_gets_no_gradient_unless_a_sink_sees_it(backend, sinks):
    terms = (("guidance", "one"), ("additive with rows", "one"))
    call = Case(terms=terms, sinks=sinks, mask="holes", dtype=torch.float64).build()
    found = outcome(call, lambda c: run(c, backend)).found
    for name in ("terms[0].offset", "terms[1].rows"):
        assert (found[name].abs().max() > 1e-3) == sinks
        assert found[name].abs().max() < 1e-11 or sinks


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", ["padding", "holes", "heads"])
def test_a_query_that_may_attend_to_nothing_gives_zero_and_gets_no_gradient(mask, backend):
    call = Case(terms=(("guidance", "kv"),), mask=mask, sinks=True).build()
    found = outcome(call, lambda c: run(c, backend)).found
    empty = (~call.allow.dense().any(dim=-1)).expand(2, 4, 37)
    assert empty.any()
    assert (found["output"][empty] == 0).all()
    assert (found["query"][empty] == 0).all()
    assert all(tensor.isfinite().all() for tensor in found.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mask_wins_over_any_bias(backend):
    call = Case(terms=(), mask="causal").build()
    future = torch.zeros(1, 1, 37, 37).masked_fill(~call.allow.dense(), 1e30)
    expected = run(call, backend)
    found = attention(call.query, call.key, call.value, [Dense(future)], masks.causal(37), backend=backend)[0]
    torch.testing.assert_close(found, expected)


def test_weights_come_from_the_reference():
    call = Case(mask="holes").build()
    arguments = call.query, call.key, call.value, call.terms, call.allow
    output, weights = attention(*arguments, need_weights=True)
    value = call.value.repeat_interleave(2, dim=1)
    torch.testing.assert_close(weights @ value, output)
    assert attention(*arguments)[1] is None


def test_auto_chooses_tiles_where_there_are_many_pairs_and_says_so_once(caplog):
    few, many = Case().build(), Case(queries=200, keys=200).build()
    with caplog.at_level("INFO", logger="attnflow.bias"):
        assert choose(few, "auto") == "reference"
        assert choose(many, "auto") == "tiled"
        assert choose(many, "auto") == "tiled"
    assert sum("'tiled'" in record.getMessage() for record in caplog.records) <= 1
    assert choose(many, "auto", need_weights=True) == "reference"


@pytest.mark.parametrize("backend", BACKENDS)
def test_soft_cap_and_sinks_by_hand(backend):
    query, key = torch.tensor([[[[3.0]]]]), torch.tensor([[[[1.0], [2.0]]]])
    bias = Additive(torch.tensor([[[0.5, -0.5]]]))
    sinks = torch.tensor([0.25])
    found = attention(query, key, key, [bias], scale=1.0, softcap=2.0, sinks=sinks, backend=backend)[0]
    one, two, sink = (math.exp(s) for s in (2 * math.tanh(1.5) + 0.5, 2 * math.tanh(3.0) - 0.5, 0.25))
    assert found.item() == pytest.approx((one + 2 * two) / (one + two + sink), rel=1e-6)


def on_cuda(dtype=torch.bfloat16, head_dim=32, needs_grad=False):
    """A call whose tensors say that they are on a GPU, and hold nothing."""
    with FakeTensorMode():
        query, key = (torch.empty(1, heads, 256, head_dim, dtype=dtype, device="cuda") for heads in (4, 2))
        bias = Additive(torch.empty(1, 1, 256, device="cuda"))
        query.requires_grad_(needs_grad)
        return make_call(query, key, key, [bias], None, None, None, None, 0.0)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_auto_on_cuda_never_compiles(needs_grad):
    call = on_cuda(needs_grad=needs_grad)
    assert choose(call, "auto") == "fused"
    assert choose(replace(call, dropout=0.1), "auto") == choose(replace(call, softcap=2.0), "auto") == "tiled"
    assert choose(on_cuda(torch.float64), "auto") == "tiled"
    assert choose(call, "flex") == "flex"
    assert choose(call, "auto", need_weights=True) == "reference"


def test_auto_on_cuda_takes_tiles_without_triton_or_memory_for_a_map(monkeypatch):
    call = on_cuda()
    with FakeTensorMode():
        shapes = (1, 1, 256, 8), (1, 1, 256, 8), (1, 8), (1, 8), (1, 8), (1,)
        guidance = replace(call, terms=(Guidance(*(torch.empty(shape, device="cuda") for shape in shapes)),))
    for found, name in ((True, "dense"), (False, "tiled")):
        monkeypatch.setattr(dense, "_TRITON", found)
        assert choose(guidance, "auto") == name
        assert choose(call, "auto") == "fused"
        assert choose(call, "dense") == "dense"
    monkeypatch.setattr(dense, "_TRITON", True)
    monkeypatch.setattr(dense, "_MOST", 256 * 256 - 1)
    assert choose(guidance, "auto") == "tiled"
    assert choose(guidance, "dense") == "dense"


@pytest.mark.parametrize("n", [1, 5, 700])
@pytest.mark.parametrize("make", [masks.causal, masks.tree], ids=["intervals", "relabelled"])
def test_every_source_gives_the_same_rows(make, n):
    mask = make(n if make is masks.causal else [-1, *(i // 2 for i in range(n - 1))])
    table = mask.dense()
    block = slice(n // 3, n // 3 + n // 2)
    sources = [
        Allow.of(mask, n, n, torch.device("cpu")),
        Allow.of(table, n, n, torch.device("cpu")),
        Allow.of(table[None, None], n, n, torch.device("cpu")),
        Allow(lambda rows: table[None, None, rows], n, n),
    ]
    for allow in sources:
        assert allow.rows(slice(0, 1)) is not None
        assert torch.equal(allow.rows(block)[0, 0], table[block])
        assert torch.equal(allow.dense()[0, 0], table)
        assert torch.equal(allow.rows(block)[0, 0], table[block])  # also after all of them have been made


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


@pytest.mark.parametrize("maps", ["one", "heads"])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (torch.arange(40)[None] + 7, torch.arange(47)[None]),
        (torch.arange(40)[None] + 100, torch.arange(47)[None] - 100),  # beyond both ends of the table
        (torch.arange(40)[None].repeat(2, 1), torch.arange(47)[None]),
        (torch.stack([torch.arange(40), torch.arange(40) + 3]), torch.arange(47)[None]),  # batch elements differ
        (torch.stack([torch.arange(40), torch.arange(40) + 3]), torch.stack([torch.arange(47), torch.arange(47) + 3])),
        ((torch.arange(40) - 5).clamp(min=0)[None], torch.arange(47)[None]),  # padding
        (torch.arange(40)[None] % 13, torch.arange(47)[None] % 13),  # documents
        (torch.randint(50, (2, 40)), torch.randint(50, (2, 47))),
        (torch.arange(40)[None] * 2, torch.arange(47)[None] * 2),
        (torch.arange(40).flip(0)[None], torch.arange(47).flip(0)[None]),
    ],
    ids=["chunk", "beyond", "equal", "shifted", "both", "padding", "documents", "random", "twice", "backward"],
)
def test_offset_by_diagonals_is_offset_by_index(rows, columns, maps):
    """Values of a tile, and the table's gradient by tiles and by autograd, against a lookup of every pair."""
    groups = {"one": 1, "heads": 3}[maps]
    table = torch.randn(groups, 9, dtype=torch.float64, requires_grad=True)
    term = Offset(table, torch.randint(9, (31,)), rows, columns, origin=12)
    distance = (columns[:, None] - rows[:, :, None] + 12).clamp(0, 30)
    whole = table[:, term.bucket_of[distance]].movedim(0, 1)
    for block in ((slice(0, 40), slice(0, 47)), (slice(5, 6), slice(0, 47)), (slice(3, 40), slice(11, 12))):
        tile, expected = term.tile(*block), whole[:, :, block[0], block[1]]
        assert torch.equal(tile.expand_as(expected), expected)
        upstream = torch.randn(expected.shape, dtype=torch.float64)
        (true,) = torch.autograd.grad(expected, table, upstream, retain_graph=True)
        (found,) = torch.autograd.grad(tile.expand_as(expected), table, upstream)
        torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-12)
        found = term.to_table(*block, upstream)
        torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-12)
        assert torch.equal(found, term.to_table(*block, upstream))


def test_offset_goes_by_diagonals_where_positions_go_up_by_one():
    positions, table = torch.arange(30)[None], torch.randn(1, 9)
    regular = Offset(table, torch.arange(9), positions + 4, positions.repeat(2, 1), origin=4)
    assert regular.diagonals(slice(2, 4), slice(0, 3)).tolist() == [0, 0, 0, 0]
    near = Offset(table, torch.arange(9), positions, positions, origin=4)
    assert near.diagonals(slice(2, 4), slice(1, 4)).tolist() == [2, 3, 4, 5]
    for rows, columns in (
        (positions % 7, positions),
        (positions, positions[:, :0]),
        (positions.repeat(2, 1).sort(0)[0] * 2, positions),
    ):
        assert Offset(table, torch.arange(9), rows, columns, origin=4).diagonals(slice(0, 2), slice(0, 2)) is None


@given(rows=st.integers(1, 20), columns=st.integers(1, 20), batch=st.integers(0, 3))
def test_diagonal_sums(rows, columns, batch):
    block = torch.randn(batch, rows, columns, dtype=torch.float64)
    found = diagonal_sums(block)
    assert found.shape == (batch, rows + columns - 1)
    for index in range(rows + columns - 1):
        expected = block.diagonal(index - rows + 1, dim1=1, dim2=2).sum(dim=-1)
        torch.testing.assert_close(found[:, index], expected, rtol=1e-12, atol=1e-12)
