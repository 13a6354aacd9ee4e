"""Bad arguments of every public function of the room: the error says what was expected and what came."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import DynamicCache, Gemma3nForCausalLM

import attnflow as af
from attnflow.bias.config import config_from_dict
from tests.bias.cases import Additive
from tests.bias.hf.common import GUIDANCE, biased, disabled, disturb, family, handle_of, outputs, tokens, untouched
from tests.bias.test_map import make
from tests.conformance.miniature import Architecture, build
from tests.models import WITHOUT_INTERFACE

B = af.bias
CHECKED = "Type-check error"  # which comes first while the tests run under the type checker
Q, K = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8)
META = torch.zeros(2, 1, 7, device="meta")


class Flat(nn.Module):
    def forward(self, query, key):
        return query[..., 0]


def model():
    return biased("Llama", B.GuidanceConfig(layers=[1], hidden_dim=4), torch.float32)


def capture(*arguments, **options):
    return lambda: B.capture(model(), *arguments, **options)


def attach(*arguments, **options):
    return lambda: B.attach(family("Llama"), *arguments, **options)


def attention(query=Q, key=K, value=K, terms=(), *arguments, **options):
    return lambda: B.attention(query, key, value, terms, *arguments, **options)


TABLE: list[tuple[Callable[[], object], str]] = [
    # configs
    (lambda: B.GuidanceConfig(reference="keys"), "reference must be one of"),
    (lambda: B.GuidanceConfig(init="normal"), "init must be one of 'zero', 'kaiming'"),
    (lambda: B.GuidanceConfig(rope="none"), "rope must be one of"),
    (lambda: B.DotConfig(share_heads="query"), "share_heads must be one of True, False, 'kv'"),
    (lambda: B.KeyConfig(hidden_dim=0), "hidden_dim must be at least 1, got 0"),
    (lambda: B.KeyConfig(hidden_dim=8.0), "hidden_dim must be an integer"),
    (lambda: B.LowRankConfig(rank=0), "rank must be at least 1"),
    (lambda: B.RelativeConfig(num_buckets=2), "num_buckets must be at least 4"),
    (lambda: B.RelativeConfig(max_distance=8), r"max_distance must exceed num_buckets // 4 = 8"),
    (lambda: B.GuidanceConfig(layers="some"), "layers must be one of 'every'"),
    (lambda: B.GuidanceConfig(layers=3), r"such as \[0\], got 3"),
    (lambda: B.GuidanceConfig(layers=[]), "at least one layer, each once"),
    (lambda: B.GuidanceConfig(layers=[1, 1]), "at least one layer, each once"),
    (lambda: B.GuidanceConfig(layers=[-1]), "layers must be at least 0"),
    (lambda: B.GuidanceConfig.from_dict({"heads": 2}), "GuidanceConfig has no field 'heads'; it has"),
    *[(lambda k=kind: config_from_dict({"kind": k}), "kind must be one of 'guidance'") for kind in ("gate", "custom")],
    # attention
    (attention(Q[0]), "query, key and value must be"),
    (attention(Q[:1]), r"query .*key .*value .* do not fit"),
    (attention(Q, K[:, :, 1:]), r"query .*key .*value .* do not fit"),
    (attention(Q[..., 1:]), r"query .*key .*value .* do not fit"),
    (attention(Q[:, :3]), "a multiple of the key heads as query heads"),
    (
        attention(terms=[Additive(torch.zeros(2, 3, 7))]),
        "Additive has 3 maps, which must divide the number of heads, 4",
    ),
    (attention(terms=[torch.zeros(5, 7)]), "a term must have groups, tile, tensors and with_tensors, got Tensor"),
    (attention(terms=[Additive(META)]), "must be on one device, got cpu, meta"),
    (attention(sinks=torch.zeros(4, device="meta")), "sinks and all terms must be on one device, got cpu, meta"),
    *[(attention(dropout=p), r"dropout must be in \[0, 1\)") for p in (-0.1, 1.0, float("nan"))],
    (attention(Q, K, K, (), "causal"), "the mask must be a Mask, a boolean tensor or None, got str"),
    (
        attention(Q, K, K, (), torch.zeros(5, 7)),
        "a mask must be boolean, True where a query attends, got torch.float32",
    ),
    (attention(Q, K, K, (), torch.ones(2, 5, 7) > 0), r"got \(2, 5, 7\)"),
    (attention(Q, K, K, (), torch.ones(7, 5) > 0), "the mask has 7 queries and 5 keys, but the call has 5 and 7"),
    (attention(Q, K, K, (), af.masks.causal(7)), "slice it to the rows and columns of this call"),
    (attention(backend="cuda"), "one of 'auto', 'reference', 'fused', 'tiled', 'dense', 'flex', got 'cuda'"),
    (attention(backend="tiled", need_weights=True), "backend='tiled' never holds the weights"),
    # attach
    (attach(B.GuidanceConfig(layers=[1, 2, 7])), r"layers \[2, 7\] do not exist: the model has layers 0 to 1"),
    (attach("guidance"), "config must be that of a kind.*got str"),
    (attach(()), "got none"),
    (attach(train="bias"), "train must be 'guidance' or 'all'"),
    (attach(backend="cuda"), "backend must be one of"),
    (attach(B.CustomConfig(lambda shape: 3)), r"custom: build must return an nn\.Module, got int"),
    (lambda: B.attach("gpt2"), "expected a torch module or what af.load_model returns, got str"),
    (lambda: B.attach(nn.Linear(2, 2)), "expected a transformers model, got Linear"),
    (lambda: B.attach(model()), "has a bias attached already: remove it with its handle first"),
    (lambda: B.save(family("Llama"), "folder"), "has no bias attached"),
    # capture
    (lambda: B.capture(family("Llama"), [5, 6]), r"has no bias attached: call af\.bias\.attach"),
    (capture("w5 w6"), "a text needs a tokenizer"),
    (capture([5, 6], layers=[0]), r"layers must list some of the layers with a bias, \[1\], got \[0\]"),
    (capture([5, 6], queries=[2]), "queries must be positions from -2 to 1 for 2 tokens, got"),
    (capture([5, 6], heads=[4]), r"heads must hold positions in \[0, 4\), got 4"),
    (capture([5, 6], heads=[]), "heads must list at least one head"),
    (capture(torch.zeros(1, 0, dtype=torch.long)), "at least one token"),
    (capture(torch.zeros(3)), r"token ids, got a tensor of torch\.float32"),
    (capture(torch.ones(2, 4, dtype=torch.long)), "pass a batch as a mapping"),
    (capture({"input_ids": torch.ones(2, 4, dtype=torch.long)}), "capture takes one sequence, got a batch of 2"),
    (capture({"attention_mask": torch.ones(1, 3)}), "inputs must hold input_ids, got attention_mask"),
    (capture([5, 6], generate=0), "generate must be at least 1"),
    (lambda: B.capture(biased("Bert"), [5, 6], generate=1), "cannot generate"),
    # maps and graphs
    (lambda: make().values("bias", 1), r"layer must be one of \[0, 2\], got 1"),
    (lambda: make(heads=(1, 3)).values("bias", 0, 2), r"head 2 was not captured: choose among \[1, 3\]"),
    (lambda: make().values("name"), "quantity must be"),
    (lambda: make(queries=(1, 3)).row(2), r"query must be one of the captured positions, \[1, 3\]"),
    (lambda: make(base=False).values("weights_base"), "base=True"),
    (lambda: make().energy(0), "rank must be at least 1"),
    *[(lambda b=bias: make().graph(threshold=b), "threshold must be positive") for bias in (0.0, -1.0, float("nan"))],
    (lambda: make().graph(top_k=0), "top_k must be at least 1"),
]


@pytest.mark.parametrize(("call", "message"), TABLE, ids=[message[:50] for _, message in TABLE])
def test_bad_arguments(call, message):
    with pytest.raises((ValueError, TypeError), match=f"{message}|{CHECKED}"):
        call()


def test_a_module_of_the_users_that_returns_another_shape():
    wrong = family("Llama")
    B.attach(wrong, B.CustomConfig(lambda shape: Flat()))
    with pytest.raises(ValueError, match=r"Flat must return \[batch or 1, maps, 3, 3\], got \(1, 3\)"):
        wrong(torch.tensor([[5, 6, 7]]))


def refused(model, error, match, *arguments):
    untouched(model, error, match, lambda model: af.bias.attach(model, *arguments))


def test_a_part_of_a_model_with_a_bias():
    model = biased("Llama")
    with pytest.raises(ValueError, match="has a bias attached already"):
        af.bias.attach(model.model, GUIDANCE)
    with pytest.raises(ValueError, match="a part of the model that the bias was attached to"):
        handle_of(model.model).remove()


@pytest.mark.parametrize("name", WITHOUT_INTERFACE)
def test_models_without_the_interface_or_without_attention(name):
    refused(family(name), af.UnsupportedArchitecture, "does not take the attention interface", GUIDANCE)


def test_layers_that_share_the_keys_of_an_earlier_one_are_left_out():
    kinds = ["sliding_attention", "full_attention"] * 2
    config = build(Architecture("gemma3n_text", "Gemma3nForCausalLM", "decoder")).config
    config.num_hidden_layers, config.num_kv_shared_layers, config.layer_types = 4, 2, kinds
    config.activation_sparsity_pattern, config.intermediate_size = [0.0] * 4, [48] * 4
    model, ids = Gemma3nForCausalLM(config).double().eval(), tokens(2, 9)
    shared = af.bias.GuidanceConfig(layers=[0, 2], hidden_dim=4)
    refused(model, af.UnsupportedArchitecture, r"layers.2.self_attn attends to the keys of an earlier layer", shared)
    shared = af.bias.GuidanceConfig(layers=[2], hidden_dim=4, reference="hidden")
    refused(model, af.UnsupportedArchitecture, r"layers.2.self_attn attends to the keys of an earlier layer", shared)
    for placement, count in (("every", 2), ("every_other", 1)):
        with af.bias.attach(model, af.bias.GuidanceConfig(layers=placement, hidden_dim=4)) as handle:
            assert len(handle.layers) == count
            assert f"bias on {count} of 4 attention layers" in str(handle)
    with torch.no_grad():
        plain = outputs(model, input_ids=ids)
        af.bias.attach(model, af.bias.GuidanceConfig(layers=[0, 1], hidden_dim=4, reference="hidden"))
        assert torch.equal(outputs(model, input_ids=ids), plain)
        disturb(model)
        whole, cache = outputs(model, input_ids=ids, use_cache=False), DynamicCache(config=config)
        parts = [model(part, past_key_values=cache).logits for part in ids.split([5, 1, 3], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)
    assert (whole - plain).abs().max() > 1e-3


def test_kinds_that_a_layer_cannot_have():
    refused(family("Bert"), ValueError, "CumulativeConfig.*is not causal", af.bias.CumulativeConfig())
    for name in ("GPT2", "Bert", "OPT"):
        config = af.bias.AlibiConfig(layers="every_other", gain=0.0)
        refused(family(name), af.UnsupportedArchitecture, "takes no rotary embedding from outside", config)


def test_a_layer_on_several_devices():
    model = family("Llama")
    model.model.layers[0].self_attn.q_proj.to("meta")
    with pytest.raises(ValueError, match=r"self_attn lies on several devices \(cpu, meta\): move it to one"):
        af.bias.attach(model, GUIDANCE)
    assert "score_terms" not in str(model)


def test_changing_the_attention_implementation_under_a_bias_is_noticed():
    """Otherwise the bias would be out of force without a word."""
    model, ids = biased("Llama"), tokens(1, 5)
    model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="ran without it: the model's attention implementation was set to 'eager'"):
        outputs(model, input_ids=ids)
    with disabled(model):
        outputs(model, input_ids=ids)
    handle_of(model).remove()
    assert model.config._attn_implementation == "eager"  # what the user has chosen last
    af.bias.attach(model, GUIDANCE)
    outputs(model, input_ids=ids)


def test_implementations_that_take_no_bias():
    model = family("Llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2', which takes no bias; choose one of sdpa, eager"):
        af.bias.attach(model)


def test_replicas_of_data_parallel():
    replica = model().model.layers[1].self_attn._replicate_for_data_parallel()
    with pytest.raises(RuntimeError, match=r"nn.DataParallel.*accelerate launch"):
        replica(torch.zeros(1, 2, 32), (torch.ones(1, 2, 8), torch.zeros(1, 2, 8)), None)
