"""Decoding with a cache, in every way that a model has: faults of the cache are found, clean ones are not accused."""

import contextlib

import peft
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers.cache_utils import DynamicCache, DynamicLayer

import attnflow as af
from attnflow.audit import check
from attnflow.audit.rows import leaves
from attnflow.models.arguments import CACHES
from attnflow.models.subject import Subject
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


class Around(nn.Module):
    """A model that calls its cache as it likes, around one that has its own name for it."""

    def __init__(self, inner, returned="past_key_values"):
        super().__init__()
        self.inner, self.returned = inner, returned

    def run(self, ids, cache, use_cache):
        result = self.inner(ids, use_cache=use_cache, **{Subject(self.inner).accepted(*CACHES): cache})
        return {"logits": result.logits, self.returned: next((result[name] for name in CACHES if name in result), None)}


class TakesCache(Around):
    def forward(self, input_ids, cache=None, use_cache=False):
        return self.run(input_ids, cache, use_cache)


class TakesParams(Around):
    def forward(self, input_ids, cache_params=None, use_cache=False):
        return self.run(input_ids, cache_params, use_cache)


class TakesPast(Around):
    def forward(self, input_ids, past_key_values=None, use_cache=False):
        return self.run(input_ids, past_key_values, use_cache)


class HandsOn(Around):
    def forward(self, input_ids, use_cache=None, **kwargs):
        return self.inner(input_ids, use_cache=use_cache, **kwargs)


class Deaf(Around):
    """Takes a cache by its keywords, and drops it."""

    def forward(self, input_ids, use_cache=None, **kwargs):
        return self.inner(input_ids, use_cache=use_cache)


class SoftPrompt(Around):
    """Learned vectors before every call, as prompt tuning has them."""

    def forward(self, input_ids, use_cache=None, **kwargs):
        embeddings = self.inner.get_input_embeddings()(input_ids)
        prompt = embeddings.new_full((len(embeddings), 2, embeddings.shape[2]), 0.1)
        return self.inner(inputs_embeds=torch.cat([prompt, embeddings], 1), use_cache=use_cache, **kwargs)


class NoCache(nn.Embedding):
    def forward(self, input_ids, **kwargs):
        return super().forward(input_ids)


def lora(model):
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))


def parallel(model):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return DistributedDataParallel(model)


@pytest.fixture
def processes():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


ACCEPTED = {
    "cache": (TakesCache, "cache"),
    "cache, returned under another name": (lambda model: TakesCache(model, "cache_params"), "cache"),
    "cache_params": (TakesParams, "cache_params"),
    "past_key_values": (lambda model: TakesPast(model, "cache"), "past_key_values"),
    "keywords": (lambda model: HandsOn(TakesParams(model)), "cache_params"),
    "keywords twice": (lambda model: HandsOn(HandsOn(TakesCache(model, "cache"))), "cache"),
    "LoRA": (lora, None),
    "DDP": (parallel, None),
    "compiled": (lambda model: torch.compile(model, backend="eager"), None),
}


@pytest.mark.usefixtures("processes")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize("kind", ACCEPTED)
def test_a_cache_is_found_by_the_name_that_a_model_accepts(kind):
    inner = tiny("Llama")
    make, name = ACCEPTED[kind]
    model = make(inner)
    assert Subject(model).accepted(*CACHES) == (name or Subject(inner).accepted(*CACHES))
    if kind == "compiled":
        return
    call = {
        "inputs": tokens(),
        "order": af.masks.causal(LENGTH),
        "cache": [11, 1, 1],
        "mode": "quick",
        "watch": "layers",
    }
    assert check(model, **call).ok
    with leaky_update(inner, lambda keys, values, new: (keys, values.roll(1, -2) if new == 1 else values)):
        assert {violation.kind for violation in check(model, **call).violations} == {"cache"}


def test_a_cache_that_a_model_drops_is_a_finding():
    report = check(Deaf(tiny("Llama")), tokens(), order=af.masks.causal(LENGTH), cache=[11, 1, 1], mode="quick")
    assert {violation.kind for violation in report.violations} == {"cache"}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda model: NoCache(80, 8), "takes no cache"),
        (lambda model: HandsOn(NoCache(80, 8)), "takes no cache"),
        (SoftPrompt, "adds positions of its own"),
        (
            lambda m: peft.get_peft_model(m, peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=2)),
            "adds positions",
        ),
        (
            lambda m: peft.get_peft_model(m, peft.PrefixTuningConfig("CAUSAL_LM", num_virtual_tokens=2)),
            "adds positions",
        ),
    ],
)
def test_a_model_whose_steps_cannot_be_cut_is_refused(make, why):
    model = make(tiny("Llama").float())
    length = LENGTH + (2 if isinstance(model, SoftPrompt) else 0)
    order = None if isinstance(model, peft.PeftModel) else af.masks.causal(length)
    with pytest.raises(af.UnsupportedArchitecture, match=why):
        check(model, tokens(), order=order, cache=True, passes=1)


def test_caches_among_outputs_are_no_outputs():
    state = (torch.ones(1, 3, 2),)
    for name in (*CACHES, "encoder_cache", "decoder_past_key_values", "past_buckets_states", "padding_cache"):
        assert [path for path, _ in leaves({"logits": torch.ones(1, 3, 4), name: state})] == [".logits"]
