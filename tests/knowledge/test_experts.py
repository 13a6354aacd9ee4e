"""Experts as entries: the same function, gradients and edits as in the model's own tensors, and back bit for bit."""

import copy

import pytest
import torch
from torch import nn

import attnflow as af
from attnflow.knowledge.conversion_check import verify
from attnflow.knowledge.layered import ExpertEntries, readers
from attnflow.models.passes.evaluation import precision
from attnflow.models.subject import Subject
from tests.models import deep, outputs, tiny
from tests.models.table import in_double

NAMES = ["Qwen3Moe", "DeepseekV3", "GptOss", "GraniteMoe", "Llama4", "Mixtral", "NemotronH"]
IDS = torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(0))  # drawn once: the same in every process


def made(name, **changes):
    """A tiny model in float64 whose experts are far from linear and differ from one another."""
    torch.manual_seed(0)
    model = in_double(deep(name, **changes))
    generator = torch.Generator().manual_seed(1)
    for path, parameter in model.named_parameters():
        if "experts" in path or "router" in path or "gate.weight" in path:
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return model.eval()


def logits(model, ids=IDS):
    with precision(model, torch.float64):
        return outputs(model, input_ids=ids)


def relative(one, other):
    return float(((one - other).abs().amax() / other.abs().amax()).detach())


def expert_readers(model):
    return [reader for reader in readers(model) if isinstance(reader, ExpertEntries)]


def columns(name, module, neuron):
    """Where the model's own tensors keep a neuron: keys, value, thresholds: (tensor, index after the expert)."""
    size = module.down_proj.shape[1 if name in ("GptOss", "Llama4") else 2]
    if name == "GptOss":  # [in, out], gate and up side by side
        keys = [(module.gate_up_proj, (slice(None), 2 * neuron + part)) for part in (0, 1)]
        thresholds = [(module.gate_up_proj_bias, (2 * neuron + part,)) for part in (0, 1)]
        return keys, (module.down_proj, (neuron,)), thresholds
    if name == "Llama4":
        keys = [(module.gate_up_proj, (slice(None), neuron + part * size)) for part in (0, 1)]
        return keys, (module.down_proj, (neuron,)), []
    first = module.up_proj if name == "NemotronH" else module.gate_up_proj
    keys = [(first, (neuron + part * size,)) for part in range(len(first[0]) // size)]
    return keys, (module.down_proj, (slice(None), neuron)), []


@pytest.mark.parametrize("name", NAMES)
def test_the_same_function_and_back_bit_for_bit(name):
    model = made(name)
    before, expected = copy.deepcopy(model.state_dict()), logits(model)
    opened = af.knowledge.from_ffn(model)
    assert expert_readers(opened)
    assert relative(logits(opened), expected) < 1e-10
    left = [path for path, one in opened.named_parameters() if one.ndim == 3 and "conv" not in path]
    assert not left
    back = af.knowledge.to_ffn(opened)
    assert list(back.state_dict()) == list(before)
    for one in (back, model):
        assert all(torch.equal(value, before[path]) for path, value in one.state_dict().items())
    assert torch.equal(logits(back), expected)
    assert back.config.to_dict() == model.config.to_dict()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_models_own_tensors(name):
    model = made(name)
    opened = af.knowledge.from_ffn(model)
    for one in (model, opened):
        logits(one).square().mean().backward()
    base = opened.knowledge
    for reader in expert_readers(opened):
        own, layout = model.get_submodule(reader.form.name), reader.layout
        for expert in range(reader.form.num_experts):
            rows = base.entries.grad[base.rows(reader.layer, expert)]
            for neuron in (0, 3):
                keys, (value, at), thresholds = columns(name, own, neuron)
                pairs = [(layout.key(part), *key) for part, key in zip(layout.parts, keys, strict=True)]
                pairs += [(layout.value, value, at)]
                pairs += [(layout.threshold(p), *where) for p, where in zip(layout.parts, thresholds, strict=False)]
                for column, tensor, index in pairs:
                    torch.testing.assert_close(rows[neuron, column], tensor.grad[expert][index], rtol=1e-9, atol=1e-14)
    routers = [p for p, one in model.named_parameters() if "router" in p or p.endswith("mlp.gate.weight")]
    others = dict(opened.named_parameters())
    for path in routers:
        gradient = dict(model.named_parameters())[path].grad
        if gradient is not None:
            torch.testing.assert_close(others[path].grad, gradient, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_an_edit_is_an_edit_of_the_models_own_tensors(name):
    model = made(name)
    opened = af.knowledge.from_ffn(model)
    base, reader = opened.knowledge, expert_readers(opened)[0]
    expected = logits(model)
    for expert in range(reader.form.num_experts):
        entry = torch.randn(1, base.entry_dim, dtype=torch.float64)
        neuron, layout = 2, reader.layout
        if layout.padding:
            entry[:, layout.value.stop : layout.threshold(layout.parts[0])] = 0
        keys, (value, at), thresholds = columns(name, model.get_submodule(reader.form.name), neuron)
        with torch.no_grad():
            for part, (tensor, index) in zip(layout.parts, keys, strict=True):
                tensor[expert][index] = entry[0, layout.key(part)]
            value[expert][at] = entry[0, layout.value]
            for place, part in enumerate(layout.parts):
                if thresholds:
                    thresholds[place][0][expert][thresholds[place][1]] = entry[0, layout.threshold(part)]
                else:
                    entry[0, layout.threshold(part)] = 0
        base.update([int(base.ids[base.rows(reader.layer, expert)][neuron])], entry)
    changed = logits(model)
    assert not torch.allclose(changed, expected, rtol=1e-6)
    assert relative(logits(opened), changed) < 1e-10


def test_entries_come_and_go_in_an_expert():
    model = made("Qwen3Moe")
    opened, expected = af.knowledge.from_ffn(model), logits(model)
    base = opened.knowledge
    assert base.num_experts(0) == 4
    assert base.counts.tolist() == [64, 64, 64]
    new = base.insert(1, torch.zeros(2, base.entry_dim, dtype=torch.float64), expert=2)
    assert base.expert_of(new) == [2, 2]
    assert base.layer_of(new) == [1, 1]
    assert base.rows(1, 2) == slice(64 + 32, 64 + 50)
    torch.testing.assert_close(logits(opened), expected, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="experts or layers, but they now have 16 to 18"):
        af.knowledge.to_ffn(opened)
    entries = torch.randn(2, base.entry_dim, dtype=torch.float64)
    entries[:, -2:] = 0
    base.update(new, entries)
    changed = logits(opened)
    assert not torch.allclose(changed, expected)
    for layer in range(3):
        for expert in range(4):
            if (layer, expert) != (1, 2):
                base.insert(layer, torch.zeros(2, base.entry_dim, dtype=torch.float64), expert=expert)
    back = af.knowledge.to_ffn(opened)
    assert back.config.moe_intermediate_size == 18
    assert back.model.layers[1].mlp.experts.gate_up_proj.shape == (4, 36, 32)
    torch.testing.assert_close(logits(back), changed, rtol=1e-10, atol=1e-12)
    base.delete(new)
    torch.testing.assert_close(logits(opened), expected, rtol=1e-10, atol=1e-12)
    base.delete(base.ids[base.rows(0, 3)])  # an expert without entries writes nothing
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj[3] = 0
    torch.testing.assert_close(logits(opened), logits(model), rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="layer 0 has 4 experts: pass expert=0 to 3"):
        base.insert(0, entries)
    with pytest.raises(ValueError, match="expert must be"):
        base.insert(0, entries, expert=4)
    with pytest.raises(ValueError, match="layer 0 has no experts, got expert="):
        af.knowledge.from_ffn(tiny("Llama")).knowledge.insert(0, entries, expert=0)


def test_activity_counts_what_the_router_chose():
    model = af.knowledge.from_ffn(made("Mixtral", num_local_experts=4))
    real = torch.ones_like(IDS)
    real[0, :3] = 0
    readings = []
    with af.knowledge.activity(model) as seen:
        reader = expert_readers(model)[0]
        count = reader.observer
        reader.observer = lambda reading: (readings.append(reading), count(reading))
        model(input_ids=IDS, attention_mask=real)
    layer = seen.report().layers[0]
    assert (layer.tokens, layer.entries, layer.read_all) == (IDS.numel() - 3, 4 * 48, True)
    there = readings[0].weights[:, 0].new_zeros(IDS.numel(), 4 * 48)
    positive = (readings[0].scores[0, :, 0] > 0) & (readings[0].ids[:, 0] >= 0)
    there.scatter_(1, readings[0].ids[:, 0], positive.to(there))
    fired = there[real.flatten().bool()].sum(dim=0).long()
    assert torch.equal(seen.fired(0)[1], fired)


def test_experts_of_one_layer_that_cannot_be_read_refuse_the_model():
    model = made("Qwen2Moe")
    whole, experts = af.knowledge.from_ffn(model).knowledge, model.layers[1].mlp.experts
    own = experts.forward
    experts.forward = lambda hidden_states, index, weights: own(hidden_states, index, weights).tanh()
    with pytest.raises(af.UnsupportedArchitecture, match=r"layers\.1\.mlp\.experts \(2 matrices\) cannot be converted"):
        af.knowledge.from_ffn(model)
    partly = af.knowledge.from_ffn(model, partial=True)
    left = experts.down_proj.shape[0] * experts.down_proj.shape[2]  # neurons of the experts
    assert partly.knowledge.num_entries == whole.num_entries - left


def test_an_expert_is_cross_attention_to_its_rows():
    model = made("Mixtral")
    base, hidden = af.knowledge.from_ffn(model).knowledge, torch.randn(5, 32, dtype=torch.float64)
    own = model.model.layers[1].mlp.experts
    gate, up = nn.functional.linear(hidden, own.gate_up_proj[1]).chunk(2, dim=-1)
    expected = nn.functional.linear(own.act_fn(gate) * up, own.down_proj[1])
    found = base.attention(1, "silu")(hidden, base.entries[base.rows(1, 1)])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_the_check_is_not_misled_by_a_choice_that_rounding_turns():
    """A router that deems two experts equal: the last digit of the token decides."""
    model = made("Qwen3Moe").to(torch.bfloat16)
    for layer in model.model.layers:
        with torch.no_grad():
            layer.mlp.gate.weight[:] = layer.mlp.gate.weight[:1]
            layer.mlp.gate.weight.add_(torch.randn_like(layer.mlp.gate.weight) * 1e-3)
    opened = af.knowledge.from_ffn(model)
    assert opened.knowledge.entries.dtype == torch.bfloat16
    assert not any(reader._forward_pre_hooks for reader in expert_readers(opened))
    with torch.no_grad():
        opened.knowledge.entries[:, reader_values(opened)] *= 1.5
    with pytest.raises(af.UnsupportedArchitecture, match="was not converted exactly"):
        verify(Subject(model), opened, opened.knowledge, [reader.form.name for reader in expert_readers(opened)])


def reader_values(model):
    return expert_readers(model)[0].layout.value
