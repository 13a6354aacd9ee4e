"""`capture` against the weights that the model itself returns, and against the paper's formula."""

import pytest
import torch
from torch.nn import functional

import attnflow as af
from attnflow.models.subject import Loaded
from tests.bias.hf.common import disabled, layer_biases
from tests.models import tiny
from tests.models.saved import word_tokenizer

GREEDY = {"do_sample": False, "eos_token_id": None}


def biased(name="Llama", seed=0, implementation="eager", **config):
    """A tiny model with a bias that is large enough to matter."""
    torch.manual_seed(seed)
    model = tiny(name, torch.float32, attn_implementation=implementation)
    af.bias.attach(model, af.bias.GuidanceConfig(**{"layers": "every", "hidden_dim": 8, "init": "kaiming", **config}))
    with torch.no_grad():
        for _, bias in layer_biases(model):
            for name, parameter in bias.named_parameters():
                parameter.mul_(1.2 if name.endswith("output_weight") else 3.0)
    return model


def ids(n, seed=1, batch=1):
    return torch.randint(3, 50, (batch, n), generator=torch.Generator().manual_seed(seed))


def attentions(model, **inputs):
    with torch.no_grad():
        return model(**inputs, output_attentions=True).attentions


@pytest.fixture(scope="module")
def tokenizer():
    words = ["[UNK]", "[PAD]", "[EOS]", *(f"w{i}" for i in range(3, 50))]
    return word_tokenizer(words, pad_token="[PAD]", padding_side="left")


@pytest.mark.parametrize(
    "name", ["Llama", "GPT2", "GPTNeoX", "Qwen3", "Mistral", "Gemma2", "GptOss", "Bert", "ModernBert"]
)
def test_weights_are_the_models_own(name):
    """With the bias and, from the disabled model, without; grouped queries, windows, softcaps, sinks, encoders."""
    model, tokens = biased(name), ids(11)
    found = af.bias.capture(model, tokens, heads="all")
    with_bias = attentions(model, input_ids=tokens)
    with disabled(model):
        base = attentions(model, input_ids=tokens)
    assert [one.layer for one in found] == [0, 1]
    for one in found:
        for mine, own in ((one.weights, with_bias), (one.weights_base, base)):
            torch.testing.assert_close(mine, own[one.layer][0].float(), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found.layer(0).weights, found.layer(0).weights_base, atol=1e-3)
    torch.testing.assert_close(found.layer(0).weights_without, found.layer(0).weights_base, rtol=1e-4, atol=1e-6)
    assert found.causal == (name not in ("Bert", "ModernBert"))
    mean = af.bias.capture(model, tokens)
    torch.testing.assert_close(mean.layer(1).weights[0], found.layer(1).weights.mean(0))
    assert mean.heads == ()


def test_raw_bias_is_the_papers_formula_on_full_width_unrotated_projections():
    model, tokens = biased(layers=[0]), ids(7)
    attention = model.model.layers[0].self_attn
    seen = {}
    hooks = [
        getattr(attention, f"{side}_proj").register_forward_hook(
            lambda m, i, out, side=side: seen.update({side: out[0]})
        )
        for side in "qk"
    ]
    found = af.bias.capture(model, tokens, base=False)
    for hook in hooks:
        hook.remove()
    net, n = attention.score_terms.kinds[0], 7
    first = torch.cat([net.query.weight[0], net.key.weight[0]], dim=1)
    pairs = torch.cat([seen["q"][:, None].expand(n, n, -1), seen["k"][None].expand(n, n, -1)], dim=-1)
    hidden = functional.layer_norm(pairs @ first.T + net.hidden_bias[0], (8,), net.norm.weight[0], net.norm.bias[0])
    expected = functional.gelu(hidden) @ net.output_weight[0] + net.output_bias[0]
    triangle = torch.ones(n, n, dtype=torch.bool).tril()
    raw = found.layer(0).raw[0]
    torch.testing.assert_close(raw[triangle], expected[triangle].detach(), rtol=1e-4, atol=1e-5)
    assert not raw[~triangle].any()
    means = found.layer(0).bias[0].double().sum(1) / triangle.sum(1)
    assert means.abs().max() < 1e-6
    assert found.layer(0).weights_base is None
    assert found.layer(0).name == "model.layers.0.self_attn"


def test_generate_by_a_number_and_by_beams():
    model, tokens = biased(implementation="sdpa"), ids(5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    greedy = af.bias.capture(model, tokens, generate=3)
    assert (greedy.queries, len(greedy.produced)) == ((4, 5, 6), 3)
    whole = af.bias.capture(model, model.generate(tokens, max_new_tokens=3, do_sample=False)[:, :-1], queries=[4, 5, 6])
    torch.testing.assert_close(greedy.layer(1).bias, whole.layer(1).bias)
    assert greedy.produced[:2] == whole.tokens[5:]
    assert all(bias.observer is None and bias.enabled for _, bias in layer_biases(model))
    beams = af.bias.capture(model, tokens, generate={"max_new_tokens": 3, "num_beams": 3, "do_sample": False})
    out = model.generate(tokens, max_new_tokens=3, num_beams=3, do_sample=False)
    assert beams.produced == tuple(str(token) for token in out[0, 5:].tolist())
    assert beams.layer(0).weights_base is not None
    with pytest.raises(ValueError, match="num_return_sequences"):
        af.bias.capture(model, tokens, generate={"max_new_tokens": 2, "num_beams": 2, "num_return_sequences": 2})


@pytest.mark.parametrize("name", ["Llama", "GPT2", "OPT"])
def test_a_padded_sequence_that_generates(name, tokenizer):
    model = biased(name, implementation="sdpa")
    batch = dict(tokenizer(["w5 w6 w7"], padding="max_length", max_length=5, return_tensors="pt"))
    batch.pop("token_type_ids", None)
    options = GREEDY | {"max_new_tokens": 3, "pad_token_id": 1}
    found = af.bias.capture(Loaded(model, tokenizer), batch, generate=options)
    out = model.generate(**batch, **options)
    assert found.tokens == ("[PAD]", "[PAD]", "w5", "w6", "w7", *(f"w{i}" for i in out[0, 5:-1].tolist()))
    assert not found.layer(0).allowed[..., :2].any()
    alone = af.bias.capture(model, out[:1, 2:-1], queries=range(2, 5))
    for one, other in zip(found, alone, strict=True):
        for part in ("raw", "bias", "weights", "weights_without", "weights_base"):
            torch.testing.assert_close(getattr(one, part)[..., 2:], getattr(other, part), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3"])
@pytest.mark.parametrize("cache", [{"cache_implementation": "static"}, {"use_cache": False}, {"prefill_chunk_size": 4}])
def test_what_is_generated_by_any_cache_has_the_map_of_the_whole_text(name, cache):
    """Also with a window that is shorter than the text."""
    model, tokens = biased(name, implementation="sdpa"), ids(6)
    options = GREEDY | {"max_new_tokens": 4, "pad_token_id": 0, "disable_compile": True}
    found = af.bias.capture(model, tokens, generate=options | cache, heads=[0, 3])
    out = model.generate(tokens, **options)
    assert found.produced == tuple(str(token) for token in out[0, 6:].tolist())
    whole = af.bias.capture(model, out[:, :-1], heads=[0, 3], queries=range(5, 9))
    assert found.queries == whole.queries == (5, 6, 7, 8)
    for one, other in zip(found, whole, strict=True):
        assert all(torch.equal(getattr(one, part), getattr(other, part)) for part in ("raw", "weights", "allowed"))


def test_looking_changes_nothing():
    model, tokens = biased(), ids(8)
    model.train()
    with torch.no_grad():
        before = model(tokens).logits
    af.bias.capture(model, tokens)
    assert all(module.training for module in model.modules())
    assert all(bias.observer is None and bias.enabled for _, bias in layer_biases(model))
    assert torch.equal(before, model(tokens).logits)
    model(tokens).logits.sum().backward()


def test_several_biases_are_one_map():
    model = tiny("Llama", torch.float32, attn_implementation="eager")
    alibi = af.bias.AlibiConfig(rope="keep")
    af.bias.attach(model, [af.bias.GuidanceConfig(hidden_dim=8, layers="every", init="kaiming"), alibi])
    found = af.bias.capture(model, ids(6), heads="all")
    own = attentions(model, input_ids=ids(6))
    torch.testing.assert_close(found.layer(1).weights, own[1][0], rtol=1e-4, atol=1e-6)
    assert len({float(x) for x in found.layer(0).raw[:, 5, 0]}) == 4  # ALiBi has a slope for each head


def test_a_bias_that_is_zero_has_a_map_of_zeros():
    model = tiny("Llama", torch.float32, attn_implementation="sdpa")
    af.bias.attach(model, af.bias.GuidanceConfig(hidden_dim=8, layers="every"))
    found = af.bias.capture(model, ids(6))
    for one in found:
        assert not one.raw.any()
        assert not one.bias.any()
        assert torch.equal(one.weights, one.weights_without)
        torch.testing.assert_close(one.weights, one.weights_base)
        assert one.strength == one.moved == 0.0
    assert found.graph().edges == ()


def test_defaults_for_long_texts_and_chosen_queries():
    model = biased("GPTNeoX", implementation="sdpa", layers=[1])
    model.config.max_position_embeddings = 256
    tokens = ids(150)
    found = af.bias.capture(model, tokens)
    assert found.queries == tuple(range(118, 150))
    assert found.layer(1).bias.shape == (1, 32, 150)
    assert af.bias.capture(model, tokens, queries="all", base=False).queries == tuple(range(150))
    few = af.bias.capture(model, tokens, queries=[-1, 3, 149])
    assert few.queries == (3, 149)
    torch.testing.assert_close(few.layer(1).bias[0, 1], found.layer(1).bias[0, -1])
    assert af.bias.capture(model, tokens[0].tolist(), queries=7, base=False).queries == (7,)


def test_text_and_tokens(tokenizer):
    model = biased(implementation="sdpa")
    found = af.bias.capture(Loaded(model, tokenizer), "w5 w6 w7")
    assert found.tokens == ("w5", "w6", "w7")
    assert af.bias.capture(model, "w5 w6", tokenizer=tokenizer).tokens == ("w5", "w6")
    assert af.bias.capture(model, [5, 6]).tokens == ("5", "6")
    assert found.model == "LlamaForCausalLM"


@pytest.mark.parametrize("name", ["Bart", "T5"])
def test_the_decoder_of_two(name):
    model = tiny(name, torch.float32, attn_implementation="eager")
    af.bias.attach(model.get_decoder(), af.bias.GuidanceConfig(hidden_dim=8, layers="every", init="kaiming"))
    given = {"input_ids": ids(7), "decoder_input_ids": ids(4, 5)}
    found = af.bias.capture(model, given, heads="all")
    assert found.queries == (0, 1, 2, 3)
    assert found.tokens == tuple(str(token) for token in given["decoder_input_ids"][0].tolist())
    with torch.no_grad():
        own = model(**given, output_attentions=True).decoder_attentions
    torch.testing.assert_close(found.layer(1).weights, own[1][0], rtol=1e-4, atol=1e-6)
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "num_beams": 1}
    steps = af.bias.capture(model, given["input_ids"], generate=options)
    assert (steps.queries, len(steps.produced)) == ((0, 1, 2), 3)
    with pytest.raises(ValueError, match="the bias is in the decoder"):
        af.bias.capture(model, given["input_ids"])


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # of peft's own making
def test_beside_an_adapter():
    peft = pytest.importorskip("peft")
    model, tokens = biased(implementation="sdpa"), ids(6)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    found = af.bias.capture(adapted, tokens)
    assert found.tokens == tuple(str(token) for token in tokens[0].tolist())
    with adapted.disable_adapter():
        plain = af.bias.capture(adapted, tokens)
    assert not torch.allclose(found.layer(0).bias, plain.layer(0).bias, atol=1e-3)  # its queries are others
    steps = af.bias.capture(adapted, tokens, generate={"max_new_tokens": 2, "eos_token_id": None, "pad_token_id": 0})
    torch.testing.assert_close(steps.layer(0).bias[0, 0, :6], found.layer(0).bias[0, 5], rtol=1e-4, atol=1e-5)


def test_a_mask_of_ours_rules():
    model = biased(implementation="sdpa")
    mask = af.masks.document([4, 3])
    with af.masks.attach(model, mask):
        found = af.bias.capture(model, ids(7))
    assert torch.equal(found.allowed(0), mask.dense())
