"""A decoding step hands B's row to the model's own SDPA: few operators, and the numbers of the whole sequence."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

import attnflow as af
from tests.bias.cases import KINDS, config_of
from tests.bias.hf.common import BIASES, SMALL, biased, disturb, family, layer_biases, padded, tokens
from tests.bias.hf.test_caches import pieces, whole
from tests.bias.hf.test_generate import generate, greedy

# Operators without a kernel: views and wrappers.
VIEWS = {"view", "_unsafe_view", "transpose", "t", "expand", "slice", "select", "unsqueeze", "squeeze", "permute"}
VIEWS |= {"detach", "as_strided", "alias", "unbind", "split", "split_with_sizes", "_reshape_alias", "lift_fresh"}


class Operators(TorchDispatchMode):
    """Counts what would be launched on a device."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.names[name] += name not in VIEWS
        return function(*args, **(kwargs or {}))


def step(model, cache, ids):
    """The operators of the second token after a prompt, as the first may fill caches and memos."""
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
        model(ids[:, 8:9], past_key_values=cache)
        with (operators := Operators()):
            model(ids[:, 9:10], past_key_values=cache)
    return operators.names


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["Llama", "Mistral", "GPT2"])
def test_a_decoding_step_adds_at_most_nine_operators_to_a_layer(name, kind):
    """What all layers share, such as positions and the form of the mask, is made once."""
    layers = {"n_layer" if name == "GPT2" else "num_hidden_layers": 8}
    model, ids = family(name, torch.float32, **layers), tokens(1, 10)
    before = step(model, DynamicCache(config=model.config), ids)
    af.bias.attach(model, config_of(kind, **SMALL))
    disturb(model)
    after = step(model, DynamicCache(config=model.config), ids)
    assert 3 * 8 <= after.total() - before.total() <= 9 * 8 + 4, after - before


@pytest.mark.parametrize("make", [DynamicCache, lambda config: StaticCache(config, 20)], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3"])
@pytest.mark.parametrize("kind", BIASES)
def test_decoding_is_the_whole_sequence(name, kind, make):
    model, ids = biased(name, BIASES[kind]), tokens(2, 12)
    found = pieces(model, ids, [4, *[1] * 8], make(config=model.config))
    tolerance = 1e-5 if name == "Gemma3" else 1e-10  # whose own kernels compute in float32
    torch.testing.assert_close(found, whole(model, ids), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", BIASES)
def test_beams_and_assistants_decode_as_without_a_cache(kind):
    model = biased("Llama", BIASES[kind], eos_token_id=None)
    rows, batch = padded((6, 3))
    beams = {"attention_mask": batch["attention_mask"], "num_beams": 3}
    found = generate(model, batch["input_ids"], **beams)
    assert torch.equal(found, generate(model, batch["input_ids"], **beams, use_cache=False))
    expected, _ = greedy(model, rows[0], torch.ones_like(rows[0]))
    assistant = family("Llama", torch.float64, eos_token_id=None)
    assert torch.equal(generate(model, rows[0], assistant_model=assistant), expected)
    assert torch.equal(generate(model, rows[0], prompt_lookup_num_tokens=2), expected)


@pytest.mark.parametrize("kind", ["guidance", "others"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_in_16_bits_are_as_exact_as_the_reference(kind, dtype):
    """A large number for all keys, which softmax cannot see, costs no digits."""
    model, exact = biased("Llama", BIASES[kind], dtype, layers=1), biased("Llama", BIASES[kind], layers=1)
    exact.load_state_dict(model.state_dict())
    for one in (model, exact):
        with torch.no_grad():
            for _, bias in layer_biases(one):
                for name, parameter in bias.named_parameters():
                    if name.endswith(("output_bias", "values", "table")):
                        parameter.add_(200.0)
    ids, mask = padded((12, 9))[1].values()
    errors = {}
    with torch.no_grad():
        expected = exact(ids, attention_mask=mask, use_cache=False).logits[:, 8:]
        for backend in ("auto", "reference"):
            for _, bias in layer_biases(model):
                bias.backend = backend
            cache = DynamicCache(config=model.config)
            model(ids[:, :8], attention_mask=mask[:, :8], past_key_values=cache)
            steps = [
                model(ids[:, n : n + 1], attention_mask=mask[:, : n + 1], past_key_values=cache).logits
                for n in range(8, 12)
            ]
            errors[backend] = (torch.cat(steps, dim=1) - expected).abs().max()
    assert 0 < errors["auto"] <= 2 * errors["reference"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_token_that_may_attend_to_nothing_has_the_output_zero(dtype):
    model = biased("Llama", BIASES["guidance"], dtype, num_hidden_layers=1)
    ids, mask = tokens(2, 6), torch.ones(2, 6, dtype=torch.int64)
    mask[1] = 0
    outputs = []
    hook = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache)
        model(ids[:, 5:], attention_mask=mask, past_key_values=cache)
    hook.remove()
    assert not outputs[-1][1].any()
    assert outputs[-1][0].any()
