"""What a model asks transformers for, against its configuration and the inputs; padding that no mask reaches."""

import peft
import pytest
import torch
import transformers
from transformers import masking_utils

from attnflow.audit import check
from tests.audit.common import tiny, tokens
from tests.audit.test_declared import pictured
from tests.conformance.miniature import named
from tests.leaks import requests
from tests.leaks.requests import asking, pair, without

LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
POSITIONS = (LEFT.cumsum(-1) - 1).clamp(min=0)


def batch(**more):
    return {"input_ids": tokens(2, 8), "attention_mask": LEFT, "use_cache": False, **more}


def padded_before(own, *args, attention_mask=None, **kwargs):
    """One position too late, as of a mask that was shifted."""
    return own(*args, attention_mask=attention_mask.roll(1, -1), **kwargs)


def chunks_from_the_first_column():
    def change(own, size, padding):
        return own(size, torch.zeros_like(padding))

    given, maker = batch(position_ids=POSITIONS), "chunked_causal_mask_function"
    return (asking(tiny("Llama4"), maker, change, masking_utils), given), (tiny("Llama4"), given)


ROW = requests.ROW
REQUESTS = {  # (leaky, clean), and words of the finding
    **{name: (requests.CASES[name], words) for name, words in {
        "a window that never binds": "asked for causal; the configuration and inputs",
        "a window that is one wider": "asked for window 5; the configuration",
        "a window that is one narrower": "asked for window 3; the configuration",
        "a request that forgets padding": "asked for 3 positions of padding",
        "a window that forgets padding": "positions of padding",
        "a request that forgets documents": "asked for earlier documents",
    }.items()},
    "chunks from column 0": (chunks_from_the_first_column(), "asked for chunks of 4 from position 0"),
    "padding that is shifted": (pair("Llama", requests.PADDED, requests.CAUSAL, padded_before), "asked for"),
    "documents that windows ignore": (
        pair("Gemma2", requests.PACKED, requests.SLIDING, without("position_ids")), "asked for earlier documents"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REQUESTS)
def test_a_request_against_the_configuration_and_the_inputs(case):
    ((leaky, given), (clean, _)), words = REQUESTS[case]
    looked = {"both_sides": False, "passes": 2, "watch": "layers"}
    assert not [v for v in check(clean, given, **looked).violations if v.kind == "request"]
    report = check(leaky, given, **looked)
    (found,) = [v for v in report.violations if v.kind == "request"]
    assert words in found.why
    assert not report.ok
    assert words in str(report)


def two_images(name):
    """Three tokens, an image of four, one token, an image of four, two tokens."""
    model, given = pictured(name)
    ids = given["input_ids"][0]
    image, text = ids[3:7], ids[:3]
    given["input_ids"] = torch.cat([text, image, text[:1], image, text[:2]])[None]
    types = torch.tensor([[0] * 3 + [1] * 4 + [0] + [1] * 4 + [0] * 2])
    given |= {"pixel_values": given["pixel_values"].repeat(2, 1, 1, 1)}
    key = "token_type_ids" if name == "Gemma3" else "mm_token_type_ids"
    return model, {k: v for k, v in given.items() if not k.endswith("type_ids")} | {key: types}


def test_images_that_see_future_images(monkeypatch):
    import transformers.models.gemma3.modeling_gemma3 as file

    model, given = two_images("Gemma3")
    looked = {"both_sides": False, "watch": "layers"}
    clean = check(model, given, **looked)
    assert clean.ok, str(clean)
    joined = "get_block_sequence_ids_for_mask", lambda types, device=None: torch.where(types == 1, 0, -1)
    monkeypatch.setattr(file, *joined)
    report = check(model, given, passes=2, **looked)
    (found, *_) = [v for v in report.violations if v.kind == "request"]
    assert found.why.startswith("asked for blocks that see later blocks")
    assert found.target in range(3, 7)
    assert found.source in range(8, 12)


def test_all_image_tokens_see_one_another_by_design():
    """Molmo 2 joins all images of a sequence, and HRM's prefix is one block: no finding."""
    model = named("HrmTextForCausalLM")
    types = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0]])
    report = check(model, {**ROW, "input_ids": ROW["input_ids"].clamp(min=8), "token_type_ids": types})
    assert not [v for v in report.violations if v.kind == "request"], str(report)
    assert not report.untested


def test_a_layer_that_narrows_its_own_mask_is_not_accused():
    """GPT-Neo asks for a causal mask in all layers; its local ones add a window of their own."""
    assert check(tiny("GPTNeo"), ROW).ok


# ---- padding where the layers' sequence is not the mask's

VIRTUAL = {
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "as many as tokens": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8),
    "p-tuning": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16),
    "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", VIRTUAL)
def test_virtual_tokens_are_not_accused_and_forgotten_padding_is(name, side):
    model = peft.get_peft_model(tiny("Llama"), VIRTUAL[name]).eval()
    given = {name: value if side == "left" else value.flip(1) for name, value in batch().items() if name != "use_cache"}
    report = check(model, given, both_sides=True, watch="layers", passes=4)
    assert report.ok, str(report)
    assert "padding (3 positions)" in report.order
    assert not report.notes
    base = model.get_base_model()
    own = base.forward
    base.forward = lambda *args, **kwargs: own(*args, **{**kwargs, "attention_mask": None})
    report = check(model, given, passes=4, watch="layers")
    assert report.ok == (side == "right")  # behind the tokens no causal model reads it


def test_a_vision_prefix_before_padded_text():
    model = named("GitForCausalLM")
    given = {"input_ids": tokens(2, 8).clamp(min=8), "attention_mask": LEFT, "pixel_values": torch.randn(2, 3, 32, 32)}
    report = check(model, given, both_sides=True)
    assert report.ok, str(report)
    assert "padding (3 positions)" in report.order


def test_padding_without_a_known_place_is_named():
    class Summed(torch.nn.Module):
        """Twice as many vectors as tokens: each token moves two of them."""

        def __init__(self, inner):
            super().__init__()
            self.inner, self.config = inner, inner.config

        def forward(self, input_ids, attention_mask):
            vectors = self.inner.get_input_embeddings()(input_ids).repeat_interleave(2, 1)
            return self.inner(inputs_embeds=torch.cat([vectors[:, :1], vectors], 1)).logits

    report = check(Summed(tiny("Llama")), {"input_ids": tokens(2, 8), "attention_mask": LEFT})
    assert report.verdict == "nothing tested"
    assert any("the padding of attention_mask" in words for words in report.untested)


# ---- padding of other inputs


def crossing(**config):
    sizes = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "eos_token_id": 1}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=1, add_cross_attention=True, **config)
    ).eval()


def bert():
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(**sizes, intermediate_size=48, is_decoder=True, add_cross_attention=True)
    return transformers.BertLMHeadModel(config).eval()


@pytest.mark.parametrize("make", [crossing, bert])
def test_padding_of_encoder_states(make, mode):
    model, mask = make(), torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    given = {"input_ids": tokens(2, 8), "encoder_hidden_states": torch.randn(2, 6, 32), "encoder_attention_mask": mask}
    assert check(model, given, mode=mode).ok
    report = check(asking(model, "create_bidirectional_mask", without("attention_mask")), given, mode=mode)
    (found,) = [v for v in report.violations if v.kind == "padding"]
    assert (found.target_row, found.why) == (0, "padding of encoder_hidden_states")
    assert not report.ok


@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_padding_that_cross_attention_reads(name):
    model = tiny(name)
    given = {"input_ids": tokens(2, 13), "decoder_input_ids": tokens(2, 9), "attention_mask": torch.ones(2, 13).long()}
    given["attention_mask"][0, 9:] = 0
    looked = {"both_sides": False, "watch": "layers"}
    assert check(model, given, **looked).ok
    decoder, own = model.get_decoder(), model.get_decoder().forward
    decoder.forward = lambda *args, **kwargs: own(*args, **{**kwargs, "encoder_attention_mask": None})
    report = check(model, given, passes=4, **looked)
    assert any(v.source is not None and v.source < 13 <= v.target for v in report.violations), str(report)


def test_encoder_states_as_long_as_the_sequence_are_named():
    mask = torch.tensor([[1] * 6 + [0] * 2, [1] * 8])
    given = {"input_ids": tokens(2, 8), "encoder_hidden_states": torch.randn(2, 8, 32), "encoder_attention_mask": mask}
    report = check(crossing(), given)
    assert report.verdict == "nothing tested"
    assert any("the padding of encoder_hidden_states" in words for words in report.untested)
