"""The order of models with linear attention, KDA and GDN among them: the question that the hasse paper leaves open."""

import pytest
import torch
import transformers

import attnflow as af
from attnflow.audit import check, measure
from tests.audit.common import LENGTH, tokens, wrapped

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "initializer_range": 0.2}
HEADS = {**SIZES, "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
HYBRID = {"num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DENSE = {"mlp_layer_types": ["dense"] * 3}
KDA = {**HEADS, **HYBRID, **LATENT, **DENSE}
RECURRENT = {
    "KimiLinear": KDA | {"linear_head_dim": 8, "linear_num_heads": 4},
    "BailingHybrid": KDA | {"head_dim": 8},
    "OlmoHybrid": HEADS
    | HYBRID
    | {f"linear_{what}": size for what, size in [("num_key_heads", 4), ("num_value_heads", 4)]}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "Rwkv": {**SIZES, "attention_hidden_size": 32},
}
FULL = {
    "Nystromformer": {**HEADS, "num_landmarks": 4, "segment_means_seq_len": 12, "conv_kernel_size": 3},
    "FNet": SIZES,
}
CAUSAL = af.masks.causal(LENGTH)


def model(name, head="ForCausalLM"):
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**(RECURRENT | FULL)[name])
    return getattr(transformers, name + head)(config).eval()


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrence_is_a_dense_chain(name):
    ids = tokens(1)
    flow = measure(model(name), ids)
    assert list(flow.masks) == [CAUSAL] * 3
    assert flow.depth == 1
    assert flow.hasse.edges == [(i, i + 1) for i in range(LENGTH - 1)]
    report = check(model(name), ids)
    assert report.ok, report


def test_a_leak_of_kda_is_measured_and_found():
    kimi, ids = model("KimiLinear"), tokens(1)
    with wrapped(kimi.model.layers[2].self_attn, lambda out, *_, hidden_states, **__: out + hidden_states.roll(-1, 1)):
        further = af.masks.from_dense(torch.ones(LENGTH, LENGTH).tril(1).bool())
        assert list(measure(kimi, ids).masks) == [CAUSAL, CAUSAL, further]
        assert check(kimi, ids).violations[0].module == "model.layers.2.self_attn"


def test_a_gate_that_forgets_is_a_sparse_realisation():
    """The order stays the chain; what one layer forgets takes several."""
    kimi = model("KimiLinear")
    with torch.no_grad():
        for layer in (0, 2):
            kimi.model.layers[layer].self_attn.forget_gate.A_log.fill_(3.0)
            kimi.model.layers[layer].self_attn.forget_gate.dt_bias.fill_(3.0)
    flow = measure(kimi, tokens(1))
    window = af.masks.sliding_window(LENGTH, 4)  # of the convolution in front of the recurrence
    assert list(flow.masks) == [window, CAUSAL, window]
    assert (af.order.analyze(window).depth, flow.depth) == (4, 2)
    assert flow.hasse.edges == [(i, i + 1) for i in range(LENGTH - 1)]


@pytest.mark.parametrize("name", FULL)
def test_encoders_of_linear_cost_are_one_class(name):
    flow = measure(model(name, "ForMaskedLM"), tokens(1, 12))
    assert list(flow.masks) == [af.masks.full(12)] * 3
    assert flow.classes == [tuple(range(12))]
    assert flow.hasse.edges == []


def test_two_scans_are_the_butterfly_mask():
    """Linear attention under `af.masks.butterfly(n)` is two scans, and a read of both states at each centre."""
    n, width = 7, 5
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 3 * n - 2, width, generator=generator, dtype=torch.float64)
    allow = af.masks.butterfly(n).dense().double()
    masked = (q @ k.T * allow) @ v
    states = k[:, :, None] * v[:, None, :]
    ahead, back = states[: n - 1].cumsum(0), states[n - 1 : 2 * n - 2].flip(0).cumsum(0).flip(0)
    none = torch.zeros(1, width, width, dtype=torch.float64)
    centres = torch.cat([none, ahead]) + torch.cat([back, none]) + states[2 * n - 2 :]
    scanned = torch.einsum("nk,nkv->nv", q, torch.cat([ahead, back, centres]))
    assert torch.allclose(scanned, masked, rtol=0, atol=1e-12)
