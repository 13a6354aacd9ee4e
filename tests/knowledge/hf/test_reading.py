"""Entries that are named, and read instead of what readers would ask for: what the formula says, batches, edits."""

import math

import pytest
import torch

import attnflow as af
from tests.knowledge.hf.readers import DIM, opened, store_of
from tests.models import outputs, tiny, tokens


def written_out(reader, asked, entries):
    """The formula with loops: each row's own entry against none, and with all the weight at the last token."""
    attention = reader.attention
    result = torch.zeros_like(asked)
    for row, entry in enumerate(entries):
        for token in range(asked.shape[1]):
            for head in range(attention.num_heads):
                score = (asked[row, token] @ attention.query[head]) @ (entry @ attention.key[0, head])
                exponent = (score / math.sqrt(attention.key_dim) + attention.constant[0, head]).exp()
                weight = 1.0 if token == asked.shape[1] - 1 else exponent / (1 + exponent)
                result[row, token] += weight * (entry @ attention.value[head])
    return reader.gate * math.sqrt(asked.shape[-1]) * result


@pytest.mark.parametrize("heads", [1, 2])
def test_values_and_gradients_are_those_of_the_formula(heads):
    model, store, ids = tiny("Llama"), store_of(6), tokens(2, 5)
    handle = opened(af.knowledge.attach(model, store, layers=[0], key_dim=3, num_heads=heads))
    reader = handle.readers[0].double()
    seen = []
    reader.pooled_map.register_forward_hook(lambda *call: seen.append(call[2]))
    own = model.model.layers[0]
    hooks = [
        own.register_forward_hook(lambda *call: seen.append(call[2]), prepend=True),
        own.register_forward_hook(lambda *call: seen.append(call[2])),
    ]
    with handle.reading([4, 1]):
        model(input_ids=ids)
    before, pooled, after = (one[0] if isinstance(one, tuple) else one for one in seen)
    asked = reader.own * before / (before.square().mean(-1, keepdim=True) + 2**-52).sqrt() + pooled
    expected = written_out(reader, asked, store.vectors(torch.tensor([4, 1])).double())
    torch.testing.assert_close(after - before, expected, rtol=1e-9, atol=1e-10)
    direction, parameters = torch.randn_like(expected), list(reader.parameters())
    ours = torch.autograd.grad((after * direction).sum(), parameters, retain_graph=True)
    theirs = torch.autograd.grad((expected * direction).sum(), parameters)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Gemma2", "Mixtral"])
def test_rows_read_their_own_entries_and_nothing_of_it_stays(name):
    model, ids = tiny(name, torch.float32), tokens(3, 6)
    with opened(af.knowledge.attach(model, store_of())) as handle:
        own = outputs(model, input_ids=ids)
        with handle.reading([7, 2, 7]):
            together = outputs(model, input_ids=ids)
            with handle.reading([2]):
                inner = outputs(model, input_ids=ids[1:2])
            assert torch.equal(outputs(model, input_ids=ids), together)
        assert torch.equal(outputs(model, input_ids=ids), own)
        assert not torch.allclose(together[:, -1], own[:, -1], atol=1e-3)
        torch.testing.assert_close(inner, together[1:2], rtol=1e-4, atol=1e-5)


def test_an_edit_of_the_entry_acts_on_the_next_token_and_one_of_another_does_not():
    model, ids, store = tiny("Llama", torch.float32), tokens(1, 6), store_of()
    with opened(af.knowledge.attach(model, store)) as handle, handle.reading([3]):
        before = outputs(model, input_ids=ids)
        handle.upsert(ids=[4], embeddings=-torch.ones(1, DIM))
        assert torch.equal(outputs(model, input_ids=ids), before)
        handle.upsert(ids=[3], embeddings=-torch.ones(1, DIM))
        assert not torch.allclose(outputs(model, input_ids=ids), before, atol=1e-4)
        store.delete([3])
        with pytest.raises(KeyError):
            outputs(model, input_ids=ids)


def test_padding_on_the_left_and_beams_change_nothing():
    model, ids = tiny("Llama", torch.float32), tokens(2, 6)
    mask = torch.tensor([[1] * 6, [0] * 2 + [1] * 4])
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": 3, "pad_token_id": 0}
    with opened(af.knowledge.attach(model, store_of())) as handle:
        with handle.reading([5, 9]):
            both = model.generate(input_ids=ids, attention_mask=mask, **options)
        for row, (entry, start) in enumerate([(5, 0), (9, 2)]):
            with handle.reading([entry]):
                alone = model.generate(input_ids=ids[row : row + 1, start:], **options)
            assert both[row, start:].tolist() == alone[0].tolist()


def test_what_cannot_be_read_is_refused():
    model, ids = tiny("Llama", torch.float32), tokens(3, 6)
    handle = opened(af.knowledge.attach(model, store_of()))
    for wrong in ([], [3, 99], [-1]):
        with (
            pytest.raises(ValueError, match="ids must name entries of memory, one for each row"),
            handle.reading(wrong),
        ):
            pass
    with handle.reading([1, 2]), pytest.raises(ValueError, match="2 entries to read for 3 rows: give one for each row"):
        model(input_ids=ids)
    handle.remove()
    with pytest.raises(ValueError, match="no reader was added"), handle.reading([1]):
        pass
