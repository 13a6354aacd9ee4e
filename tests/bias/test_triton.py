"""Triton kernels against the reference in float64: outputs, all gradients, decoding.

In Triton's interpreter on the CPU (TRITON_INTERPRET=1, a process of their own), or on a GPU where there is one.
"""

import os
from dataclasses import replace

import pytest
import torch

from attnflow.bias.attention import attention, choose
from attnflow.bias.call import make_call
from attnflow.bias.impl import reference
from attnflow.bias.terms import Additive, Dense, Guidance, Product
from attnflow.testing import tolerance
from tests.bias.cases import Case, cast, check_against_float64, outcome, plain, poisoned

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU, or TRITON_INTERPRET=1 (`make kernels`)"
    ),
    pytest.mark.filterwarnings("ignore:.*CUBLAS_WORKSPACE_CONFIG"),  # `poisoned` asks for determinism
]
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
SMALL = Case(batch=2, num_heads=2, num_kv_heads=1, queries=37, keys=37, hidden=8, device=DEVICE)
ALL = (("guidance", "one"), ("product", "heads"), ("offset", "kv"), ("dense", "one"), ("additive", "one"))


def check(**changes):
    return check_against_float64(replace(SMALL, **changes), "triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["guidance", "product", "additive with rows", "offset", "dense"])
def test_every_term_in_every_precision(kind, dtype):
    check(terms=((kind, "one"),), dtype=dtype, batch=1, mask="holes")


@pytest.mark.parametrize("mask", ["everything", "causal", "window", "document", "padding", "holes", "heads"])
def test_every_mask(mask):
    check(mask=mask, terms=(("guidance", "one"), ("additive", "one")), hidden=4)


@pytest.mark.parametrize("maps", ["one", "kv", "heads"])
@pytest.mark.parametrize("ratio", [1, 3, 4, 8])
def test_grouped_queries(ratio, maps):
    few = 2 if ratio < 4 else 1
    terms = (("guidance", maps), ("additive", "kv"))
    check(terms=terms, num_heads=few * ratio, num_kv_heads=few, batch=1, queries=17, keys=17, hidden=3)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_widths_of_heads(head_dim):
    dtype = torch.bfloat16 if head_dim > 128 else torch.float32
    check(head_dim=head_dim, dtype=dtype, terms=(("product", "one"),), batch=1, queries=9, keys=9)


def test_values_of_another_width():
    check(head_dim=24, value_dim=40, batch=1, queries=9, keys=9, hidden=4)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 63), (63, 63), (127, 127), (65, 130), (130, 65)])
def test_odd_lengths(queries, keys):
    mask = "holes" if queries > keys else "causal"
    check(queries=queries, keys=keys, batch=1, num_heads=1, num_kv_heads=1, hidden=4, mask=mask)


def test_several_terms_in_one_pass():
    check(terms=(*ALL, ("product", "one"), ("user", "one"), ("offset", "one")), dtype=torch.bfloat16)


def test_softcap_and_sinks():
    check(terms=(("guidance", "one"), ("additive with rows", "heads")), softcap=2.0, sinks=True, mask="holes", seed=1)


def test_streams_of_blocks():
    from attnflow import masks

    case = replace(SMALL, batch=1, queries=64, keys=64, hidden=4)
    call = case.build()
    mask = masks.block_two_stream(num_blocks=5, block=8)
    check_against_float64(
        make_call(call.query, call.key, call.value, call.terms, mask, None, None, None, 0.0), "triton"
    )


def test_a_relation_with_nothing_in_it():
    call = replace(SMALL, batch=1, queries=5, keys=5).build()
    nothing = torch.zeros(5, 5, dtype=torch.bool, device=DEVICE)
    found = check_against_float64(
        make_call(call.query, call.key, call.value, call.terms, nothing, None, None, None, 0.0), "triton"
    )
    assert all(not tensor.any() for tensor in found.found.values())


def test_a_long_table_by_distance():
    """ALiBi in both directions has more buckets than a tile looks through one by one."""
    call = replace(SMALL, batch=2, queries=9, keys=9, terms=(("offset", "heads"),)).build()
    term = call.terms[0]
    table = torch.randn(2, 1000, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    bucket = torch.arange(-9, 10, device=DEVICE) + 500
    call = replace(call, terms=(replace(term, table=table, bucket_of=bucket, origin=9),))
    check_against_float64(call, "triton")


def test_bit_identical_runs():
    call = replace(SMALL, terms=ALL, mask="holes", dtype=torch.bfloat16).build()
    from attnflow.bias.impl import triton

    with poisoned():
        one, two = (outcome(call, lambda c: triton.run(c)[0]) for _ in range(2))
    for name, tensor in one.found.items():
        assert torch.equal(tensor, two.found[name]), name


@pytest.mark.parametrize("limit", ["PAIR_BYTES", "PART_BYTES", "KEPT_BYTES"])
def test_pieces_make_no_difference(limit, monkeypatch):
    """A call that does not fit goes in pieces of batch elements, maps and query blocks."""
    from attnflow.bias.impl import triton
    from attnflow.bias.impl.triton import tuning

    terms = (("guidance", "heads"), ("additive", "kv"), ("product", "one"))
    call = replace(SMALL, num_heads=4, num_kv_heads=2, queries=70, keys=70, terms=terms, hidden=2).build()
    whole = outcome(call, lambda c: triton.run(c)[0])
    monkeypatch.setattr(tuning, limit, 1)
    if limit == "PAIR_BYTES":
        monkeypatch.setattr(tuning, "KEPT_BYTES", 1)
    parts = outcome(call, lambda c: triton.run(c)[0])
    for name, tensor in whole.found.items():
        torch.testing.assert_close(parts.found[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("mask", ["everything", "causal", "padding", "heads"])
@pytest.mark.parametrize("queries", [1, 5])
def test_decoding(queries, mask):
    terms = (*ALL, ("user", "one"))
    case = replace(SMALL, terms=terms, mask=mask, num_heads=3, num_kv_heads=1, hidden=4, queries=queries, keys=100)
    check_decoding(case.build())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_decoding_in_every_precision(dtype):
    check_decoding(replace(SMALL, dtype=dtype, queries=1, keys=63, sinks=True, softcap=4.0, head_dim=80).build())


def check_decoding(call):
    from attnflow.bias.impl import triton

    with torch.no_grad(), poisoned():
        found = triton.run(call)[0]
        true = reference.run(cast(call, torch.float64, False)[0])[0]
        limit = tolerance(plain(call), true)
    error = float((found.double() - true).abs().max())
    assert found.dtype == call.value.dtype
    assert error <= limit, f"error {error:.3g}, tolerance {limit:.3g}"


def test_decoding_with_a_static_cache():
    """Slots that nobody has written are never looked at, whatever they hold."""
    from attnflow.bias.impl import triton

    call = replace(SMALL, queries=1, keys=200, terms=(("guidance", "one"),), mask="everything").build()
    allowed = torch.arange(200, device=DEVICE) < 70
    short = [tensor[:, :, :70] for tensor in (call.key, call.value)]
    term = call.terms[0]
    exact = make_call(call.query, *short, [replace(term, columns=term.columns[:, :, :70])], None, None, None, None, 0.0)
    key, value, columns = (tensor.clone() for tensor in (call.key, call.value, term.columns))
    for tensor in (key, value, columns):
        tensor[:, :, 128:] = torch.nan
    mask = allowed.expand(2, 1, 1, 200)
    cached = make_call(call.query, key, value, [replace(term, columns=columns)], mask, None, None, None, 0.0)
    with torch.no_grad():
        torch.testing.assert_close(triton.run(cached)[0], triton.run(exact)[0])


def test_without_a_gradient_of_the_bias():
    call, leaves = cast(replace(SMALL, terms=ALL).build())
    frozen = replace(call, terms=tuple(t.with_tensors([x.detach() for x in t.tensors().values()]) for t in call.terms))
    from attnflow.bias.impl import triton

    names = ["query", "key", "value"]
    found = torch.autograd.grad(triton.run(frozen)[0].sum(), [leaves[name] for name in names])
    true = torch.autograd.grad(triton.run(call)[0].sum(), [leaves[name] for name in names])
    for one, two in zip(found, true, strict=True):
        assert torch.equal(one, two)


def test_only_a_gradient_of_the_bias():
    call, leaves = cast(replace(SMALL, terms=ALL).build())
    frozen = replace(call, query=call.query.detach(), key=call.key.detach(), value=call.value.detach())
    from attnflow.bias.impl import triton

    names = [name for name in leaves if name.startswith("terms") and not name.startswith("terms[4]")]
    found = torch.autograd.grad(triton.run(frozen)[0].square().sum(), [leaves[n] for n in names], allow_unused=True)
    true = torch.autograd.grad(triton.run(call)[0].square().sum(), [leaves[n] for n in names], allow_unused=True)
    for name, one, two in zip(names, found, true, strict=True):
        torch.testing.assert_close(one, two, msg=name)


def test_layouts_of_a_model():
    """Heads split off a projection are views; vectors of the bias may be expanded over maps."""
    call = replace(SMALL, num_heads=4, num_kv_heads=2, terms=(("guidance", "one"), ("product", "one"))).build()

    def view(tensor):
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)

    guidance, product = call.terms
    terms = [
        Guidance(*(t.mT.contiguous().mT if t.ndim == 4 else t for t in guidance.tensors().values())),
        Product(product.rows.expand(-1, 4, -1, -1), product.columns.expand(-1, 4, -1, -1)),
        Additive(torch.zeros(1, 1, 37, device=DEVICE)),
        Dense(torch.zeros(1, 1, 37, 1, device=DEVICE).expand(-1, -1, -1, 37)),
    ]
    viewed = make_call(*map(view, (call.query, call.key, call.value)), terms, call.allow, None, None, None, 0.0)
    from attnflow.bias.impl import triton

    with torch.no_grad():
        torch.testing.assert_close(triton.run(viewed)[0], triton.run(call)[0])


def test_is_asked_for_by_name():
    call = SMALL.build()
    assert choose(call, "triton") == "triton"
    found, weights = attention(call.query, call.key, call.value, call.terms, call.allow, backend="triton")
    assert weights is None
    assert found.shape == call.query.shape


def test_refuses_what_it_cannot_compute():
    from attnflow.bias.impl import triton

    call = SMALL.build()
    assert triton.refuses(call) is None
    assert "dropout is 0.5" in triton.refuses(replace(call, dropout=0.5))
    assert "float64" in triton.refuses(cast(call, torch.float64, False)[0])
    assert "got 2" in triton.refuses(replace(call, terms=call.terms * 2))
    assert "float32 are at most 128 wide" in triton.refuses(replace(SMALL, head_dim=129).build())
    assert "at most 256 wide" in triton.refuses(replace(SMALL, head_dim=257, dtype=torch.float16).build())
    assert "hidden_dim is at most 256" in triton.refuses(replace(SMALL, hidden=300).build())
    assert "nothing to launch" in triton.refuses(replace(call, query=call.query[:, :, :0]))
