"""The handle: in force at once, undone exactly, nested, copied; and what it says to bad input."""

import copy
import inspect

import pytest
import torch
from torch import nn

import attnflow as af
from tests.models import ZOO, outputs, state, tiny, tokens

LENGTH = 8
ATTACH = inspect.unwrap(af.masks.attach)  # our own messages, also where a type checker would speak first
WINDOW, CAUSAL = af.masks.sliding_window(LENGTH, 2), af.masks.causal(LENGTH)


@pytest.fixture(name="model")
def _model():
    return tiny("Llama")


def logits(model, ids):
    with torch.no_grad():
        return outputs(model, input_ids=ids)


def test_call_and_context_manager_are_the_same_and_undone_exactly(model):
    ids, before = tokens(1, LENGTH), state(model)
    plain = logits(model, ids)
    handle = af.masks.attach(model, WINDOW)
    masked = logits(model, ids)
    assert handle.active
    assert not torch.equal(masked, plain)
    handle.remove()
    handle.remove()  # harmless
    assert not handle.active
    assert state(model) == before
    with af.masks.attach(model, WINDOW) as handle:
        assert torch.equal(logits(model, ids), masked)
        assert str(handle) == (
            "sliding_window(n=8, window=2, causal=True) on 2 attention modules of LlamaForCausalLM, computed by sdpa"
        )
    assert state(model) == before
    assert torch.equal(logits(model, ids), plain)


def test_undone_after_exceptions_inside_and_outside_of_the_model(model):
    before = state(model)
    with pytest.raises(KeyError), af.masks.attach(model, WINDOW):
        raise KeyError
    with pytest.raises(ValueError, match="9 positions"), af.masks.attach(model, WINDOW):
        model(tokens(1, 9))
    assert state(model) == before


def test_the_newest_mask_holds_and_handles_go_in_any_order(model):
    ids, before = tokens(1, LENGTH), state(model)
    with af.masks.attach(model, WINDOW):
        window = logits(model, ids)
        with af.masks.attach(model, CAUSAL, backend="eager") as inner:
            assert inner.backend == "eager"
            causal = logits(model, ids)
        assert torch.equal(logits(model, ids), window)
        with af.masks.attach(model, CAUSAL) as inner:  # the implementation below is the model's, not the outer name
            assert inner.backend == "sdpa"
    assert not torch.allclose(window, causal)
    older, newer = af.masks.attach(model, WINDOW), af.masks.attach(model, CAUSAL)
    older.remove()
    assert (older.active, newer.active) == (False, True)
    found = logits(model, ids)
    with af.masks.attach(model, CAUSAL):
        assert torch.equal(logits(model, ids), found)
    newer.remove()
    assert state(model) == before
    with pytest.raises(RuntimeError, match="was removed"), older:
        pass


def test_masks_on_parts_that_share_a_config():
    model, source, target = tiny("Bart"), tokens(1, LENGTH), tokens(1, LENGTH)
    before = state(model)

    def run():
        with torch.no_grad():
            return model(input_ids=source, decoder_input_ids=target).logits

    plain = run()
    with af.masks.attach(model, {"encoder": WINDOW, "decoder": WINDOW}):
        both = run()
    encoder = af.masks.attach(model.get_encoder(), WINDOW)
    decoder = af.masks.attach(model.get_decoder(), WINDOW)
    assert torch.equal(run(), both)
    encoder.remove()  # leaves the decoder's mask in force
    with af.masks.attach(model.get_encoder(), WINDOW):
        assert torch.equal(run(), both)
    assert not torch.allclose(run(), both)
    assert not torch.allclose(run(), plain)
    decoder.remove()
    assert torch.equal(run(), plain)
    assert state(model) == before


def test_changing_the_implementation_under_a_mask_does_not_pass_unnoticed(model):
    before = state(model)
    with (
        pytest.raises(RuntimeError, match="set to 'eager' while a mask was in use, which took the mask out of force"),
        af.masks.attach(model, WINDOW),
    ):
        model.set_attn_implementation("eager")
    assert state(model) == before


def test_models_that_share_a_config_do_not_share_the_mask(model):
    twin = type(model)(model.config).double().eval()
    ids = tokens(1, LENGTH)
    plain = logits(twin, ids)
    real = torch.ones_like(ids)
    real[0, 6:] = 0
    with torch.no_grad():
        plain_padded = twin(ids, attention_mask=real).logits
    for implementation in ("sdpa", "eager"):
        with af.masks.attach(model, WINDOW, backend=implementation), torch.no_grad():
            torch.testing.assert_close(logits(twin, ids), plain, rtol=1e-6, atol=1e-6)
            shown = twin(ids, attention_mask=real).logits[:, :6]
            torch.testing.assert_close(shown, plain_padded[:, :6], rtol=1e-6, atol=1e-6)


def test_a_copied_handle_is_of_its_copy_and_saved_models_carry_no_mask(model, tmp_path):
    ids = tokens(1, LENGTH)
    plain = logits(model, ids)
    with af.masks.attach(model, WINDOW) as handle:
        masked = logits(model, ids)
        freed, own = copy.deepcopy((model, handle))
        own.remove()
        assert torch.equal(logits(model, ids), masked)
        model.save_pretrained(tmp_path)
    assert torch.equal(logits(freed, ids), plain)
    saved = type(model).from_pretrained(tmp_path)
    assert saved.config._attn_implementation == "sdpa"
    torch.testing.assert_close(logits(saved, ids), plain)
    assert "attnflow" not in (tmp_path / "config.json").read_text()


def test_a_mask_follows_the_tensors_of_the_model(model):
    """Masks have no device: here the tables move with a model that lives on another one."""
    with af.masks.attach(model, WINDOW):
        ids = tokens(1, LENGTH)
        expected = logits(model, ids)
        model.to("meta")
        assert logits(model, ids.to("meta")).device.type == "meta"
    assert expected.device.type == "cpu"


def test_attention_weights_of_the_eager_route(model):
    model.set_attn_implementation("eager")
    with torch.no_grad(), af.masks.attach(model, WINDOW & ~af.masks.from_edges([(3, 2), (3, 3)], LENGTH)):
        weights = model(tokens(1, LENGTH), output_attentions=True).attentions
    allowed = WINDOW.dense()
    allowed[3] = False
    for layer in weights:
        assert ((layer[0] > 0) == allowed).all()


def test_masks_of_size_one_and_zero(model):
    with af.masks.attach(model, af.masks.causal(1)):
        assert logits(model, tokens(1, 1)).isfinite().all()
    with (
        af.masks.attach(model, af.masks.causal(0)),
        pytest.raises(ValueError, match=r"1 positions, but causal\(n=0\) covers 0"),
    ):
        logits(model, tokens(1, 1))


def test_a_mask_on_some_layers_leaves_the_others_their_own(model):
    ids = tokens(1, LENGTH)
    with af.masks.attach(model, WINDOW, layers=[1]) as handle:
        assert list(handle.masks) == ["model.layers.1.self_attn"]
        ours = logits(model, ids)
    with af.masks.attach(model, per_layer=[CAUSAL, WINDOW]):
        torch.testing.assert_close(ours, logits(model, ids), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"mask": af.masks.full(LENGTH, 5)}, ValueError, r"square mask, got full\(n=8, num_keys=5\) of shape \(8, 5\)"),
        ({"mask": CAUSAL.dense()}, TypeError, r"got Tensor; make one with af\.masks\.from_dense\(tensor\)"),
        ({"mask": [CAUSAL, WINDOW]}, TypeError, r"got a list: one mask for each layer is per_layer=\[...\], one for"),
        ({"mask": "causal"}, TypeError, "got str"),
        ({"mask": None}, TypeError, r"attach takes either one mask or per_layer="),
        ({"mask": {"decoder": CAUSAL}}, ValueError, "only an encoder-decoder model takes a dict"),
        ({"mask": "batch", "layers": [0]}, ValueError, "layers= goes with"),
        ({"mask": CAUSAL.dense().numpy()}, TypeError, r"make one with af\.masks\.from_dense"),
        ({"per_layer": [CAUSAL.dense(), CAUSAL.dense()]}, TypeError, "expected a Mask, got Tensor"),
        ({"per_layer": [CAUSAL]}, ValueError, "one mask per attention module, 2, got 1"),
        ({"per_layer": [CAUSAL] * 3}, ValueError, "one mask per attention module, 2, got 3"),
        ({"per_layer": CAUSAL}, TypeError, "per_layer takes a list of masks, one for each attention layer, got Mask"),
        ({"per_layer": [CAUSAL, CAUSAL], "layers": [0]}, ValueError, "layers= goes with one mask"),
        ({"mask": CAUSAL, "layers": [2]}, ValueError, "layers must be at most 1, got 2"),
        ({"mask": CAUSAL, "layers": []}, ValueError, "at least one"),
        ({"mask": CAUSAL, "layers": [0, 0]}, ValueError, "each once"),
        ({"mask": CAUSAL, "backend": "flash_attention_2"}, ValueError, "choose one of sdpa, eager, flex_attention"),
        ({"mask": CAUSAL, "backend": "paged"}, ValueError, "'paged'"),
        ({"mask": CAUSAL, "flex_on_cpu": "eager"}, ValueError, "flex_on_cpu must be one of 'forward', 'sdpa'"),
        ({"mask": CAUSAL, "other_mixers": "ignore"}, ValueError, "other_mixers must be one of 'error', 'keep'"),
    ],
)
def test_what_is_refused_leaves_nothing_behind(model, bad, error, message):
    before = state(model)
    with pytest.raises(error, match=message):
        ATTACH(model, **bad)
    assert state(model) == before


def test_not_a_model(model):
    with pytest.raises(TypeError, match=r"load_model|Loaded"):
        ATTACH("smollm2-135m", CAUSAL)
    with pytest.raises(ValueError, match=r"expected a transformers model, got Linear"):
        ATTACH(nn.Linear(2, 2), CAUSAL)
    with pytest.raises(ValueError, match="pass the model, not one layer"):
        ATTACH(model.model.layers[0], CAUSAL)


def test_implementations_that_an_architecture_lacks():
    model = tiny("Gemma2", torch.float32)
    if model._supports_sdpa:
        pytest.skip("this version of transformers lets Gemma 2 run with sdpa, without its soft cap")
    with pytest.raises(af.UnsupportedArchitecture, match="Gemma2Model does not run with 'sdpa'"):
        ATTACH(model, CAUSAL, backend="sdpa")


def test_models_of_several_stacks_ask_which():
    model = ZOO["CLIP"].build()
    # A vision-language model takes a mask on its language model.
    with pytest.raises(ValueError, match=r"several stacks.*CLIPText.*CLIPVision.*pass the one"):
        ATTACH(model, CAUSAL)
    ids, image = tokens(1, LENGTH), torch.randn(1, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        text, picture = (model.text_model(ids)[0], model.vision_model(image)[0])
        with ATTACH(model.text_model, af.masks.full(LENGTH)):
            assert not torch.allclose(model.text_model(ids)[0], text, atol=1e-4)
            assert torch.equal(model.vision_model(image)[0], picture)
        assert torch.equal(model.text_model(ids)[0], text)
