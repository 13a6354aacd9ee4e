"""What FlexAttention refuses, and what it is given: score function and block mask, without compiling them."""

from dataclasses import replace

import pytest
import torch

from attnflow.bias import flex
from attnflow.bias.attention import attention
from attnflow.bias.terms import per_head
from tests.bias.cases import MASKS, TERMS, Case, cast


def test_refuses_what_it_cannot_compute():
    call, _ = cast(Case().build(), requires_grad=True)
    assert "no backward pass on the CPU" in (flex.refuses(call) or "")
    with torch.no_grad():
        assert flex.refuses(call) is None
    assert "sinks" in (flex.refuses(Case(sinks=True).build()) or "")
    assert "float64" in (flex.refuses(cast(Case().build(), torch.float64, False)[0]) or "")
    with pytest.raises(ValueError, match="backend='flex' cannot compute this call: FlexAttention has no backward"):
        attention(call.query, call.key, call.value, call.terms, backend="flex")


@pytest.mark.parametrize("maps", ["one", "kv", "heads"])
@pytest.mark.parametrize("kind", TERMS)
def test_score_function_is_the_term(kind, maps):
    check_score(Case(terms=((kind, maps),), queries=5, keys=7, softcap=3.0).build())


def test_score_function_of_rows_that_all_batch_elements_share():
    call = Case(terms=(("additive with rows", "kv"),), queries=5, keys=7, softcap=3.0).build()
    check_score(replace(call, terms=(replace(call.terms[0], rows=call.terms[0].rows[:1]),)))


def check_score(call):
    tile = per_head(call.terms[0].tile(slice(0, 5), slice(0, 7)), call.num_heads).expand(2, -1, -1, -1)
    modify, score = flex.score_mod(call), torch.tensor(1.5)
    for b, h, q, k in [(0, 0, 0, 0), (1, 1, 4, 6), (0, 2, 3, 1), (1, 3, 1, 5)]:
        found = modify(score, *map(torch.tensor, (b, h, q, k)))
        torch.testing.assert_close(found, 3.0 * torch.tanh(score / 3.0) + tile[b, h, q, k])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (37, 300), (260, 260)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_block_mask_is_the_relation(mask, queries, keys):
    call = Case(terms=(), mask=mask, queries=queries, keys=keys, head_dim=4).build()
    allowed, blocks = call.allow.dense(), flex.blocks_of(call.allow, torch.device("cpu"))
    if allowed is None:
        assert blocks is None
        return
    assert flex.blocks_of(call.allow, torch.device("cpu")) is blocks
    grid = torch.meshgrid(*map(torch.arange, allowed.shape), indexing="ij")
    assert torch.equal(blocks.mask_mod(*grid), allowed)
    padded = torch.nn.functional.pad(allowed, (0, -keys % 128, 0, -queries % 128))
    count = padded.unflatten(3, (-1, 128)).unflatten(2, (-1, 128)).sum(dim=(3, 5))
    assert torch.equal(blocks.to_dense().bool(), count > 0)
