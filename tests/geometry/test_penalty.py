"""The penalty: its value and gradient against dense float64, frozen parts, and training with it."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import attnflow as af
from attnflow.models.weights.attention import attention_layers
from tests.models import deep

MODELS = {
    "bert": lambda: deep("Bert"),
    "gqa": lambda: deep("Llama"),
    "narrow keys": lambda: deep("Llama", num_key_value_heads=1),
    "with cross-attention": lambda: deep("T5"),
}


def dense(model, target, per_head):
    """The definition, with every d x d matrix formed and split into its symmetric and skew-symmetric parts."""
    total = torch.zeros((), dtype=torch.float64)
    for live in attention_layers(model):
        if live.kind == "cross":
            continue
        query = live.query().unflatten(0, (live.num_heads, -1))
        key = live.key().unflatten(0, (live.num_kv_heads, -1)).repeat_interleave(live.num_heads // live.num_kv_heads, 0)
        forms = query.mT @ key
        forms = forms if per_head else forms.sum(0, keepdim=True)
        symmetric, skew = (forms + forms.mT) / 2, (forms - forms.mT) / 2
        scores = (symmetric.square().sum((1, 2)) - skew.square().sum((1, 2))) / forms.square().sum((1, 2))
        total = total + (1 - scores.mean() if target == "symmetric" else 1 + scores.mean())
    return total


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("target", ["symmetric", "skew"])
@pytest.mark.parametrize("name", MODELS)
def test_value_and_gradient_are_those_of_the_definition(name, target, per_head):
    model = MODELS[name]().double()
    expected = dense(model, target, per_head)
    parameters = [p for live in attention_layers(model) if live.kind == "self" for p in live.parameters.values()]
    wanted = torch.autograd.grad(expected, parameters)
    got = af.geometry.penalty(model, target, per_head)
    assert got.item() == pytest.approx(expected.item(), rel=1e-12)
    for one, other in zip(torch.autograd.grad(got, parameters), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        assert other.abs().max() > 0


def test_other_parameters_have_no_gradient_and_frozen_ones_add_a_constant():
    model = MODELS["bert"]()
    model.bert.encoder.layer[0].requires_grad_(False)
    model.bert.encoder.layer[1].attention.self.key.requires_grad_(False)
    af.geometry.penalty(model).backward()
    touched = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    path = "bert.encoder.layer.{}.attention.self.{}.weight"
    assert touched == {path.format(1, "query"), path.format(2, "query"), path.format(2, "key")}
    value = af.geometry.penalty(model.requires_grad_(False))
    assert not value.requires_grad
    (value + torch.ones((), requires_grad=True)).backward()


def test_zero_weights_add_one_without_gradient():
    model = MODELS["bert"]()
    for layer in model.bert.encoder.layer:
        nn.init.zeros_(layer.attention.self.query.weight)
    for per_head in (False, True):
        model.zero_grad()
        value = af.geometry.penalty(model, per_head=per_head)
        assert value.item() == 3
        value.backward()
        gradients = [p.grad for live in attention_layers(model) for p in live.parameters.values()]
        assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)


def test_half_precision_is_computed_in_float32():
    model = MODELS["gqa"]()
    rounded = MODELS["gqa"]()
    rounded.load_state_dict(model.state_dict())
    rounded.bfloat16()
    expected = MODELS["gqa"]().double()
    expected.load_state_dict({name: value.double() for name, value in rounded.state_dict().items()})
    got = af.geometry.penalty(rounded)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(dense(expected, "symmetric", False).item(), rel=1e-5)
    got.backward()
    assert next(iter(attention_layers(rounded)[0].parameters.values())).grad.dtype == torch.bfloat16


def test_autocast_does_not_lower_the_precision():
    model = MODELS["gqa"]()
    expected = af.geometry.penalty(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = af.geometry.penalty(model)
    assert got.dtype == torch.float32
    assert got.item() == expected.item()


def test_wrapped_models():
    model = MODELS["gqa"]()
    expected = af.geometry.penalty(model).item()
    assert af.geometry.penalty(nn.DataParallel(model)).item() == expected


def test_sharded_weights_are_refused():
    model = MODELS["gqa"]()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        for use in (af.geometry.penalty, af.geometry.init_symmetric_):
            with pytest.raises(af.UnsupportedArchitecture, match="but they are sharded by FSDP2: "):
                use(model)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_models():
    model = MODELS["gqa"]()
    assert af.geometry.penalty(torch.compile(model)).item() == af.geometry.penalty(model).item()


@pytest.mark.parametrize("target", ["symmetric", "skew"])
@pytest.mark.parametrize("per_head", [False, True])
def test_descent_reaches_the_target(target, per_head):
    model = deep("Llama", initializer_range=0.02)
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
    first = af.geometry.penalty(model, target, per_head).item()
    for _ in range(150):
        optimizer.zero_grad()
        loss = af.geometry.penalty(model, target, per_head)
        loss.backward()
        optimizer.step()
    assert first > 2.5
    assert loss.item() < 0.2
