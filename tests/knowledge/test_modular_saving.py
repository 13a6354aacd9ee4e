"""Modular models start as intended, however they are made, and come back from a folder as they were."""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

import attnflow as af
from attnflow.knowledge import ModularConfig, ModularForCausalLM
from attnflow.knowledge.modular import ModularModel
from tests.models import MODULAR, modular, tokens

FORMS = [
    {},
    {"threshold": "coordinate", "gated": True, "entries_per_token": 4},
    {"threshold": "coordinate", "knowledge_activation": "sparsemax", "tie_word_embeddings": False},
]


def as_intended(name, value, config):
    """Whether a parameter is as the docstrings say it starts."""
    kind = name.rpartition("attention.")[2] if "reader" in name else name
    fan = {"query": config.hidden_size, "key": config.entry_dim, "value": config.entry_dim * config.num_knowledge_heads}
    if kind in fan:
        return abs(float(value.std()) * fan[kind] ** 0.5 - 1) < 0.15
    if name == "model.knowledge.entries":
        return abs(float(value.std()) * config.entry_dim**0.5 - 1) < 0.15
    if kind.startswith("threshold_network.0"):
        return float(value.abs().max()) <= config.entry_dim**-0.5 and float(value.std()) > 0
    if "norm" in name:
        return bool((value == 1).all())
    if kind.startswith("threshold_network.2") or kind in ("output_bias", "entry_thresholds") or kind.endswith("bias"):
        return not value.any()
    return abs(float(value.std()) / config.initializer_range - 1) < 0.15


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("made", ["class", "Auto", "meta"])
def test_parameters_start_as_intended(made, form):
    config = ModularConfig(**{**MODULAR, **form, "initializer_range": 0.02, "pad_token_id": None})
    torch.manual_seed(0)
    if made == "class":
        model = ModularForCausalLM(config)
    elif made == "Auto":
        model = AutoModelForCausalLM.from_config(config)
    else:
        with torch.device("meta"):
            model = ModularForCausalLM(config)
        model.to_empty(device="cpu")
        for value in [*model.parameters(), *model.buffers()]:
            value.data.fill_(torch.nan)
        for module in model.modules():
            module._is_hf_initialized = False
        model.init_weights()
        model.tie_weights()
    wrong = [name for name, value in model.named_parameters() if not as_intended(name, value.detach(), config)]
    assert not wrong
    assert bool(model(input_ids=tokens()).logits.isfinite().all())


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_saved_model_comes_back(form, tmp_path):
    model, ids = modular(torch.float32, **form), tokens()
    model.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    expected = model(input_ids=ids).logits
    for maker in (ModularForCausalLM, AutoModelForCausalLM):
        back, report = maker.from_pretrained(tmp_path, output_loading_info=True)
        assert type(back) is ModularForCausalLM
        assert not any(report.values())
        assert torch.equal(back(input_ids=ids).logits, expected)
        assert {name: getattr(back.config, name) for name in MODULAR | form} == MODULAR | form
        tied = back.lm_head.weight is back.model.embed_tokens.weight
        assert tied == model.config.tie_word_embeddings
    headless, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert type(headless) is ModularModel
    assert not report["missing_keys"]
    torch.testing.assert_close(
        headless(input_ids=ids).last_hidden_state, model.model(input_ids=ids).last_hidden_state, rtol=0, atol=0
    )
    loaded = af.models.load_model(tmp_path, tokenizer=False).model
    assert type(loaded) is ModularForCausalLM
    assert torch.equal(loaded(input_ids=ids).logits, expected)
