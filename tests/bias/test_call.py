"""Calls are checked once, with messages for their authors; what says which pairs exist becomes their relation."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from attnflow import masks
from attnflow.bias import attention
from attnflow.bias.call import Allow, make_call
from attnflow.bias.terms import Dense
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


def test_the_advice_about_masks_of_numbers_works():
    query, key, value = tensors(queries=5, keys=5)
    ones = torch.ones(5, 5).tril()
    minus = torch.zeros(5, 5).masked_fill(ones == 0, -torch.inf)
    expected = attention(query, key, value, [], masks.causal(5))[0]
    for mask in (ones.bool(), minus == 0):
        assert torch.equal(attention(query, key, value, [], mask)[0], expected)
    assert attention(query, key, value, [Dense(ones[None, None])], masks.causal(7)[2:, :5])[0].shape == expected.shape
