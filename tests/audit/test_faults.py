"""Faults injected into real architectures, and leaks of released libraries: each is found where it begins."""

import importlib

import pytest
import torch
from transformers import masking_utils

import attnflow as af
from attnflow.audit import audit, check
from tests.audit.common import (
    LENGTH,
    REPAIRED,
    WINDOW,
    Stack,
    centred,
    convolved,
    inputs,
    open_attention,
    remembering,
    routed,
    tiny,
    to_one_row,
    tokens,
    wrapped,
)

LAYER = 1
ATTENTION = {
    "Llama": "model.layers.1.self_attn",
    "Mistral": "model.layers.1.self_attn",
    "GPT2": "transformer.h.1.attn",
    "Qwen3": "model.layers.1.self_attn",
    "Gemma3": "model.layers.1.self_attn",
}


def pair(target, source):
    allow = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    allow[target, source] = True
    return allow


def only(report, kind="order"):
    assert not report.ok
    assert [violation.kind for violation in report.violations] == [kind], str(report)
    return report.violations[0]


@pytest.mark.parametrize("name", ATTENTION)
def test_one_future_pair_in_one_head(name, mode):
    with open_attention(tiny(name, attn_implementation="eager"), LAYER, pair(5, 9), head=2) as model:
        report = check(model, inputs(name), mode=mode)
    found = only(report)
    assert (found.layer, found.module, found.source, found.target) == (LAYER, ATTENTION[name], 9, 5)
    assert found.source_row == found.target_row
    assert found.change > 0
    assert {module.module for module in report.modules if module.status == "breaks"} == {ATTENTION[name]}
    assert report.modules[-1].status == "carries"  # the model's own output


@pytest.mark.parametrize("target", [0, 5, LENGTH - 2])
def test_neighbouring_pairs(target, mode):
    with open_attention(tiny("Llama", attn_implementation="eager"), 2, pair(target, target + 1)) as model:
        found = only(check(model, tokens(batch=1), mode=mode))
    assert (found.layer, found.source, found.target) == (2, target + 1, target)


def test_the_first_of_two_leaks_comes_first(mode):
    model = tiny("Llama", attn_implementation="eager")
    norm = model.model.layers[2].mlp
    with open_attention(model, LAYER, pair(3, 10)), wrapped(norm, lambda out, hidden: out + 1e-2 * hidden.roll(-1, 1)):
        report = check(model, tokens(batch=1), mode=mode)
    assert report.violations[0].module == "model.layers.1.self_attn"
    assert [v.module for v in report.violations] == ["model.layers.1.self_attn", "model.layers.2.mlp"]


def test_a_window_that_is_one_too_wide(mode):
    wide = af.masks.sliding_window(LENGTH, WINDOW + 1).dense()
    with open_attention(tiny("Mistral", attn_implementation="eager"), LAYER, wide) as model:
        found = only(check(model, tokens(batch=1), mode=mode))
    assert (found.layer, found.module) == (LAYER, "model.layers.1.self_attn")
    assert found.target - found.source == 2 * (WINDOW - 1) + 1  # one beyond the field of two layers


def test_packed_documents_that_mix_in_one_layer(mode):
    lengths = [5, 4, 4]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    given = {"input_ids": tokens(batch=1), "position_ids": positions, "use_cache": False}
    clean = check(tiny("Llama"), given, mode=mode)
    assert clean.ok
    assert clean.order == "causal within 3 packed documents, 5 + 4 + 4 tokens"
    with open_attention(tiny("Llama", attn_implementation="eager"), LAYER, pair(7, 2), head=3) as model:
        found = only(check(model, given, mode=mode))
        stated = only(check(model, given, order=af.masks.document(lengths), mode=mode))
    assert (found.layer, found.module, found.source, found.target) == (LAYER, "model.layers.1.self_attn", 2, 7)
    assert (stated.module, stated.source, stated.target) == (found.module, 2, 7)


@pytest.mark.parametrize("strength", [1.0, 1e-3, 1e-5])
def test_a_normalisation_over_the_sequence(strength, mode):
    found = only(check(centred(strength), tokens(), mode=mode))
    assert (found.layer, found.module) == (2, "model.layers.2.post_attention_layernorm")
    assert found.source > found.target


def test_a_convolution_that_looks_ahead(mode):
    found = only(check(convolved(), tokens(), mode=mode))
    assert (found.layer, found.module) == (LAYER, "model.layers.1.mlp.conv")
    assert found.source == found.target + 1


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("Mamba2", "backbone.layers.1.mixer"),
        ("Jamba", "model.layers.2.mamba"),
        ("Qwen3Next", "model.layers.2.linear_attn"),
    ],
)
def test_a_scan_that_also_runs_backwards(name, module, mode):
    model = tiny(name)
    scan = model.get_submodule(module)
    original = scan.forward

    def both_ways(hidden_states, *args, **kwargs):
        return original(hidden_states, *args, **kwargs) + 0.1 * original(hidden_states.flip(1), *args, **kwargs).flip(1)

    scan.forward = both_ways
    found = only(check(model, {**inputs(name), "use_cache": False}, mode=mode))
    assert found.module == module
    assert found.layer == int(module.split(".")[2])
    assert found.source > found.target


def test_crosstalk_in_the_batch(mode):
    model = tiny("GPT2")
    module = model.transformer.h[LAYER].mlp
    with wrapped(module, lambda out, hidden: out + 1e-3 * hidden.mean(0, keepdim=True)):
        found = only(check(model, tokens(batch=3), mode=mode), kind="batch")
    assert (found.layer, found.module) == (LAYER, "transformer.h.1.mlp")
    assert found.source_row != found.target_row
    assert found.source == found.target


def test_crosstalk_between_two_rows_only(mode):
    model = tiny("Bert")
    with wrapped(model.bert.encoder.layer[LAYER].intermediate, to_one_row):
        found = only(check(model, tokens(batch=5), mode=mode), kind="batch")
    assert (found.layer, found.module) == (LAYER, "bert.encoder.layer.1.intermediate")
    assert found.target_row == 3
    assert found.source_row == 1


def test_crosstalk_does_not_hide_an_order_leak(mode):
    model = tiny("Llama", attn_implementation="eager")
    early = model.model.layers[0].mlp
    with open_attention(model, 2, pair(5, 9)), wrapped(early, lambda out, hidden: out + 0.1 * hidden.mean(0)):
        report = check(model, tokens(), mode=mode)
    assert [(v.kind, v.module) for v in report.violations] == [
        ("batch", "model.layers.0.mlp"),
        ("order", "model.layers.2.self_attn"),
    ]
    assert (report.violations[1].source, report.violations[1].target) == (9, 5)


def test_a_decoder_that_reads_ahead(mode):
    model = tiny("T5")
    module = model.decoder.block[2].layer[2]
    with wrapped(module, lambda out, hidden: out + 1e-2 * hidden.roll(-1, 1)):
        found = only(check(model, inputs("T5"), mode=mode))
    assert (found.layer, found.module) == (2, "decoder.block.2.layer.2")
    assert LENGTH <= found.target < found.source < LENGTH + 9  # joint positions: the encoder's come first


def test_padding_that_is_read(mode):
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, :4] = 0
    model = tiny("Llama", attn_implementation="eager")
    with open_attention(model, 0, pair(8, 2)):
        found = only(check(model, {"input_ids": tokens(), "attention_mask": mask}, mode=mode))
    assert (found.layer, found.module, found.source, found.target) == (0, "model.layers.0.self_attn", 2, 8)
    assert found.target_row == 0  # in the other sequence position 2 is no padding


def test_a_leak_between_the_layers_is_the_models(mode):
    def run(hidden, layers):
        for index, layer in enumerate(layers):
            hidden = hidden + layer(hidden)
            if index == 1:
                hidden = hidden + 0.1 * hidden.flip(1)
        return hidden

    found = only(check(Stack(run, 3), tokens(1, 7), order=af.masks.causal(7), mode=mode))
    assert (found.layer, found.module) == (None, "Stack")
    assert found.source == 6 - found.target


def test_a_leak_that_is_discrete(mode):
    model = tiny("Llama")
    with wrapped(model.model.layers[LAYER].mlp, routed):
        report = check(model, tokens(batch=1), mode=mode)
        assert only(report).module == "model.layers.1.mlp"


def test_an_encoder_asked_to_be_causal(mode):
    found = only(check(tiny("Bert"), inputs("Bert"), order=af.masks.causal(LENGTH), mode=mode))
    assert (found.layer, found.module) == (0, "bert.encoder.layer.0.attention.self")
    assert found.source > found.target


def test_weak_leak_below_rounding_needs_more_precision():
    model = tiny("Llama")
    with wrapped(model.model.layers[LAYER].mlp, lambda out, hidden: out + 1e-12 * hidden.flip(1)):
        assert check(model, tokens(batch=1)).ok
        found = only(check(model, tokens(batch=1), dtype=torch.float64))
    assert found.module == "model.layers.1.mlp"


def test_leak_among_experts_is_told_from_their_rounding(mode):
    model = tiny("Qwen3Moe")
    module = model.model.layers[2].mlp
    with wrapped(module, lambda out, hidden: out + 1e-3 * hidden.roll(-1, 1)):
        report = check(model, tokens(batch=3), mode=mode)
    found = only(report)
    assert (found.layer, found.module, found.confirmed) == (2, "model.layers.2.mlp", True)
    assert found.source == found.target + 1


def test_state_that_outlives_a_call(mode):
    model = tiny("Llama")
    with wrapped(model.model.layers[LAYER].mlp, remembering()):
        found = only(check(model, tokens(), mode=mode), kind="state")
    assert (found.layer, found.module, found.source) == (LAYER, "model.layers.1.mlp", None)


def test_clean_is_quick():
    report = check(tiny("Llama"), tokens(1), mode="quick")
    assert (report.verdict, report.mode, report.coverage) == ("clean", "quick", 1.0)
    assert report.forward_passes == LENGTH


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_large_models_take_three_forwards(monkeypatch, batch):
    """What crosses a cut or the batch everywhere, as real bugs do, shows in two perturbations."""
    monkeypatch.setattr(audit, "_CHEAP", 0)
    model = tiny("Llama")
    clean = check(model, tokens(batch), mode="quick")
    assert (clean.verdict, clean.mode, clean.forward_passes) == ("clean", "quick", 3)
    assert 0 < clean.coverage < 1
    changes = [
        lambda out, hidden: out + 1e-3 * hidden.roll(-1, 1),
        lambda out, hidden: out + 1e-3 * hidden.mean(1, True),
    ]
    if batch > 1:
        changes.append(lambda out, hidden: out + 1e-3 * hidden.mean(0, True))
    for change in changes:
        with wrapped(model.model.layers[1].mlp, change):
            assert check(model, tokens(batch), mode="quick").verdict == "leak"


RELEASED = [5, 4, 3]
PACKED = {"input_ids": tokens(batch=1, length=12), "position_ids": torch.cat([torch.arange(n) for n in RELEASED])[None]}
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
    document = af.masks.document(RELEASED)
    if not mixed(document, MIXES[extra]):
        pytest.skip("this transformers keeps the documents apart")
    report = check(tiny(name), PACKED | MIXES[extra], order=document if stated else None, mode=mode)
    assert not report.ok
    first = report.violations[0]
    attention = {"GPT2": "transformer.h.0.attn"}.get(name, "model.layers.0.self_attn")
    assert (first.kind, first.layer, first.module) == ("order", 0, attention)
    assert first.source < 5 <= first.target or first.source < 9 <= first.target


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
