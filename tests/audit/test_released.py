"""Leaks of released libraries: packed documents in transformers 5.23, and causal heads before 5.19, re-created."""

import importlib

import pytest
import torch
from transformers import masking_utils

import attnflow as af
from attnflow.audit import check
from tests.audit.common import REPAIRED, inputs, tiny, tokens

LENGTHS = [5, 4, 3]
PACKED = {
    "input_ids": tokens(batch=1, length=12),
    "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
}
MIXES = {
    "use_cache=True": {"use_cache": True},
    "use_cache by default": {},
    "mask of ones": {"use_cache": False, "attention_mask": torch.ones(1, 12, dtype=torch.int64)},
}


def mixed(document, extra):
    """Whether this transformers mixes packed documents under these arguments, from its own mask function."""
    model = tiny("Llama", attn_implementation="eager")
    seen = {}

    def hook(module, args, kwargs):
        seen["mask"] = kwargs["attention_mask"]

    handle = model.model.layers[0].register_forward_pre_hook(hook, with_kwargs=True)
    with torch.no_grad():
        model(**PACKED, **extra)
    handle.remove()
    return not torch.equal(seen["mask"][0, 0] == 0, document.dense())


@pytest.mark.parametrize("extra", MIXES)
@pytest.mark.parametrize(
    ("name", "mode", "stated"),
    [("Llama", "perturb", True), ("Llama", "perturb", False), ("Qwen3", "quick", True), ("GPT2", "perturb", False)],
)
def test_packed_documents_mix(name, mode, extra, stated):
    document = af.masks.document(LENGTHS)
    if not mixed(document, MIXES[extra]):
        pytest.skip("this transformers keeps the documents apart")
    report = check(tiny(name), PACKED | MIXES[extra], order=document if stated else None, mode=mode)
    assert not report.ok
    first = report.violations[0]
    attention = {"GPT2": "transformer.h.0.attn"}.get(name, "model.layers.0.self_attn")
    assert (first.kind, first.layer, first.module) == ("order", 0, attention)
    assert first.source < 5 <= first.target or first.source < 9 <= first.target


def test_packed_documents_stay_apart_without_a_cache():
    assert check(tiny("Llama"), PACKED | {"use_cache": False}, order=af.masks.document(LENGTHS)).ok


@pytest.mark.parametrize(("name", "mode"), [*((name, "perturb") for name in REPAIRED), ("RoFormer", "quick")])
def test_a_causal_head_under_a_bidirectional_mask(name, mode, monkeypatch):
    """What transformers 5.9 to 5.18 do in these families, whatever the version at hand does."""
    model = tiny(name)
    module = importlib.import_module(type(model).__module__)
    both = masking_utils.create_bidirectional_mask
    monkeypatch.setattr(module, "create_causal_mask", lambda **given: both(**{**given, "past_key_values": None}), False)
    report = check(model, {**inputs(name), "use_cache": False}, mode=mode)
    first = report.violations[0]
    assert report.order == "causal"
    assert (first.kind, first.layer) == ("order", 0)
    assert first.module.endswith("encoder.layer.0.attention.self")
    assert first.source > first.target
