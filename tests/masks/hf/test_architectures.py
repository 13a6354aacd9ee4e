"""The mask takes effect, wholly and alone, in every architecture that takes the attention interface."""

import numpy as np
import pytest
import torch
import transformers

import attnflow as af
from attnflow import testing
from attnflow.masks.hf import selfcheck
from tests.conformance.miniature import Architecture, build
from tests.models import BIDIRECTIONAL, CAUSAL, HYBRID, WIDTH, WITHOUT_INTERFACE, ZOO, outputs, tiny, tokens
from tests.models.options import AUDIO

LENGTH = 10
_DATA2VEC = {name: value for name, value in AUDIO.items() if name != "num_conv_pos_embedding_groups"}
SPEECH = {
    **dict.fromkeys(["Wav2Vec2", "Hubert", "UniSpeech", "UniSpeechSat"], AUDIO),
    "SEW": {**AUDIO, "squeeze_factor": 2},
    "Data2VecAudio": {**_DATA2VEC, "conv_pos_kernel_size": 3, "num_conv_pos_embeddings": 2},
}


def closure(*masks):
    """Which query moves with which key after the layers, from the definition."""
    return testing.product([mask.dense() for mask in masks])


def moved(model, length=LENGTH, noise=1e-10, **inputs):
    """moved[i, j]: whether the output at i changes when the embedding at j does; all j in one batch."""
    embeddings = torch.randn(1, length, WIDTH, dtype=model.dtype).expand(length + 1, -1, -1).clone()
    for j in range(length):
        embeddings[j, j] += torch.randn(WIDTH, dtype=model.dtype)
    with torch.no_grad():
        result = outputs(model, inputs_embeds=embeddings, **inputs)
    return ((result[:length] - result[length:]).abs().amax(dim=-1) > noise).T.numpy()


def random_mask(rows=LENGTH, columns=LENGTH, share=0.2):
    return af.masks.from_dense(torch.rand(rows, columns) < share)


@pytest.mark.parametrize("name", [*CAUSAL, *BIDIRECTIONAL, "Modular"])
@pytest.mark.parametrize("implementation", [None, "eager"])
def test_outputs_move_exactly_with_what_the_mask_reaches(name, implementation):
    model, mask = ZOO[name].build() if name == "Modular" else tiny(name), random_mask()
    noise = 1e-6 if name == "DeepseekV3" else 1e-10  # its router computes in float32 whatever the model's dtype
    own, chosen = moved(model, noise=noise), model.config._attn_implementation
    with af.masks.attach(model, mask, backend=implementation) as handle:
        assert handle.backend == (implementation or chosen)
        assert np.array_equal(moved(model, noise=noise), closure(mask, mask))
    assert np.array_equal(moved(model, noise=noise), own)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert", "ModernBert"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_one_mask_per_layer(name, implementation):
    model, masks = tiny(name), [random_mask(), random_mask()]
    assert masks[0] != masks[1]
    with af.masks.attach(model, per_layer=masks, backend=implementation) as handle:
        assert list(handle.masks.values()) == masks
        assert np.array_equal(moved(model), closure(*masks))


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("implementation", [None, "eager"])
def test_causal_mask_is_the_plain_causal_model(name, implementation):
    window = {"sliding_window": None} if name in {"Mistral", "Qwen2"} else {}
    window = {"sliding_window": 64} if name in {"Gemma2", "Gemma3", "Cohere2", "GptOss"} else window
    model = tiny(name, **window)
    if implementation:
        model.set_attn_implementation(implementation)
    ids = tokens(2, LENGTH)
    with torch.no_grad():
        plain = outputs(model, input_ids=ids)
        with af.masks.attach(model, af.masks.causal(LENGTH)):
            ours = outputs(model, input_ids=ids)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    if implementation:
        assert torch.equal(ours, plain)


def test_vision_encoders_which_ask_for_no_mask():
    model, image = ZOO["ViT"].build(), torch.randn(1, 3, 8, 8, dtype=torch.float64)
    other = image.clone()
    other[:, :, -1, -1] += 1.0  # the last of four patches, behind the token of the class
    with torch.no_grad(), af.masks.attach(model, af.masks.causal(5)):
        change = (outputs(model, pixel_values=image) - outputs(model, pixel_values=other)).abs().amax(dim=-1)[0]
    assert (change[:4] == 0).all()
    assert change[4] > 0


@pytest.mark.parametrize("name", WITHOUT_INTERFACE)
def test_models_without_the_attention_interface_are_refused(name):
    model = tiny(name, torch.float32)
    with pytest.raises(af.UnsupportedArchitecture, match="does not take the attention interface"):
        af.masks.attach(model, af.masks.causal(4))


@pytest.mark.parametrize("name", HYBRID)
def test_models_that_mix_positions_beside_attention_are_refused_unless_told(name):
    model = tiny(name, torch.float32)
    with pytest.raises(af.UnsupportedArchitecture, match=r"mamba.*other_mixers='keep'"):
        af.masks.attach(model, af.masks.causal(4))
    with torch.no_grad():
        plain = outputs(model, input_ids=(ids := tokens(1, 4)))
        with af.masks.attach(model, af.masks.full(4), other_mixers="keep"):
            assert not torch.allclose(outputs(model, input_ids=ids), plain)
        assert torch.equal(outputs(model, input_ids=ids), plain)


class Nothing(torch.nn.Module):
    def forward(self, hidden):
        return torch.zeros_like(hidden)


@pytest.mark.parametrize("name", SPEECH)
def test_a_convolution_before_the_layers_of_a_speech_model_is_seen(name):
    config = getattr(transformers, f"{name}Config")(**SPEECH[name])
    model = getattr(transformers, f"{name}Model")(config).eval()
    mask = af.masks.from_dense(torch.eye(8, dtype=torch.bool))

    def moved():
        hidden = torch.randn(1, 8, WIDTH).repeat(2, 1, 1)
        hidden[1, 5] *= -1
        with torch.no_grad(), af.masks.attach(model, mask, other_mixers="keep", crop=True):
            one, other = model.encoder(hidden)[0]
        return (one - other).abs().amax(-1).gt(1e-5).nonzero().flatten().tolist()

    assert set(moved()) > {5}  # frames that no mask keeps from frame 5
    with pytest.raises(af.UnsupportedArchitecture, match=r"another input at one position moves [23] others"):
        af.masks.attach(model, mask)
    if name == "SEW":  # it also halves the number of frames
        return
    model.encoder.pos_conv_embed = Nothing()
    selfcheck._checks.clear()
    assert moved() == [5]
    with af.masks.attach(model, mask) as handle:
        assert not handle.unchecked


@pytest.mark.parametrize("name", ["Afmoe", "JetMoe", "Gemma2", "VaultGemma"])
def test_the_check_runs_whatever_the_model_does_to_attention(name):
    model = build(Architecture(name.lower(), f"{name}ForCausalLM", "decoder"))
    with af.masks.attach(model, af.masks.causal(8)) as handle:
        assert not handle.unchecked


def test_a_layer_list_of_a_shared_layer_is_refused():
    model = tiny("Albert")
    with pytest.raises(ValueError, match="shared by its 2 layers"):
        af.masks.attach(model, per_layer=[af.masks.causal(4)] * 2)
