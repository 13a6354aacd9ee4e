"""Traces whose leading entries are taken out of the model: in one batch as one by one."""

import pytest
import torch

import attnflow as af
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.knowledge.layered import readers
from attnflow.knowledge.reading.ablation import LocatedEntry, without
from attnflow.knowledge.reading.trace import trace
from tests.knowledge.test_trace import MODULAR, made
from tests.models import tiny, tokens


@pytest.mark.parametrize("name", ["GPT2", "OPT", "Llama", "heads", "best"])
def test_a_batched_ablation_is_one_entry_after_the_other(name):
    """Each leading entry, also of a padded text, by a model of which only that entry is zeroed."""
    model, ids = made(name), tokens(1, 7)
    inputs = {"input_ids": ids, "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1]])}
    found = trace(model, inputs, position=[4, -1], top=6, ablate=5)
    plain = trace(model, inputs, position=[4, -1], top=6)
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.effects, other.effects)
        assert other.ablated_effects is None
    assert all(one.ablated_effect is None for one in plain.fired())
    every = {reader.layer: reader for reader in readers(model)}
    for row, position in enumerate((4, 6)):
        before = model(**inputs).logits[0, position].detach()
        target = found.answer_ids[row]
        torch.testing.assert_close(found.probabilities[row], before.softmax(-1)[target], rtol=1e-6, atol=1e-9)
        tried = [one for one in found.fired(position) if one.ablated_effect is not None]
        assert tried == found.fired(position, count=5)
        for one in tried:
            reader = every[one.layer]
            place = one.entry if name in MODULAR else one.entry - int(reader.ids(torch.tensor([0])))
            with torch.no_grad(), without([LocatedEntry(reader, place, one.head)]):
                after = model(**inputs).logits[0, position]
            lost = (before - before.mean()) - (after - after.mean())
            assert one.ablated_effect == pytest.approx(float(lost[target]), rel=1e-5, abs=1e-7)
            chance = before.softmax(-1)[target] - after.softmax(-1)[target]
            assert one.probability_effect == pytest.approx(float(chance), rel=1e-5, abs=1e-8)
            assert one.ablated_effect


@pytest.mark.parametrize("name", ["Gemma2", "Olmo2"])
def test_models_without_direct_effects_can_be_ablated(name):
    model, ids = made(name), tokens(1, 5)
    found = trace(model, ids, answer=7, position=-1, ablate=3)
    assert found.without
    assert found.answer_ids == (7,)
    logits = model(input_ids=ids).logits[0, -1].detach()
    assert float(found.logits[0]) == pytest.approx(float(logits[7] - logits.mean()), rel=1e-6)
    assert [one.ablated_effect is None for one in found.fired(-1, count=4)] == [False, False, False, True]
    assert all(one.direct_effect is None for one in found.fired())
    assert trace(model, ids, ablate=1).answer_ids == (*ids[0, 1:].tolist(), int(logits.argmax()))
    encoder = af.knowledge.from_ffn(tiny("Bert"))
    with pytest.raises(UnsupportedArchitecture, match="no logits that an ablation could change"):
        trace(encoder, ids, ablate=1)
    with pytest.raises(ValueError, match="ablate must be"):
        trace(model, ids, top=4, ablate=5)


def test_a_model_whose_sequences_influence_one_another_is_refused():
    model = made("Llama")
    table = model.get_input_embeddings()
    table.register_forward_hook(lambda _, __, out: out + torch.randn(50, 32).to(out)[: out.shape[1]] * (len(out) - 1))
    with pytest.raises(UnsupportedArchitecture, match="answers otherwise in a batch of copies"):
        trace(model, tokens(1, 5), ablate=2)
