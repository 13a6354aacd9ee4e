"""Unusual models and inputs of `attribute`: each is right or refused in a sentence, and the model is as before."""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import cache

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from jaxtyping import TypeCheckError
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from transformers import DynamicCache, PreTrainedModel

import attnflow as af
from attnflow.models.arguments import CACHES
from attnflow.models.passes.recording import ComponentName
from tests.conformance.miniature import named
from tests.models import deep

IDS = torch.randint(3, 40, (1, 9), generator=torch.Generator().manual_seed(1))
PADS = torch.zeros(1, 3, dtype=torch.long)
MASK = torch.cat([PADS, torch.ones_like(IDS)], dim=1)
LEFT = {"input_ids": torch.cat([PADS, IDS], dim=1), "attention_mask": MASK}
RIGHT = {"input_ids": torch.cat([IDS, PADS], dim=1), "attention_mask": MASK.flip(1)}
PACKED = {
    "input_ids": torch.cat([IDS[:, :4], IDS], dim=1),
    "position_ids": torch.cat([torch.arange(4), torch.arange(9)])[None],
}
UNSUPPORTED = af.UnsupportedArchitecture
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore:.*gradient_checkpointing:FutureWarning")


def llama(**changes):
    return deep("Llama", num_key_value_heads=2, **changes).double().eval()


@cache
def plain():
    return af.geometry.attribute(llama(), IDS, layer=2)


def state(model: nn.Module):
    """All that a call could leave behind, by identity where it is an object, and by value where it could be written."""
    objects = [
        (path, key, value)
        for path, module in model.named_modules()
        for part in (vars(module), *(own for own in vars(module).values() if isinstance(own, dict)))
        for key, value in part.items()
    ]
    owners = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    values = [(owner.config.to_dict(), owner.config._attn_implementation) for owner in owners]
    tensors = [(t.requires_grad, t.dtype, t.grad, t.data_ptr()) for t in (*model.parameters(), *model.buffers())]
    buffers = [buffer.clone() for buffer in model.buffers() if not buffer.is_meta]
    return objects, [values, tensors, torch.get_rng_state().tolist()], buffers


def same(before, after) -> bool:
    (objects, values, buffers), (objects_now, values_now, buffers_now) = before, after
    return (
        [(path, key) for path, key, _ in objects] == [(path, key) for path, key, _ in objects_now]
        and all(old is new for (*_, old), (*_, new) in zip(objects, objects_now, strict=True))
        and values == values_now
        and all(map(torch.equal, buffers, buffers_now))
    )


# -------- refused


def of_integers():
    counts = {"layer": 3, "head": 4, "query": 9, "key": 9}
    for name, count in counts.items():
        words = name
        for value in (count, 10**30):
            yield f"{name} {value}", {name: value}, ValueError, f"{words} must be at most {count - 1}, got {value}"
        yield f"{name} too low", {name: -count - 1}, ValueError, f"{words} must be at least {-count}"
        for value in (True, 1.0, "1", torch.tensor([1.5])):
            yield f"{name} {value!r}", {name: value}, TypeError, f"{name} must "


CACHE = DynamicCache()
CACHE.update(torch.zeros(1, 2, 4, 8).double(), torch.zeros(1, 2, 4, 8).double(), 0)
NOTHING = torch.zeros(1, 0, dtype=torch.long)
ALL_BUT_ONE = torch.ones(9, 9, dtype=torch.bool).tril().index_fill(0, torch.tensor([4]), False)
ARGUMENTS = {
    **{what: rest for what, *rest in of_integers()},
    "no layer": ({"layer": None}, TypeError, "layer must be an integer, got None"),
    "no query": ({"query": None}, TypeError, "query must be an integer, got None"),
    "no keys": ({"key": []}, ValueError, "key must list positions that the query may attend to"),
    "a later key": ({"query": 3, "key": [2, 5]}, ValueError, "may attend to, [0, 1, 2, 3], got [5]"),
    "other attention": ({"attention": "both"}, ValueError, '"self" or "cross", got \'both\''),
    "cross-attention of a decoder": ({"attention": "cross"}, UNSUPPORTED, "LlamaForCausalLM has no cross-attention"),
    "a text": ({"inputs": "a text"}, ValueError, "a text needs a tokenizer"),
    "an empty text": ({"inputs": ""}, ValueError, "a text needs a tokenizer"),
    "an empty list": ({"inputs": []}, ValueError, "with at least one token"),
    "no tokens": ({"inputs": NOTHING}, ValueError, "with at least one token"),
    "no named tokens": ({"inputs": {"input_ids": NOTHING}}, ValueError, "with at least one token"),
    "no inputs": ({"inputs": {}}, ValueError, "the inputs are empty"),
    "None": ({"inputs": None}, TypeError, "inputs must be a tensor or a list of numbers, got None"),
    "texts": ({"inputs": ["a", "b"]}, TypeError, "inputs must be a tensor or a list of numbers, got ['a', 'b']"),
    "numbers with a point": ({"inputs": IDS.double()}, TypeError, "expected a text or token ids, got a tensor of"),
    "an unknown token": ({"inputs": [5, 999]}, ValueError, "token ids must lie in 0 to 60"),
    "two rows": ({"inputs": IDS.repeat(2, 1)}, ValueError, "token ids must be of one sequence"),
    "a batch": (
        {"inputs": {"input_ids": IDS.repeat(2, 1)}},
        ValueError,
        "expected one sequence, got a batch of 2",
    ),
    "a batch of embeddings": (
        {"inputs": {"inputs_embeds": torch.ones(2, 4, 32).double()}},
        UNSUPPORTED,
        "one sequence",
    ),
    "a strange name": ({"inputs": {"pixels": IDS}}, UNSUPPORTED, "LlamaForCausalLM does not run on these inputs"),
    "a short mask": ({"inputs": {**RIGHT, "input_ids": IDS}}, ValueError, "it needs one entry for each token"),
    **{f"as {n}": ({"inputs": {"input_ids": IDS, n: CACHE}}, ValueError, f"{n} holds states of") for n in CACHES},
    "a query under a left pad": ({"inputs": LEFT, "query": 1}, ValueError, "query 1 is a pad by the attention_mask"),
    "a query under a right pad": ({"inputs": RIGHT}, ValueError, "query 11 is a pad by the attention_mask"),
    "a key under a left pad": ({"inputs": LEFT, "key": 1}, ValueError, "may attend to, [3, 4, 5"),
    "a key under a right pad": ({"inputs": RIGHT, "query": 8, "key": -1}, ValueError, "may attend to, [0, 1, 2"),
    "a query that attends to nothing": (
        {"inputs": {"input_ids": IDS, "attention_mask": ALL_BUT_ONE[None, None]}, "query": 4},
        ValueError,
        "the mask lets query 4 attend to no key",
    ),
}


def refused(model, error, message, **arguments):
    before = state(model) if isinstance(model, nn.Module) else None
    with pytest.raises((error, TypeCheckError)) as caught:
        af.geometry.attribute(model, **{"inputs": IDS, "layer": 2, **arguments})
    assert isinstance(caught.value, TypeCheckError) or message in str(caught.value)
    assert before is None or same(before, state(model))


@pytest.mark.parametrize("what", ARGUMENTS)
def test_arguments_refused_in_words(what):
    arguments, error, message = ARGUMENTS[what]
    refused(_shared(), error, message, **arguments)


@cache
def _shared():
    """In training mode, with dropout and gradients of some parameters, so that a change of either shows."""
    model = llama(attention_dropout=0.5).train()
    model.model.embed_tokens.requires_grad_(False)
    return model


def broken(model):
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = math.nan
    return model


def on_meta(mode):
    with mode:
        return llama()


def prefixed(model):
    return get_peft_model(model, PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))


def masked(model):
    af.masks.attach(model, af.masks.from_dense(ALL_BUT_ONE))
    return model


MODELS = {
    "a name": (lambda: "minilm", {}, TypeError, "load a model by its name or folder with af.load_model"),
    "a linear layer": (lambda: nn.Linear(2, 2), {}, ValueError, "expected a transformers model, got Linear"),
    "one layer": (lambda: llama().model.layers[0], {}, ValueError, "got LlamaDecoderLayer: pass the model"),
    "bfloat16": (lambda: llama().bfloat16(), {}, UNSUPPORTED, "the weights are bfloat16"),
    "float16": (lambda: llama().half(), {}, UNSUPPORTED, "call model.float() first"),
    "NaN": (lambda: broken(llama()), {}, UNSUPPORTED, "LlamaAttention computes NaN or infinity for query 8 in head 0"),
    "no weights": (lambda: on_meta(torch.device("meta")), {}, UNSUPPORTED, "the weights are on the meta device"),
    "inference mode": (lambda: on_meta(torch.inference_mode()), {}, UNSUPPORTED, "load the model outside of both"),
    "learned prefixes": (lambda: prefixed(llama()), {}, UNSUPPORTED, "there are 12 keys"),
    "a mask without keys": (lambda: masked(llama()), {"query": 4}, ValueError, "query 4 attend to no key"),
    "shared layers": (lambda: deep("Albert"), {"layer": -1}, ValueError, "layer 2 is a later call of weights"),
    "another mixer": (lambda: deep("Jamba"), {}, ValueError, "layer 2 has no self-attention; layers with it: [1, 3]"),
    "no interface": (lambda: deep("Bloom"), {}, UNSUPPORTED, "no module of it calls ALL_ATTENTION_FUNCTIONS"),
    "a router": (lambda: named("DeepseekV4ForCausalLM").double(), {"layer": 1}, UNSUPPORTED, "a router or an indexer"),
    "keys mixed by what they hold": (
        lambda: named("Inkling2ForCausalLM").double(),  # its sinks are one for each query
        {"layer": 0},
        UNSUPPORTED,
        "layer 0 (model.layers.0.self_attn), head 0: the terms do not add up",
    ),
}


@pytest.mark.parametrize("what", MODELS)
def test_models_refused_in_words(what):
    make, arguments, error, message = MODELS[what]
    refused(make(), error, message, **arguments)


# -------- right


def switched(implementation):
    def change(model, _):
        model.set_attn_implementation(implementation)

    return change


def compiled(model, _):
    model.compile(backend="eager")


def compiled_layers(model, _):
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    model.model.layers[2].compile(backend="eager")


def parametrized(model, _):
    for layer in model.model.layers:
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj, layer.self_attn.q_proj):
            weight_norm(linear)


def checkpointed(model, _):
    model.gradient_checkpointing_enable()
    model.train()


CPU = torch.device("cpu")
PLACES = {f"model.layers.{n}": place for n, place in enumerate(("disk", "cpu", "disk"))}
PLACES |= {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "disk", "model.rotary_emb": "cpu"}
CHANGES = {
    "as it is": lambda model, _: None,
    **{name: switched(name) for name in ("eager", "sdpa", "flex_attention")},
    "compiled in place": compiled,
    "compiled": lambda model, _: torch.compile(model, backend="eager"),
    "layers compiled": compiled_layers,
    "offloaded": lambda model, _: cpu_offload(model, execution_device=CPU),
    "offloaded to disk": lambda model, folder: disk_offload(model, folder, execution_device=CPU),
    "on several devices": lambda model, folder: dispatch_model(
        model, PLACES, CPU, offload_dir=folder, force_hooks=True
    ),
    "in training": lambda model, _: model.train(),
    "checkpointed": checkpointed,
    "under a causal mask": lambda model, _: af.masks.attach(model, af.masks.causal(9)) and None,
    "its base": lambda model, _: model.model,
    "wrapped": lambda model, _: nn.DataParallel(model),
    "with parametrized weights": parametrized,
    "with its entries in a base": lambda model, _: af.knowledge.from_ffn(model),
}
CONTEXTS = {
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
INPUTS = {
    "a list": (IDS[0].tolist(), -1),
    "left pads": (LEFT, -1),
    "right pads": (RIGHT, 8),
    "right pads, as bools": ({**RIGHT, "attention_mask": RIGHT["attention_mask"].bool()}, -4),
    "no mask": ({"input_ids": IDS, "attention_mask": None}, -1),
    **{f"a new cache as {name}": ({"input_ids": IDS, name: DynamicCache()}, -1) for name in CACHES},
    "after another document": (PACKED, -1),
    "a cache wanted": ({"input_ids": IDS, "use_cache": True}, -1),
}


def agrees(result, expected):
    for name in ("raw", "scores", "weights"):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("what", [*CHANGES, *CONTEXTS])
def test_a_model_as_it_is_used(what, tmp_path):
    model = llama(attention_dropout=0.5)
    changed = CHANGES[what](model, tmp_path) if what in CHANGES else None
    model = model if changed is None else changed
    before = state(model)
    with CONTEXTS.get(what, ExitStack)():
        result = af.geometry.attribute(model, IDS.clone(), layer=2)
    agrees(result, plain())
    assert same(before, state(model))


@pytest.mark.parametrize("what", INPUTS)
def test_inputs_in_other_forms(what):
    inputs, query = INPUTS[what]
    agrees(af.geometry.attribute(_shared(), inputs, layer=2, query=query), plain())


@pytest.mark.parametrize("keys", [3, -6, torch.tensor(3), (3,), range(3, 4), [3, 5]])
def test_chosen_keys(keys):
    result = af.geometry.attribute(_shared(), IDS, layer=2, head=1, key=keys)
    assert result.keys == ((3, 5) if keys == [3, 5] else (3,))
    torch.testing.assert_close(result.centred, plain().centred[1, list(result.keys)], atol=1e-12, rtol=0)


def test_adapters_are_read_as_the_merged_model():
    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.5))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    before = state(model)
    result = af.geometry.attribute(model, IDS, layer=2)
    assert same(before, state(model))
    assert (result.raw - plain().raw).abs().max() > 1e-3
    agrees(result, af.geometry.attribute(model.merge_and_unload(), IDS, layer=2))


def test_a_mask_and_a_bias_at_once():
    model = llama()
    config = af.bias.GuidanceConfig(hidden_dim=8, init="kaiming")
    with af.bias.attach(model, config), af.masks.attach(model, af.masks.sliding_window(9, 4)):
        before = state(model)
        result = af.geometry.attribute(model, IDS, layer=2)
        assert same(before, state(model))
    assert result.keys == (5, 6, 7, 8)
    assert result.constants["attached bias"].abs().max() > 1e-3
    torch.testing.assert_close(result.weights, result.scores.softmax(-1), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "path", "last"),
    [("Llama", "model.layers.1.mlp", "down_proj"), ("Bert", "bert.encoder.layer.1.output.dense", "")],
)
def test_a_hook_that_changes_an_output(name, path, last):
    """It doubles what a sublayer adds, which is what a matrix of twice the size does."""
    model, other = (deep(name).double().eval() for _ in range(2))
    model.get_submodule(path).register_forward_hook(lambda module, inputs, output: 2 * output)
    with torch.no_grad():
        other.get_submodule(path).get_submodule(last).weight.mul_(2)
    result, expected = (af.geometry.attribute(one, IDS, layer=2) for one in (model, other))
    agrees(result, expected)


def test_the_first_of_the_calls_of_shared_layers():
    assert af.geometry.attribute(deep("Albert").double(), IDS, layer=-3).components == (
        ComponentName(None, "embedding", "encoder.albert_layer_groups.0"),
    )


# -------- encoder and decoder

SOURCE = {"input_ids": IDS[:, :6], "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]])}
SOUND = {"input_features": torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(0)).double()}
HALVES = {"T5": (SOURCE, 4), "Bart": (SOURCE, 4), "Whisper": (SOUND, 8)}


@pytest.mark.parametrize("name", HALVES)
def test_a_decoder_reads_the_components_of_its_encoder(name):
    source, keys = HALVES[name]
    model = deep(name).double().eval()
    inputs: dict[str, Tensor] = {**source, "decoder_input_ids": IDS[:, 5:]}
    result = af.geometry.attribute(model, inputs, layer=1, attention="cross", query=2)
    assert [str(name) for name in result.key_components[:2]] == ["encoder embedding", "encoder layer 0 attention"]
    assert [str(name) for name in result.components[:3]] == [
        "embedding",
        "layer 0 attention",
        "layer 0 cross-attention",
    ]
    assert result.keys == tuple(range(keys))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).cross_attentions[1][0, :, 2, :keys]
    torch.testing.assert_close(result.weights, weights, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(result.raw.sum((-1, -2)) + result.constant, result.scores, atol=1e-9, rtol=1e-9)
    padded = {**inputs, "decoder_attention_mask": torch.tensor([[1, 1, 0, 1]])}
    refused(model, ValueError, "query 2 is a pad by the decoder_attention_mask", inputs=padded, layer=1, query=2)


def test_half_of_two_halves():
    model = deep("Bart").double().eval()
    encoder = af.geometry.attribute(model.get_encoder(), SOURCE, layer=-1, query=0)
    assert encoder.keys == (0, 1, 2, 3)
    refused(model.get_decoder(), UNSUPPORTED, "did not attend in this pass", layer=-1, attention="cross")
    given = {"encoder_outputs": model.get_encoder()(**SOURCE), "decoder_input_ids": IDS}
    refused(model, TypeError, "encoder_outputs must be a tensor", inputs=given, layer=-1, attention="cross")
