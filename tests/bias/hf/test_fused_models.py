"""Models whose bias runs through fused attention have the reference's values and gradients, whatever surrounds them."""

import copy

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel

import attnflow as af
from tests.bias.hf.common import (
    GUIDANCE,
    biased,
    config_of,
    disabled,
    family,
    handle_of,
    layer_biases,
    outputs,
    padded,
    tokens,
)

EVERY = {"layers": "every", "hidden_dim": 8, "rank": 3}
KINDS = {
    "key": config_of("key", **EVERY, share_heads=False),
    "key of all heads": config_of("key", **EVERY, reference="hidden"),
    "cumulative": config_of("cumulative", **EVERY, share_heads="kv"),
    "alibi": config_of("alibi", **EVERY),
    "lowrank": config_of("lowrank", **EVERY, reference="rotated"),
    "bilinear": config_of("bilinear", **EVERY, reference="per_head"),
    "dot": config_of("dot", **EVERY, reference="per_head", share_heads=False),
}
SEVERAL = (KINDS["cumulative"], KINDS["alibi"], KINDS["lowrank"])
BOTH_WAYS = (KINDS["key"], KINDS["lowrank"])
EXACT = {"rtol": 1e-9, "atol": 1e-12}


def run(model, backend, **inputs):
    """Outputs, and all gradients of a loss that every output moves; the backend that ran is the one that was named."""
    for _, bias in layer_biases(model):
        bias.backend = backend
    model.zero_grad()
    found = outputs(model, **inputs)
    found.double().sin().sum().backward()
    assert set(handle_of(model).backend.values()) == {backend}
    return found.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def agree(model, options=EXACT, **inputs):
    (found, gradients), (expected, true) = (run(model, backend, **inputs) for backend in ("fused", "reference"))
    torch.testing.assert_close(found, expected, **options)
    assert gradients.keys() == true.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, true[name], **options)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_with_columns(kind):
    agree(biased("Llama", (KINDS[kind],)), input_ids=tokens(2, 30))


@pytest.mark.parametrize("name", ["Llama", "Mistral", "GPT2", "Phi3", "GptOss", "Bert"])
def test_families_and_long_inputs(name):
    """Several blocks of queries; windows in Mistral, sinks in GptOss, both ways in Bert."""
    longer = {"n_positions": 160} if name == "GPT2" else {"max_position_embeddings": 160}
    model = biased(name, BOTH_WAYS if name == "Bert" else SEVERAL, **longer)
    # Transformers' own softmax of models with sinks is in float32; ours is not, in either arm.
    agree(model, input_ids=tokens(1, 150))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Bert"])
def test_padded_batches(name, side):
    model = biased(name, BOTH_WAYS if name == "Bert" else SEVERAL)
    agree(model, **padded((3, 40, 17), side)[1])


def test_masks_of_ours():
    model, ids = biased("Llama", SEVERAL, max_position_embeddings=160), tokens(2, 150)
    with af.masks.attach(model, af.masks.document([50, 1, 99])):
        agree(model, input_ids=ids)


def test_the_handle_says_what_ran():
    ids = tokens(1, 140)
    wide = {"max_position_embeddings": 160}
    with torch.no_grad():
        model = biased("Llama", (KINDS["key"],), **wide)
        assert set(handle_of(model).backend.values()) == {""}
        outputs(model, input_ids=ids)
        assert set(handle_of(model).backend.values()) == {"fused"}
        assert handle_of(model).backend.keys() == handle_of(model).layers.keys()
        outputs(model, input_ids=ids[:, :9])
        assert set(handle_of(model).backend.values()) == {"reference"}
        cache = model(ids[:, :20], use_cache=True).past_key_values
        model(ids[:, 20:21], past_key_values=cache)
        assert set(handle_of(model).backend.values()) == {"sdpa"}
        model = biased("Llama", GUIDANCE, **wide)
        outputs(model, input_ids=ids)
        assert all("tiled: Guidance is no short" in ran for ran in handle_of(model).backend.values())
    model = biased("Llama", (KINDS["key"],), **wide, attention_dropout=0.25).train()
    outputs(model, input_ids=ids)
    assert set(handle_of(model).backend.values()) == {
        "tiled: fused attention with columns drops no weights, but dropout is 0.25"
    }
    model = biased("Gemma2", (KINDS["key"],), **wide)
    for _, bias in layer_biases(model):
        bias.backend = "fused"
    with pytest.raises(ValueError, match="a soft cap would bend the bias"):
        outputs(model, input_ids=ids)


def test_a_prompt_goes_on_from_its_cache():
    model, ids = biased("Llama", SEVERAL, max_position_embeddings=200), tokens(2, 180)
    with torch.no_grad():
        whole = outputs(model, input_ids=ids, use_cache=False)
        first = model(ids[:, :140], use_cache=True)
        assert set(handle_of(model).backend.values()) == {"fused"}
        parts, cache = [first.logits], first.past_key_values
        for step in (1, 5, 30, 4):
            where = sum(part.shape[1] for part in parts)
            parts.append(model(ids[:, where : where + step], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_gradient_checkpointing():
    model, ids = biased("Llama", SEVERAL, max_position_embeddings=160).train(), tokens(1, 150)
    expected = run(model, "fused", input_ids=ids, use_cache=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = run(model, "fused", input_ids=ids, use_cache=False)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("autocast", [False, True], ids=["cast", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_as_close_to_float64_as_the_base_model(dtype, autocast):
    exact, ids = biased("Llama", SEVERAL, max_position_embeddings=160), tokens(2, 150)
    low = copy.deepcopy(exact).to(torch.float32 if autocast else dtype)
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=autocast):
        error = (outputs(low, input_ids=ids) - outputs(exact, input_ids=ids)).abs().mean()
        assert set(handle_of(low).backend.values()) == {"fused"}
        with disabled(low), disabled(exact):
            base = (outputs(low, input_ids=ids) - outputs(exact, input_ids=ids)).abs().mean()
    assert error < 4 * base
    with torch.autocast("cpu", dtype, enabled=autocast):
        _, gradients = run(low, "fused", input_ids=ids)
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32 if autocast else dtype}


@pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore:.is_gradient_checkpointing:FutureWarning")
def test_beside_an_adapter():
    model = get_peft_model(
        family("Llama", max_position_embeddings=160), LoraConfig(r=2, target_modules=["q_proj", "k_proj"])
    )
    af.bias.attach(model, SEVERAL)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.5)
    agree(model.to(torch.float64), input_ids=tokens(1, 150))
    assert any("lora" in name and p.grad is not None for name, p in model.named_parameters())


def test_distributed_data_parallel():
    """Every parameter gets a gradient, or DDP would wait for it."""
    model, ids = biased("Llama", SEVERAL, torch.float32, max_position_embeddings=160), tokens(2, 150)
    _, expected = run(model, "fused", input_ids=ids)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model)
        for _ in range(2):  # the second pass fails where the first left a parameter without a gradient
            model.zero_grad()
            outputs(wrapped, input_ids=ids).double().sin().sum().backward()
    finally:
        dist.destroy_process_group()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])
