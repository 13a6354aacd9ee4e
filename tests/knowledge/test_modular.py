"""The modular model computes its equations however transformers runs it, starts as intended, and comes back."""

import math

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, StaticCache

import attnflow as af
from attnflow.knowledge import ModularConfig, ModularForCausalLM
from attnflow.knowledge.attention import named
from attnflow.knowledge.modular import ModularModel
from experiments.knowledge_twins.models import feed_forward_twin, knowledge_parameters
from tests.knowledge.readers import indexed
from tests.models import MODULAR, modular, tokens

FORMS = [
    {},
    {"gated": True, "threshold": "coordinate", "knowledge_activation": "silu"},
    {"threshold": "coordinate", "knowledge_activation": "gelu", "num_key_value_heads": 4, "attention_bias": True},
    {"knowledge_activation": "sparsemax", "num_knowledge_heads": 1, "tie_word_embeddings": False},
]


# Norms and angles of transformers are in float32 whatever the model is in: that bounds how equal float64 can be.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def norm(hidden, weight):
    return hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(vectors, theta=10_000.0):
    """RoPE: pairs (i, i + half) of [batch, tokens, heads, head_dim] turned by position x theta ** (-2i / head_dim)."""
    half = vectors.shape[-1] // 2
    angle = torch.arange(vectors.shape[1])[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second = vectors[..., :half], vectors[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def reference(model, ids, entries=None):
    """Logits by the equations, from the state dict alone."""
    config, state = model.config, dict(model.named_parameters())
    entries = state["model.knowledge.entries"] if entries is None else entries
    hidden = state["model.embed_tokens.weight"][ids]
    batch, length = ids.shape
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    for layer in range(config.num_hidden_layers):
        at = lambda name, layer=layer: state[f"model.layers.{layer}.{name}"]  # noqa: E731
        normed = norm(hidden, at("input_layernorm.weight"))
        made = {}
        for name in "qkv":
            bias = at(f"self_attn.{name}_proj.bias") if config.attention_bias else 0
            made[name] = (normed @ at(f"self_attn.{name}_proj.weight").T + bias).view(
                batch, length, -1, config.head_dim
            )
        shared = config.num_attention_heads // config.num_key_value_heads
        query, key = turned(made["q"]), turned(made["k"]).repeat_interleave(shared, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(config.head_dim)
        weights = scores.masked_fill(~causal, -math.inf).softmax(-1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights, made["v"].repeat_interleave(shared, 2)).flatten(2)
        bias = at("self_attn.o_proj.bias") if config.attention_bias else 0
        hidden = hidden + mixed @ at("self_attn.o_proj.weight").T + bias
        hidden = hidden + read(config, at, norm(hidden, at("post_attention_layernorm.weight")), entries)
    out = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return norm(hidden, state["model.norm.weight"]) @ state[out].T


def read(config, at, hidden, entries):
    """Knowledge, eq. 1-9, with heads summed."""
    parts, heads = 2 if config.gated else 1, config.num_knowledge_heads
    query, key, value = (at(f"reader.attention.{name}") for name in ("query", "key", "value"))
    if config.threshold == "coordinate":
        thresholds = entries[:, -parts:].T[:, None].expand(parts, heads, -1)
    else:
        first = (
            entries @ at("reader.attention.threshold_network.0.weight").T
            + at("reader.attention.threshold_network.0.bias")
        ).relu()
        second = first @ at("reader.attention.threshold_network.2.weight").T
        thresholds = (second + at("reader.attention.threshold_network.2.bias")).T.reshape(parts, heads, -1)
    total = 0
    activation = {
        "relu": torch.relu,
        "gelu": torch.nn.functional.gelu,
        "silu": torch.nn.functional.silu,
        "sparsemax": simplex,
    }
    for head in range(heads):
        scores = [
            (hidden @ query[head]) @ (entries @ key[part, head]).T / math.sqrt(config.key_dim) + thresholds[part, head]
            for part in range(parts)
        ]
        weights = activation[config.knowledge_activation](scores[0])
        weights = weights * scores[1] if parts == 2 else weights
        total = total + weights @ (entries @ value[head])
    return total + at("reader.attention.output_bias")


def simplex(scores):
    """Sparsemax by halving for its threshold, with the gradient of the support found."""
    low, high = scores.detach().amax(-1, keepdim=True) - 1, scores.detach().amax(-1, keepdim=True)
    for _ in range(80):
        middle = (low + high) / 2
        over = (scores.detach() - middle).clamp(min=0).sum(-1, keepdim=True) > 1
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    support = (scores.detach() > high).to(scores)
    tau = ((scores * support).sum(-1, keepdim=True) - 1) / support.sum(-1, keepdim=True)
    return (scores - tau) * support


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_logits_and_gradients_are_those_of_the_equations(form):
    model, ids = modular(**form), tokens()
    logits = model(input_ids=ids).logits
    expected = reference(model, ids)
    torch.testing.assert_close(logits, expected, **CLOSE)
    direction = torch.randn_like(logits)
    names, parameters = zip(*model.named_parameters(), strict=True)
    ours = torch.autograd.grad((logits * direction).sum(), parameters)
    theirs = torch.autograd.grad((expected * direction).sum(), parameters)
    for name, one, other in zip(names, ours, theirs, strict=True):
        assert float((one - other).norm()) <= 1e-5 * float(other.norm()) + 1e-6, name


def test_entries_may_be_given():
    model, ids, entries = modular(), tokens(), torch.randn(9, 20, dtype=torch.float64, requires_grad=True)
    logits = model(input_ids=ids, entries=entries).logits
    torch.testing.assert_close(logits, reference(model, ids, entries), **CLOSE)
    logits.sum().backward()
    assert bool(entries.grad.any())
    assert model.knowledge.entries.grad is None
    torch.testing.assert_close(model(input_ids=ids).logits, reference(model, ids), **CLOSE)
    with pytest.raises(ValueError, match=r"entries must be \[entries, 20\], got shape \(9, 21\)"):
        model(input_ids=ids, entries=torch.zeros(9, 21, dtype=torch.float64))


def test_entries_per_token():
    model, ids = modular(entries_per_token=5), tokens()
    readings = []
    for reader in model.readers():
        reader.observer = readings.append
    found = model(input_ids=ids).logits
    assert [reading.ids.shape for reading in readings] == [(2, 7, 2, 5)] * 2
    assert (found - modular()(input_ids=ids).logits).abs().max() > 1e-3
    torch.testing.assert_close(model.train()(input_ids=ids).logits, found, rtol=1e-9, atol=1e-9)
    assert modular(entries_per_token=5).generation_config.top_k is None  # no option of sampling


def greedy(model, ids, steps, **inputs):
    for _ in range(steps):
        chosen = model(input_ids=ids, use_cache=False, **inputs).logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, chosen], dim=1)
    return ids


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_greedy_decoding_with_every_cache(form):
    model, ids = modular(**form), tokens()
    expected = greedy(model, ids, 5)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    for more in ({}, {"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}):
        assert torch.equal(model.generate(ids, **options, **more), expected), more
    cache = StaticCache(config=model.config, max_cache_len=12)
    steps = [model(input_ids=ids[:, i : i + 1], past_key_values=cache).logits for i in range(ids.shape[1])]
    torch.testing.assert_close(torch.cat(steps, 1), model(input_ids=ids).logits, rtol=1e-9, atol=1e-9)


def test_beams_and_samples_with_entries_of_the_call():
    model, ids, entries = modular(), tokens(), torch.randn(9, 20, dtype=torch.float64)
    options = {"max_new_tokens": 4, "eos_token_id": None, "entries": entries, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, do_sample=False, **options), greedy(model, ids, 4, entries=entries))
    beams = model.generate(ids, do_sample=False, num_beams=3, num_return_sequences=2, **options)
    assert beams.shape == (4, 11)
    torch.manual_seed(1)
    samples = model.generate(ids, do_sample=True, num_return_sequences=3, top_k=0, **options)
    assert samples.shape == (6, 11)
    source = indexed(model.readers(), entries)
    found = model.float().generate(
        ids, do_sample=False, num_beams=3, num_return_sequences=2, **{**options, "entries": source}
    )
    assert torch.equal(found, beams)


def test_a_twin_differs_in_sharing_alone():
    for form in [*FORMS, {"num_entries": 500, "entry_dim": 64}]:
        model = modular(disturbed=False, **form)
        config = model.config
        own = sum(p.numel() for name, p in model.named_parameters() if "knowledge" in name or "reader" in name)
        assert own == knowledge_parameters(config)
        if config.knowledge_activation == "sparsemax":
            with pytest.raises(ValueError, match="sparsemax normalises over all entries"):
                feed_forward_twin(config)
            continue
        twin = AutoModelForCausalLM.from_config(feed_forward_twin(config))
        apart = model.num_parameters() - twin.num_parameters()
        neuron = (3 if config.gated else 2) * config.hidden_size + 1 + config.gated
        assert abs(apart) <= neuron / 2 * config.num_hidden_layers
        assert twin.config.num_key_value_heads == config.num_key_value_heads
        assert twin.config.rope_parameters == config.rope_parameters
        # Its layers are h -> act(h W_1 + b_1) W_2 + b_2, with a gate only where the knowledge has one.
        inner = twin.model.layers[0].mlp
        assert hasattr(inner, "gate_proj") == config.gated
        assert inner.up_proj.bias is not None
        hidden = torch.randn(3, config.hidden_size)
        scores = [part(hidden) for part in ([inner.gate_proj] if config.gated else []) + [inner.up_proj]]
        weights = named(config.knowledge_activation)(scores[0]) * (scores[1] if config.gated else 1)
        torch.testing.assert_close(inner(hidden), inner.down_proj(weights))
        # Everything else is the modular model's own: the same names, shapes and norms.
        names = {
            name: p.shape for name, p in model.state_dict().items() if "reader" not in name and "knowledge" not in name
        }
        assert names == {name: p.shape for name, p in twin.state_dict().items() if "mlp" not in name}
        assert type(twin.model.norm).forward.__code__.co_code == type(model.model.norm).forward.__code__.co_code


SAVED = [
    {},
    {"threshold": "coordinate", "gated": True, "entries_per_token": 4},
    {"threshold": "coordinate", "knowledge_activation": "sparsemax", "tie_word_embeddings": False},
]


def as_intended(name, value, config):
    """Whether a parameter is as the docstrings say it starts."""
    kind = name.rpartition("attention.")[2] if "reader" in name else name
    fan = {"query": config.hidden_size, "key": config.entry_dim, "value": config.entry_dim * config.num_knowledge_heads}
    if kind in fan:
        return abs(float(value.std()) * fan[kind] ** 0.5 - 1) < 0.15
    if name == "model.knowledge.entries":
        return abs(float(value.std()) * config.entry_dim**0.5 - 1) < 0.15
    if kind.startswith("threshold_network.0"):
        return float(value.abs().max()) <= config.entry_dim**-0.5 and float(value.std()) > 0
    if "norm" in name:
        return bool((value == 1).all())
    if kind.startswith("threshold_network.2") or kind in ("output_bias", "entry_thresholds") or kind.endswith("bias"):
        return not value.any()
    return abs(float(value.std()) / config.initializer_range - 1) < 0.15


@pytest.mark.parametrize("form", SAVED, ids=str)
@pytest.mark.parametrize("made", ["class", "Auto", "meta"])
def test_parameters_start_as_intended(made, form):
    config = ModularConfig(**{**MODULAR, **form, "initializer_range": 0.02, "pad_token_id": None})
    torch.manual_seed(0)
    if made == "class":
        model = ModularForCausalLM(config)
    elif made == "Auto":
        model = AutoModelForCausalLM.from_config(config)
    else:
        with torch.device("meta"):
            model = ModularForCausalLM(config)
        model.to_empty(device="cpu")
        for value in [*model.parameters(), *model.buffers()]:
            value.data.fill_(torch.nan)
        for module in model.modules():
            module._is_hf_initialized = False
        model.init_weights()
        model.tie_weights()
    wrong = [name for name, value in model.named_parameters() if not as_intended(name, value.detach(), config)]
    assert not wrong
    assert bool(model(input_ids=tokens()).logits.isfinite().all())


@pytest.mark.parametrize("form", SAVED, ids=str)
def test_a_saved_model_comes_back(form, tmp_path):
    model, ids = modular(torch.float32, **form), tokens()
    model.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    expected = model(input_ids=ids).logits
    for maker in (ModularForCausalLM, AutoModelForCausalLM):
        back, report = maker.from_pretrained(tmp_path, output_loading_info=True)
        assert type(back) is ModularForCausalLM
        assert not any(report.values())
        assert torch.equal(back(input_ids=ids).logits, expected)
        assert {name: getattr(back.config, name) for name in MODULAR | form} == MODULAR | form
        tied = back.lm_head.weight is back.model.embed_tokens.weight
        assert tied == model.config.tie_word_embeddings
    headless, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert type(headless) is ModularModel
    assert not report["missing_keys"]
    torch.testing.assert_close(
        headless(input_ids=ids).last_hidden_state, model.model(input_ids=ids).last_hidden_state, rtol=0, atol=0
    )
    loaded = af.models.load_model(tmp_path, tokenizer=False).model
    assert type(loaded) is ModularForCausalLM
    assert torch.equal(loaded(input_ids=ids).logits, expected)
