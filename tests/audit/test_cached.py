"""Decoding with a cache, in every way that a model has: faults of the cache are found, clean ones are not accused."""

import contextlib

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from attnflow.audit import check
from tests.audit.common import LENGTH, inputs, open_attention, tiny, tokens
from tests.audit.test_faults import LAYER, only, pair


@pytest.mark.parametrize(
    "name", ["Llama", "Mistral", "GPT2", "Gemma3", "Llama4", "BertDecoder", "T5", "Mamba2", "Qwen3Next"]
)
def test_clean_caches_raise_no_alarm(name):
    report = check(tiny(name), inputs(name, batch=1), cache=True, passes=2)
    assert report.ok, str(report)
    assert name != "Llama" or not [note for note in report.notes if "not compared" in note]


def test_a_state_that_takes_no_chunks():
    """Jamba of transformers 5.23 begins its scan anew with every call of several tokens: brute force says so, too."""
    model, ids = tiny("Jamba"), tokens(1)
    with torch.no_grad():
        first = model(ids[:, :6], use_cache=True)
        second = model(ids[:, 6:], use_cache=True, past_key_values=first.past_key_values).logits
        wrong = (second - model(ids).logits[:, 6:]).abs().max() > 1e-3
    report = check(model, ids, cache=[6, 7], passes=1, watch="layers", both_sides=False)
    assert [v.layer for v in report.violations] == ([0] if wrong else [])
    assert check(model, ids, cache=[9, 1, 1, 1, 1], passes=1, watch="layers", both_sides=False).ok


@pytest.mark.parametrize("name", ["Bamba", "MiniMax"])
def test_caches_that_need_position_ids_are_clean_with_them(name):
    given = {**inputs(name, batch=1), "position_ids": torch.arange(LENGTH)[None]}
    report = check(tiny(name), given, cache=[9, 1, 1, 1, 1], passes=2)
    assert report.ok, str(report)


@contextlib.contextmanager
def leaky_update(model, change):
    """The cache hands the attention of one layer other keys and values than it should."""
    original = DynamicCache.update

    def update(self, key, value, layer_idx, *args, **kwargs):
        keys, values = original(self, key, value, layer_idx, *args, **kwargs)
        return change(keys, values, key.shape[-2]) if layer_idx == LAYER else (keys, values)

    DynamicCache.update = update
    try:
        yield
    finally:
        DynamicCache.update = original


def test_a_cache_that_forgets():
    model = tiny("Llama")

    def forget(keys, values, new):
        return keys, torch.cat([values[..., :1, :] * 0, values[..., 1:, :]], -2) if new == 1 else values

    with leaky_update(model, forget):
        assert check(model, tokens()).ok  # one full forward never shows it
        found = only(check(model, tokens(), cache=True, passes=2), kind="cache")
    assert (found.layer, found.module, found.path) == (LAYER, "model.layers.1.self_attn", "cached")
    assert found.target >= LENGTH - 4


def test_a_cache_that_mixes_the_batch():
    model = tiny("Llama")

    def mix(keys, values, new):
        return keys, torch.cat([values[..., :-1, :].roll(1, 0), values[..., -1:, :]], -2) if new == 1 else values

    with leaky_update(model, mix):
        report = check(model, tokens(), cache=True, passes=4)
    found = report.violations[0]
    assert (found.kind, found.layer, found.module, found.path) == ("batch", LAYER, "model.layers.1.self_attn", "cached")
    assert found.target >= LENGTH - 4
    assert found.source_row != found.target_row


def test_a_window_that_the_cache_widens():
    model = tiny("Mistral", attn_implementation="eager")
    given = {"input_ids": tokens(batch=1, length=24)}
    assert check(model, given, cache=[20, 2, 2], passes=8).ok
    kept = {}

    def hoard(keys, values, new):
        if new > 2:
            kept["first"] = values[..., :1, :]
            return keys, values
        return keys, values + 0.1 * kept["first"]

    # the first value of the sequence is still there when the window has long left it
    with leaky_update(model, hoard):
        report = check(model, given, cache=[20, 2, 2], passes=8)
    found = report.violations[0]
    assert (found.kind, found.path) == ("order", "cached")
    assert (found.layer, found.module, found.source) == (LAYER, "model.layers.1.self_attn", 0)
    assert found.target >= 20


def test_a_chunk_that_reads_ahead_through_the_cache():
    model = tiny("Llama", attn_implementation="eager")
    with open_attention(model, LAYER, pair(9, 11)):
        report = check(model, tokens(batch=1), cache=[6, 7])
    assert [(v.path, v.layer, v.source, v.target) for v in report.violations] == [
        ("forward", LAYER, 11, 9),
        ("cached", LAYER, 11, 9),
    ]


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
