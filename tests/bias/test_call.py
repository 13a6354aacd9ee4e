"""Calls are checked once, with messages for their authors; what says which pairs exist becomes their relation."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from attnflow import masks
from attnflow.bias import attention
from attnflow.bias.call import Allow, make_call
from attnflow.bias.terms import Additive, Dense
from tests.bias.cases import Case, cast

CPU = torch.device("cpu")


def tensors(heads=4, kv_heads=2, queries=5, keys=7, batch=2, dim=8):
    return torch.randn(batch, heads, queries, dim), *(torch.randn(batch, kv_heads, keys, dim) for _ in range(2))


def call_of(query, key, value, terms=(), allow=None, dropout=0.0):
    return make_call(query, key, value, terms, allow, None, None, None, dropout)


def test_what_a_call_says_of_itself():
    call = call_of(*tensors())
    assert (call.num_heads, call.heads_per_kv, call.scale) == (4, 2, 8**-0.5)
    assert call.allow.rows(slice(0, 5)) is None
    with pytest.raises(FrozenInstanceError):
        call.scale = 1.0


def test_whether_a_gradient_may_be_asked_for():
    plain = Case().build()
    learned, leaves = cast(plain)
    assert not plain.needs_grad()
    assert learned.needs_grad()
    only_a_term = cast(plain, requires_grad=False)[0]
    only_a_term.terms[0].weight.requires_grad_()
    assert only_a_term.needs_grad()
    with torch.no_grad():
        assert not learned.needs_grad()
    sinks = cast(Case(sinks=True).build(), requires_grad=False)[0]
    assert not sinks.needs_grad()
    sinks.sinks.requires_grad_()
    assert sinks.needs_grad()
    assert set(leaves) >= {"query", "key", "value", "terms[0].rows", "terms[0].offset"}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"heads": 3}, "query heads a multiple of theirs"),
        ({"kv_heads": 3}, "query heads a multiple of theirs"),
    ],
)
def test_heads_that_do_not_fit(shapes, message):
    with pytest.raises(ValueError, match=message):
        call_of(*tensors(**shapes))


def test_tensors_that_do_not_fit():
    query, key, value = tensors()
    for bad in (
        (query[0], key, value),
        (query[:1], key, value),
        (query, key[:, :, 1:], value),
        (query[..., 1:], key, value),
    ):
        with pytest.raises(ValueError, match=r"query.*key.*value"):
            call_of(*bad)


def test_terms_that_do_not_fit():
    query, key, value = tensors()
    with pytest.raises(ValueError, match="Additive has 3 maps, which 4 heads cannot share evenly"):
        call_of(query, key, value, [Additive(torch.zeros(2, 3, 7))])
    with pytest.raises(ValueError, match="must be on one device, got cpu, meta"):
        call_of(query, key, value, [Additive(torch.zeros(2, 1, 7, device="meta"))])
    with pytest.raises(ValueError, match="sinks and all terms must be on one device, got cpu, meta"):
        make_call(query, key, value, (), None, None, None, torch.zeros(4, device="meta"), 0.0)


@pytest.mark.parametrize("dropout", [-0.1, 1.0, float("nan")])
def test_dropout_out_of_range(dropout):
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\)"):
        call_of(*tensors(), dropout=dropout)


def rows_of(table):
    return lambda block: table[None, None, block]


@pytest.mark.parametrize("n", [1, 5, 700])
@pytest.mark.parametrize("make", [masks.causal, masks.tree], ids=["intervals", "relabelled"])
def test_every_source_gives_the_same_rows(make, n):
    mask = make(n if make is masks.causal else [-1, *(i // 2 for i in range(n - 1))])
    table = mask.dense()
    block = slice(n // 3, n // 3 + n // 2)
    sources = [
        Allow.of(mask, n, n, CPU),
        Allow.of(table, n, n, CPU),
        Allow.of(table[None, None], n, n, CPU),
        Allow(rows_of(table), n, n),
    ]
    for allow in sources:
        assert allow.rows(slice(0, 1)) is not None
        assert torch.equal(allow.rows(block)[0, 0], table[block])
        assert torch.equal(allow.dense()[0, 0], table)
        assert torch.equal(allow.rows(block)[0, 0], table[block])  # also after all of them have been made


def test_none_allows_everything_without_a_table():
    allow = Allow.of(None, 3, 5, CPU)
    assert allow.rows(slice(0, 2)) is None
    assert allow.dense() is None


def test_batches_and_heads_are_kept():
    table = torch.rand(2, 4, 3, 5) < 0.5
    allow = Allow.of(table, 3, 5, CPU)
    assert allow.batch == 2
    assert torch.equal(allow.rows(slice(1, 3)), table[:, :, 1:3])
    assert Allow.of(allow, 3, 5, CPU) is allow


def test_forms_are_made_once():
    allow, made = Allow.of(masks.causal(4), 4, 4, CPU), []
    for _ in range(3):
        assert allow.derived("blocks", lambda: made.append(1) or "found") == "found"
    assert allow.derived(("bits", 32), lambda: "other") == "other"
    assert made == [1]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("causal", TypeError, "the mask must be a Mask, a boolean tensor or None, got str"),
        (torch.zeros(3, 5), TypeError, "a mask is boolean, True where a query attends, got torch.float32"),
        (torch.ones(2, 3, 5, dtype=torch.bool), ValueError, r"got \(2, 3, 5\)"),
        (torch.ones(5, 3, dtype=torch.bool), ValueError, "the mask has 5 queries and 3 keys, the call 3 and 5"),
        (masks.causal(5), ValueError, "slice it to the rows and columns of this call"),
    ],
)
def test_bad_masks(given, error, message):
    with pytest.raises(error, match=message):
        Allow.of(given, 3, 5, CPU)


def test_the_advice_about_masks_of_numbers_works():
    query, key, value = tensors(queries=5, keys=5)
    ones = torch.ones(5, 5).tril()
    minus = torch.zeros(5, 5).masked_fill(ones == 0, -torch.inf)
    expected = attention(query, key, value, [], masks.causal(5))[0]
    for mask in (ones.bool(), minus == 0):
        assert torch.equal(attention(query, key, value, [], mask)[0], expected)
    assert attention(query, key, value, [Dense(ones[None, None])], masks.causal(7)[2:, :5])[0].shape == expected.shape
