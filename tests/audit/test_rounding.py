"""Rounding is measured: no accusation of clean models on random inputs, in any precision, decoded in any way."""

import pytest
import torch

from attnflow.audit import check
from tests.audit.common import inputs, tiny, tokens
from tests.audit.test_faults import LAYER, leaky_update

CLEAN = ["Llama", "Mistral", "GPT2", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Llama4", "Qwen3Moe", "T5"]


def call(name, seed):
    given = inputs(name, length=9)
    return {key: tokens(2, value.shape[1] - (key != "input_ids") * 2, seed) for key, value in given.items()}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CLEAN)
def test_twenty_random_inputs_raise_no_alarm(name, dtype):
    model = tiny(name).to(dtype)
    for seed in range(20):
        given = call(name, seed)
        steps = [4, 1, 2] if name == "T5" else [5, 1, 1, 2]
        for cache in (False, steps):
            report = check(model, given, cache=cache, passes=1, both_sides=False, watch="layers", seed=seed)
            assert report.verdict == "clean", f"seed {seed}\n{report}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Llama", "Qwen3Moe"])
def test_every_way_of_decoding_agrees(name, dtype):
    report = check(tiny(name).to(dtype), tokens(2, 9), cache=True, passes=1, both_sides=False, watch="layers")
    assert report.verdict == "clean", str(report)
    assert not [note for note in report.notes if "not compared" in note]


def test_attention_weights_over_padded_keys_are_no_finding():
    """Eager attention returns its weights, and as many keys as positions may be others, with padding before them."""
    model = tiny("Llama", attn_implementation="eager")
    report = check(model, tokens(2, 9), cache=True, passes=1, both_sides=False)
    assert report.verdict == "clean", str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_cache_that_is_a_little_wrong_is_told_from_rounding(dtype):
    """The mistake is as small as rounding in bfloat16: in float64 it keeps its size."""
    with leaky_update(model := tiny("Llama").to(dtype), lambda k, v, new: (k, v * (1 + 1e-4) if new == 1 else v)):
        report = check(model, tokens(1, 9), cache=[7, 1, 1], passes=1, both_sides=False, watch="layers")
    assert [(v.kind, v.layer, v.path) for v in report.violations] == [("cache", LAYER, "cached")]


def test_rejected_drafts_that_stay_in_the_cache(monkeypatch):
    from transformers.cache_utils import DynamicLayer

    crop = DynamicLayer.crop

    def forgetful(self, *args):
        before = self.keys[..., -1:, :].clone()
        crop(self, *args)
        self.keys = torch.cat([self.keys[..., :-1, :], before], -2)

    monkeypatch.setattr(DynamicLayer, "crop", forgetful)
    report = check(tiny("Llama"), tokens(1, 9), cache=True, passes=1, both_sides=False, watch="layers")
    assert [v.path for v in report.violations] == ["crop"]


def test_left_padding_that_shifts_positions():
    """Positions counted from the padding: decoded with padding in front the model says something else."""
    model = tiny("Llama")
    rotary = model.model.rotary_emb
    forward = rotary.forward

    def shifted(hidden, position_ids=None, **kwargs):
        padded = position_ids[0, :2].tolist() == [0, 0]
        counted = torch.arange(hidden.shape[1])[None] if padded else position_ids
        return forward(hidden, position_ids=counted, **kwargs)

    rotary.forward = shifted
    report = check(model, tokens(1, 9), cache=True, passes=1, both_sides=False, watch="layers")
    assert {v.path for v in report.violations} == {"left padding"}
