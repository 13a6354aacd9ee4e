"""A converted model learns what slices of its base would, without a gradient of the whole base for each layer."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attnflow as af
from attnflow.knowledge.base import LayeredKnowledge
from tests.conformance.miniature import Architecture, build
from tests.models import outputs, tiny, tokens

EXPERTS = {"Mixtral": ("mixtral", "MixtralForCausalLM"), "Llama4": ("llama4_text", "Llama4ForCausalLM")}


@pytest.fixture
def sliced(monkeypatch):
    """Switches to the definition: every layer slices the one parameter."""
    return lambda: monkeypatch.setattr(LayeredKnowledge, "_shared", lambda self: None)


def converted(name):
    torch.manual_seed(0)
    model = build(Architecture(*EXPERTS[name], "decoder")) if name in EXPERTS else tiny(name, torch.float64)
    return af.knowledge.from_ffn(model.double(), check=False).train()


def loss_of(model, ids):
    return outputs(model, input_ids=ids, **({} if model.config.model_type == "bert" else {"use_cache": False})).sin()


def close(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Phi3", "Bert", *EXPERTS])
def test_steps_of_micro_batches_are_those_of_slices(name, sliced):
    """AdamW on sums of two micro-batches, then a layer alone, whose gradient leaves the others zero."""
    ours, theirs = converted(name), converted(name)

    def train(model):
        torch.manual_seed(1)
        optimizer, gradients = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for number in range(3):
            optimizer.zero_grad()
            for batch in tokens(4, 7 + number).split(2):
                loss_of(model, batch).mean().backward()
            gradients.append(model.knowledge.entries.grad.clone())
            optimizer.step()
        return gradients, model.state_dict()

    found = train(ours)
    sliced()
    expected = train(theirs)
    close(found[0], expected[0])
    assert expected[0][0].any(dim=1).any()
    assert list(found[1]) == list(expected[1])
    for key, value in expected[1].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-9, atol=1e-9)  # AdamW divides by small numbers


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_second_derivatives_retained_graphs_and_single_gradients(name, sliced):
    ids = tokens(2, 5)

    def derivatives(model):
        entries = model.knowledge.entries
        loss = loss_of(model, ids).mean()
        (first,) = torch.autograd.grad(loss, entries, create_graph=True)
        (again,) = torch.autograd.grad(loss, entries, retain_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), entries, retain_graph=True)
        loss.backward()
        rows = model.knowledge.block(0)
        (alone,) = torch.autograd.grad(rows.square().sum(), entries)
        return first.detach(), again, second, entries.grad, alone

    model = converted(name)
    model.eval().set_attn_implementation("eager")  # SDPA has no second derivative
    found = derivatives(model)
    sliced()
    model.zero_grad()
    expected = derivatives(model)
    close(found, expected)
    close(found[0], found[1])
    assert not found[4][model.knowledge.rows(1)].any()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # peft knows the old name alone
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_and_adapters(reentrant, sliced):
    peft, ids = pytest.importorskip("peft"), tokens(2, 6)

    def gradients(frozen):
        model = converted("Llama")
        if frozen:
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=True))
            torch.manual_seed(1)
            for name, parameter in model.named_parameters():
                if "lora" in name:
                    torch.nn.init.normal_(parameter)
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    found = [gradients(frozen) for frozen in (False, True)]
    sliced()
    expected = [gradients(frozen) for frozen in (False, True)]
    close(found, expected)
    assert "knowledge.entries" in found[0]
    assert found[1]
    assert not any("knowledge" in name for name in found[1])


def test_views_follow_the_entries_wherever_they_go():
    """A copy, another type, an edit, a frozen base, modes and transformations: no view of before is read."""
    model, ids = converted("Llama"), tokens(1, 5)

    def run(model):
        return outputs(model, input_ids=ids, use_cache=False)

    run(model).sum().backward()
    base = model.knowledge
    copied = copy.deepcopy(model)
    assert copied.knowledge.block(0).data_ptr() == copied.knowledge.entries.data_ptr()
    with torch.no_grad():
        base.entries.mul_(1.5)
    expected = run(copied.float())
    assert expected.dtype == torch.float32
    with torch.no_grad():
        assert not run(model).requires_grad
    assert run(model).requires_grad
    base.entries.requires_grad_(False)
    assert not base.block(1).requires_grad
    base.entries.requires_grad_(True)
    assert base.block(1).requires_grad
    with torch.inference_mode():
        run(model)
    fresh = af.knowledge.from_ffn(tiny("Llama", torch.float64), check=False)
    fresh.knowledge.block(0)
    inputs = fresh.model.embed_tokens(ids).detach()
    _, pull = torch.func.vjp(lambda x: fresh(inputs_embeds=x, use_cache=False).logits.sum(), inputs)
    assert pull(torch.ones((), dtype=torch.float64))[0].any()
    loss_of(fresh, ids).sum().backward()
    assert fresh.knowledge.entries.grad is not None
    before = run(model)
    base.entries.data = base.entries.data * 0
    assert not torch.equal(run(model), before)


class Large(TorchDispatchMode):
    """Counts tensors as large as the base that operators make anew."""

    def __init__(self, size):
        super().__init__()
        self.size, self.made = size, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if (
            isinstance(result, torch.Tensor)
            and result.numel() == self.size
            and function.overloadpacket.__name__ != "view"
        ):
            self.made.append(function.overloadpacket.__name__)
        return result


@pytest.mark.parametrize("layers", [2, 6])
def test_the_backward_pass_makes_one_gradient_of_the_base(layers):
    model = af.knowledge.from_ffn(tiny("Llama", torch.float64, num_hidden_layers=layers), check=False)
    loss = loss_of(model, tokens(1, 5)).mean()
    with (large := Large(model.knowledge.entries.numel())):
        loss.backward()
    assert [name for name in large.made if name != "detach"] == ["cat"]


@pytest.mark.compiled
def test_a_compiled_model_learns_the_same():
    model, ids = converted("Llama"), tokens(2, 6)
    loss_of(model, ids).mean().backward()
    expected, model.knowledge.entries.grad = model.knowledge.entries.grad, None
    loss_of(torch.compile(model, backend="aot_eager"), ids).mean().backward()
    torch.testing.assert_close(model.knowledge.entries.grad, expected, rtol=1e-9, atol=1e-9)
