"""Ways in which a mask is lost or changed on its way through transformers, each seen to happen without us."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionMaskInterface, DynamicCache, LightGlueConfig, LightGlueForKeypointMatching

import attnflow as af
from attnflow.models.passes import interception
from tests.masks.hf.test_gradients import additive
from tests.models import outputs, tiny, tokens

LENGTH = 8
LAYOUT = af.masks.block_two_stream(3, 2)
POSITIONS = torch.tensor([[0, 1, 2, 3, 2, 3, 4, 5]])


def test_a_missing_mask_function_does_not_lose_our_mask(monkeypatch):
    model, ids = tiny("Llama"), tokens(1, LENGTH)
    with torch.no_grad(), af.masks.attach(model, LAYOUT):
        expected = outputs(model, input_ids=ids)
        monkeypatch.delitem(AttentionMaskInterface._global_mapping, "attnflow_masked_sdpa")
        assert torch.equal(outputs(model, input_ids=ids), expected)
        cache = DynamicCache()
        model(ids[:, :4], past_key_values=cache)
        with pytest.raises(ValueError, match="given the attention mask None"):
            model(ids[:, 4:], past_key_values=cache)


def test_eager_adds_a_bool_mask_as_one_and_ours_masks():
    model, ids = tiny("Llama"), tokens(1, LENGTH)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        masked = model(ids, position_ids=POSITIONS, attention_mask=additive(LAYOUT)).logits
        added = model(ids, position_ids=POSITIONS, attention_mask=LAYOUT.dense()[None, None]).logits
        assert not torch.allclose(added, masked)  # the trap
        with af.masks.attach(model, LAYOUT):
            assert torch.equal(model(ids, position_ids=POSITIONS).logits, masked)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_position_ids_that_jump_do_not_cut_the_sequence(implementation, use_cache):
    model, ids = tiny("Llama"), tokens(2, LENGTH)
    model.set_attn_implementation(implementation)
    positions = POSITIONS.expand(2, -1)
    with torch.no_grad():
        expected = model(ids, position_ids=positions, attention_mask=additive(LAYOUT).expand(2, -1, -1, -1)).logits
        if not use_cache:  # the trap: the plain model takes the jump for the start of another sequence
            cut = model(ids, position_ids=positions, use_cache=False).logits
            whole = model(ids, position_ids=positions, attention_mask=additive(af.masks.causal(LENGTH))).logits
            assert not torch.allclose(cut, whole)
        with af.masks.attach(model, LAYOUT):
            ours = model(ids, position_ids=positions, use_cache=use_cache).logits
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_four_dimensional_masks_and_block_masks_are_refused(implementation):
    model, ids = tiny("Llama"), tokens(1, LENGTH)
    block_mask = create_block_mask(lambda b, h, q, k: q >= k, 1, None, LENGTH, LENGTH, device="cpu")
    with torch.no_grad(), af.masks.attach(model, LAYOUT, backend=implementation):
        with pytest.raises(ValueError, match=r"Tensor of shape \(1, 1, 8, 8\), which would bypass the mask"):
            model(ids, attention_mask=additive(af.masks.full(LENGTH)))
        with pytest.raises(ValueError, match="BlockMask of shape"):
            model(ids, attention_mask=block_mask)


@pytest.mark.parametrize(("name", "keyword"), [("Gemma2", "softcap"), ("GptOss", "s_aux")])
def test_other_keywords_reach_the_kernel_unchanged(name, keyword, monkeypatch):
    model, ids = tiny(name), tokens(1, LENGTH)
    model.set_attn_implementation("eager")
    seen = []
    real = interception.eager_kernel

    def spied(module):
        def spy(*args, **kwargs):
            seen.append(kwargs.get(keyword))
            return real(module)(*args, **kwargs)

        return spy

    monkeypatch.setattr(interception, "eager_kernel", spied)
    with torch.no_grad(), af.masks.attach(model, af.masks.causal(LENGTH)):
        seen.clear()  # of the run that attach makes to check itself
        outputs(model, input_ids=ids)
    assert len(seen) == 2
    assert all(value is not None for value in seen)


def test_flex_attention_with_gradients_on_the_cpu_is_a_clear_error():
    model, ids = tiny("Llama", torch.float32), tokens(1, LENGTH)
    with (
        af.masks.attach(model, LAYOUT, backend="flex_attention"),
        pytest.raises(RuntimeError, match=r"no gradients on the CPU.*flex_on_cpu='sdpa'"),
    ):
        model(ids)


def test_sdpa_stands_in_for_flex_attention_on_the_cpu_where_the_caller_said_so():
    model, ids = tiny("Llama"), tokens(1, LENGTH)
    with af.masks.attach(model, LAYOUT, backend="flex_attention", flex_on_cpu="sdpa") as handle:
        ours = model(ids).logits
        ours.sum().backward()
        assert handle.backend == "flex_attention"
    gradient = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    with af.masks.attach(model, LAYOUT, backend="sdpa"):
        expected = model(ids).logits
        expected.sum().backward()
    assert torch.equal(ours, expected)
    assert torch.equal(gradient, model.model.embed_tokens.weight.grad)


def test_sdpa_does_not_stand_in_where_it_would_drop_a_soft_cap():
    model = tiny("Gemma2", torch.float32)
    with (
        af.masks.attach(model, af.masks.causal(4), backend="flex_attention", flex_on_cpu="sdpa"),
        pytest.raises(ValueError, match="passes softcap, which sdpa cannot apply"),
    ):
        model(tokens(1, 4))


def test_padding_that_is_asked_for_once_for_all_queries():
    """LightGlue asks transformers for the mask of one query, and adds it to all of them."""
    model = LightGlueForKeypointMatching(LightGlueConfig(num_hidden_layers=2, descriptor_dim=64, num_attention_heads=4))
    attention, seen = model.transformer_layers[0].self_attention, list[tuple[torch.Tensor, torch.Tensor]]()
    attention.register_forward_hook(lambda module, args, output: seen.append((args[0], output[0])))
    pixels = torch.rand(1, 2, 3, 64, 64)
    with torch.no_grad():
        model.eval()(pixel_values=pixels)
        size = seen[0][0].shape[1]
        with af.masks.attach(model, af.masks.from_dense(torch.eye(size, dtype=torch.bool))):
            model(pixel_values=pixels)
        states, output = seen[-1]
        torch.testing.assert_close(output, attention.o_proj(attention.v_proj(states)))
    assert size > 1
