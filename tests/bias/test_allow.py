"""The relation of an attention call, from anything that says which pairs exist."""

import pytest
import torch

from attnflow import masks
from attnflow.bias.allow import Allow

CPU = torch.device("cpu")


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
        assert not allow.everything
        assert torch.equal(allow.rows(block)[0, 0], table[block])
        assert torch.equal(allow.dense()[0, 0], table)
        assert torch.equal(allow.rows(block)[0, 0], table[block])  # also after all of them have been made


def test_none_allows_everything_without_a_table():
    allow = Allow.of(None, 3, 5, CPU)
    assert allow.everything
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
