"""The reference and the tiles against float64: values and gradients; of the tiles memory, dropout and training, too."""

import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from attnflow import masks
from attnflow.bias import attention, tiled
from attnflow.bias.term_tiles import GuidanceTiles
from attnflow.bias.tiled import blocks_of
from tests.bias.cases import MASKS, TERMS, Case, Guidance, cast, check_against_float64, compute, outcome
from tests.memory import Largest

TWO = (("guidance", "one"), ("additive", "kv"))


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(backend, dtype) for backend in ("reference", "tiled") for dtype in (torch.float32, torch.bfloat16)]
    + [("reference", torch.float16), ("tiled", torch.float64)],
    ids=str,
)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", TERMS)
def test_values_and_gradients(kind, mask, backend, dtype):
    check_against_float64(Case(terms=((kind, "kv"),), mask=mask, dtype=dtype), backend)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("maps", ["one", "kv", "heads"])
@pytest.mark.parametrize("ratio", [1, 3, 4, 8])
def test_grouped_queries(ratio, maps, backend):
    terms = (("guidance", maps), ("offset", maps), ("product", maps), ("dense", maps))
    check_against_float64(Case(terms=terms, num_heads=2 * ratio, num_kv_heads=2, mask="holes"), backend)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_head_dims(head_dim):
    check_against_float64(Case(head_dim=head_dim, value_dim=head_dim // 2, dtype=torch.float16), "tiled")


@pytest.mark.parametrize("mask", ["everything", "causal", "holes"])
@pytest.mark.parametrize("queries", [1, 63, 127, 200])
def test_sizes_that_no_tile_divides(queries, mask):
    """Several blocks of queries (128 at most), several strips (16), and queries that are only the last tokens."""
    case = Case(batch=1, num_heads=2, num_kv_heads=1, queries=queries, keys=200, hidden=7, mask=mask, head_dim=8)
    check_against_float64(case, "tiled")


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (3, 0), (0, 0)])
@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_nothing_to_attend_from_or_to(queries, keys, backend):
    call, leaves = cast(Case(TWO, mask="everything", queries=queries, keys=keys).build())
    output = compute(call, backend)[0]
    assert output.shape == (2, 4, queries, 32)
    assert (output == 0).all()
    gradients = torch.autograd.grad(output.sum(), list(leaves.values()))
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", TERMS)
def test_on_a_gpu(kind, mask, dtype):
    case = Case(terms=((kind, "kv"),), mask=mask, dtype=dtype, device="cuda", queries=150, keys=150)
    check_against_float64(case, "tiled")
    one, other = (outcome(case.build(), lambda c: tiled.run(c)).found for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_several_subtiles_along_the_keys(monkeypatch):
    monkeypatch.setitem(sys.modules[GuidanceTiles.__module__]._SUBTILE, "cpu", 16 * 16 * 10)  # 10 keys each
    for mask in ("everything", "causal", "document", "holes"):
        check_against_float64(Case(mask=mask, queries=70, keys=80), "tiled")


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_soft_caps_and_sinks(softcap, sinks):
    for mask in ("causal", "holes", "heads"):
        check_against_float64(Case(TWO, mask=mask, softcap=softcap, sinks=sinks, scale=0.7), "tiled")


def test_a_term_may_serve_all_batch_elements():
    call = Case(terms=tuple((kind, "one") for kind in TERMS), batch=3, mask="holes", dtype=torch.float64).build()
    terms = tuple(t.with_tensors([x if x.shape[0] != 3 else x[:1] for x in t.tensors().values()]) for t in call.terms)
    assert all(term.tile(slice(0, 2), slice(0, 2)).shape[0] == 1 for term in terms)
    check_against_float64(type(call)(**{**vars(call), "terms": terms}), "tiled")


def test_where_row_and_column_cancel_the_variance_stays_sane():
    """The variance is a difference of squares here: its rounding must not outgrow the layer norm's eps."""
    call = Case(queries=37, keys=37, mask="everything").build()
    t = call.terms[0]
    term = Guidance(t.rows, -t.rows * (1 + 1e-3), t.scale, t.shift, t.weight, t.offset)
    exact = Guidance(*(x.double() for x in term.tensors().values())).tile(slice(0, 37), slice(0, 37))
    found = GuidanceTiles(term, False).tile(slice(0, 37), slice(0, 37), None)
    assert (found - exact).abs().max() < 0.05 * exact.abs().max()
    assert (found - exact).abs().median() < 1e-6


def test_blocks_hold_every_allowed_pair_and_few_others():
    n = 500
    for mask in (masks.causal(n), masks.sliding_window(n, 20), masks.document([100, 400])):
        call = Case(queries=n, keys=n).build()
        call = type(call)(**{**vars(call), "allow": call.allow.of(mask, n, n, torch.device("cpu"))})
        found = torch.zeros(n, n, dtype=torch.bool)
        area = 0
        for block in blocks_of(call):
            part = found[block.rows, block.columns]
            part |= True if block.allowed is None else block.allowed[0, 0]
            area += part.numel()
        assert torch.equal(found, mask.dense())
        assert area < mask.nnz + 2 * 128 * n


def test_gradients_that_nobody_asks_for_are_not_computed(monkeypatch):
    call, leaves = cast(Case().build())
    monkeypatch.setattr(GuidanceTiles, "gather", lambda *_: pytest.fail("the terms need no gradient"))
    plain = type(call)(**{**vars(call), "terms": cast(call, requires_grad=False)[0].terms})
    torch.autograd.grad(tiled.run(plain).sum(), [leaves["query"], leaves["key"], leaves["value"]])


def test_second_derivatives_are_refused():
    call, leaves = cast(Case().build())
    (first,) = torch.autograd.grad(tiled.run(call).square().sum(), leaves["query"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_inputs_are_saved_where_checkpointing_can_drop_them():
    packed = []
    call, _ = cast(Case().build())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        tiled.run(call)
    assert {t.shape for t in packed} == {*(t.shape for t in call.tensors()), (2, 1, 37, 37)}  # and the guidance map


@pytest.mark.parametrize("kept", [0, 2 * 128 * 128, 1 << 24])
def test_a_guidance_map_is_kept_while_it_is_small_and_changes_no_bit(kept, monkeypatch):
    call, packed = cast(Case((*TWO, ("guidance", "kv")), queries=300, keys=300, mask="causal").build())[0], []
    expected = outcome(call, tiled.run).found
    monkeypatch.setattr(tiled, "_KEPT", kept)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        found = outcome(call, tiled.run).found
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    kept_here = packed[len(call.tensors()) :]
    assert sum(t.numel() for t in kept_here) <= kept
    assert len(kept_here) == {0: 0, 2 * 128 * 128: 1}.get(kept, 6)  # maps of both terms in three blocks


def test_a_relation_is_read_once_for_its_blocks(monkeypatch):
    call = Case(queries=300, keys=300, mask="holes").build()
    first = list(blocks_of(call))
    monkeypatch.setattr(tiled, "_shape", lambda *_: pytest.fail("a device would wait again"))
    for one, other in zip(first, blocks_of(call), strict=True):
        assert (one.rows, one.columns, one.empty) == (other.rows, other.columns, other.empty)
        assert torch.equal(one.allowed, other.allowed)


@pytest.mark.parametrize("mask", ["causal", "holes"])
def test_products_of_narrow_numbers(mask, monkeypatch):
    """As on a GPU: queries, keys and values stay in 16 bits, weights and score gradients enter products in 16 bits."""
    types = set()

    def bmm(one, other, out_dtype=None):
        types.add((one.dtype, other.dtype, out_dtype))
        return torch.bmm(one.float(), other.float())

    monkeypatch.setattr(tiled, "_NARROW", ("cpu",))
    monkeypatch.setattr(tiled, "_bmm", bmm)
    check_against_float64(Case(TWO, mask, dtype=torch.bfloat16), "tiled")
    assert types == {(torch.bfloat16, torch.bfloat16, torch.float32)}


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients_with_dropout(reentrant):
    call, leaves = cast(Case(queries=100, keys=100).build())

    def layer(query):
        return attention(query, call.key, call.value, call.terms, masks.causal(100), dropout=0.3, backend="tiled")[0]

    found = []
    for run in (layer, lambda query: checkpoint(layer, query, use_reentrant=reentrant)):
        torch.manual_seed(3)
        run(leaves["query"]).square().sum().backward()
        found.append(leaves["query"].grad.clone())
        leaves["query"].grad = None
    assert torch.equal(*found)


def test_dropout_drops_the_share_it_should_and_keeps_the_mean():
    queries, keys = 40, 500
    query = torch.zeros(1, 1, queries, 4)
    key, value = torch.zeros(1, 1, keys, 4), torch.eye(keys)[None, None]  # the output is the weights after dropout
    weights = attention(query, key, value, [], dropout=0.25, backend="tiled")[0] * keys
    dropped = (weights == 0).float().mean().item()
    assert dropped == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / weights.numel()) ** 0.5)
    torch.testing.assert_close(weights[weights > 0], torch.full_like(weights[weights > 0], 4 / 3))
    other = attention(query, key, value, [], dropout=0.25, backend="tiled")[0]
    assert not torch.equal(other * keys, weights)


def test_dropout_is_the_same_forward_and_backward():
    """With the weights that were drawn as constants, the output is linear in the values."""
    call, leaves = cast(Case(TWO, dtype=torch.float64, queries=150, keys=150, batch=1).build())
    dropping = type(call)(**{**vars(call), "dropout": 0.4})

    def loss(query):
        torch.manual_seed(5)
        return tiled.run(type(call)(**{**vars(dropping), "query": query})).square().sum()

    (gradient,) = torch.autograd.grad(loss(leaves["query"]), leaves["query"])
    direction, step = torch.randn_like(gradient), 1e-6
    with torch.no_grad():
        rise = loss(leaves["query"] + step * direction) - loss(leaves["query"] - step * direction)
    assert (rise / (2 * step)).item() == pytest.approx((gradient * direction).sum().item(), rel=1e-6)


def test_no_map_of_all_pairs_is_formed():
    """A training step under a window: forward and backward."""
    n = 4096
    q, k, v = (torch.randn(1, 2, n, 16, requires_grad=True) for _ in range(3))
    a, c = (torch.randn(1, 1, n, 8, requires_grad=True) for _ in range(2))
    term = Guidance(a, c, torch.ones(1, 8), torch.zeros(1, 8), torch.ones(1, 8, requires_grad=True), torch.zeros(1))
    with Largest() as largest:
        attention(q, k, v, [term], masks.sliding_window(n, 256), backend="tiled")[0].sum().backward()
    assert largest.numel < n * n / 8


def test_the_same_numbers_every_time_and_under_autocast():
    case = Case((*TWO, ("offset", "kv")), queries=150, keys=150, mask="holes")
    expected, again = (outcome(case.build(), tiled.run).found for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        lowered = outcome(case.build(), tiled.run).found
    for found in (again, lowered):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
