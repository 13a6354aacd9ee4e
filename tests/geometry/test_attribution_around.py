"""What a user has around a model: threads, hooks, a default device, an own implementation of attention, copies."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from torch._dynamo import eval_frame
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import attnflow as af
from attnflow.models.passes.stream import ResidualStream
from tests.geometry.test_attribution_bounds import (
    IDS,
    UNSUPPORTED,
    agrees,
    llama,
    plain,
    refused,
    same,
    state,
)
from tests.models import deep


def test_threads_take_turns_and_leave_nothing():
    model = llama().train()
    before, stance = state(model), eval_frame._stance

    def work(_):
        return af.geometry.attribute(model, IDS, layer=2)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(24)))
    assert same(before, state(model))
    assert eval_frame._stance == stance
    for result in found:
        agrees(result, plain())


@pytest.mark.parametrize("projection", ["q_proj", "k_proj"])
@pytest.mark.parametrize("position", [3, 8])
def test_a_hook_that_patches_one_position(projection, position):
    """There the query, or the key, is a constant; elsewhere all is as without the hook."""

    def patch(module, inputs, output):
        output = output.clone()
        output[:, position] = 0.7
        return output

    model = llama()
    model.model.layers[2].self_attn.get_submodule(projection).register_forward_hook(patch)
    for query in (3, 8):
        result = af.geometry.attribute(model, IDS, layer=2, query=query)
        expected = af.geometry.attribute(llama(), IDS, layer=2, query=query).raw.clone()
        if projection == "k_proj" and position <= query:
            expected[:, position] = 0
        if projection == "q_proj" and position == query:
            expected.zero_()
        torch.testing.assert_close(result.raw, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("Llama", "model.layers.1.mlp"),
        ("Llama", "model.layers.1.self_attn"),
        ("Bert", "bert.encoder.layer.1.output.dense"),
    ],
)
def test_a_hook_that_writes_to_an_output(name, path):
    """It gives what a hook gives that returns another tensor."""

    def doubled(copied):
        def hook(module, inputs, output):
            first = output[0] if isinstance(output, tuple) else output
            first = first.clone() if copied else first
            first[:, 3:] *= 2
            return (first, *output[1:]) if isinstance(output, tuple) else first

        return hook

    found = []
    for copied in (True, False):
        model = deep(name).double().eval()
        model.get_submodule(path).register_forward_hook(doubled(copied))
        result = af.geometry.attribute(model, IDS, layer=2, head=1)
        found.append([result.raw, result.scores])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def test_an_implementation_of_the_user():
    def tripled(*args, scaling, **kwargs):
        return sdpa_attention_forward(*args, scaling=3 * scaling, **kwargs)

    AttentionInterface.register("tests_tripled", tripled)
    AttentionMaskInterface.register("tests_tripled", sdpa_mask)
    model = llama()
    model.set_attn_implementation("tests_tripled")
    refused(model, UNSUPPORTED, "the model attends by 'tests_tripled', an implementation of its own")
    for read in (lambda: af.geometry.pairs(model, IDS, 2), lambda: af.geometry.score(model, inputs=IDS)):
        with pytest.raises(af.UnsupportedArchitecture, match="an implementation of its own, so that its scores"):
            read()


def test_autocast_around_geometry_in_use():
    model = llama().float()
    expected = af.geometry.pairs(model, IDS, 2, 1).scores, [row.in_use for row in af.geometry.score(model, inputs=IDS)]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(af.geometry.pairs(model, IDS, 2, 1).scores, expected[0])
        assert [row.in_use for row in af.geometry.score(model, inputs=IDS)] == expected[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_that_are_all_equal(dtype):
    """Equal tokens without positions have equal keys: the row has no range, but that of rounding."""
    inputs = {"input_ids": torch.full((1, 9), 5), "position_ids": torch.zeros(1, 9, dtype=torch.long)}
    inputs["attention_mask"] = torch.ones(1, 9, dtype=torch.long)
    result = af.geometry.attribute(llama().to(dtype), inputs, 2, 1)
    size = result.scores.abs().max()
    assert (
        (result.raw.sum((1, 2)) + result.constant - result.scores).abs() <= 1e2 * torch.finfo(dtype).eps * size
    ).all()
    assert result.centred.abs().max() <= 1e3 * torch.finfo(dtype).eps * size


@pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore:.*gradient_checkpointing:FutureWarning")
def test_prompt_tuning_beside_pads():
    """The mask is of the text, before which the prompt has three tokens."""
    model = llama()
    tuned = get_peft_model(model, PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")).double().eval()
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    inputs["attention_mask"][:, 7:] = 0
    assert af.geometry.attribute(tuned, inputs, 2, 1, query=9).query_token == "9"
    with pytest.raises(ValueError, match="query 10 is a pad"):
        af.geometry.attribute(tuned, inputs, 2, 1, query=10)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_default_device_is_not_that_of_results(implementation):
    """Results are on the CPU; the meta device stands for one that the tests do not have."""
    model = llama()
    model.set_attn_implementation(implementation)
    reading = af.geometry.reading(model, {"input_ids": IDS})
    reading.explain(2)
    with torch.device("meta"):
        result = reading.explain(2)
        agrees(result, plain())


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])  # by products of matrices, and by differentiation
def test_one_pass_explains_as_attribute_does_bit_for_bit(monkeypatch, name):
    model, passes = deep(name), []
    record = ResidualStream.record
    monkeypatch.setattr(ResidualStream, "record", lambda *a, **k: passes.append(1) or record(*a, **k))
    asked = [(2, None, -1), (2, 1, -1), (2, 3, 4), (1, 0, 5), (-1, 1, 3)]
    with af.geometry.reading(model, IDS.clone()) as reading:
        assert "no pass yet" in str(reading)
        found = [reading.explain(*one) for one in asked]
        assert "the pass up to layer 2 is kept" in str(reading)
    assert len(passes) == 3  # the first three are of one layer
    for one, result in zip(asked, found, strict=True):
        assert result.to_json() == af.geometry.attribute(model, IDS, *one).to_json()
    with pytest.raises(RuntimeError, match=r"was removed: call af\.geometry\.reading again"):
        reading.explain(2)


def test_inputs_that_are_written_to_while_they_are_read():
    ids = IDS.clone()
    with af.geometry.reading(llama(), ids) as reading:
        ids.zero_()
        agrees(reading.explain(2), plain())


def test_a_model_that_changes_while_it_is_read():
    model = llama()
    with af.geometry.reading(model, IDS) as reading:
        reading.explain(2)
        with torch.no_grad():
            model.model.layers[2].self_attn.k_proj.weight.mul_(2)
        with pytest.raises(UNSUPPORTED, match="do not add up"):
            reading.explain(2)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_hold_no_model(copied):
    result = copied(plain())
    agrees(result, plain())
    assert len(pickle.dumps(result)) < 2 * result.raw.numel() * 8


@pytest.mark.parametrize("name", ["inputs_embeds", "attention_mask"])
def test_floating_point_inputs_in_inference_mode(name):
    model = llama()
    mask = torch.ones(1, 1, 9, 9).double().tril().log()
    with torch.inference_mode():
        inputs = {"inputs_embeds": model.model.embed_tokens(IDS)}
        if name == "attention_mask":
            inputs = {"input_ids": IDS, name: mask}
        result = af.geometry.attribute(model, inputs, layer=2)
    agrees(result, plain())
