"""A trial leaves a model exactly as it was, also one that changes itself when it runs."""

import random

import numpy as np
import pytest
import torch

from attnflow.models.anatomy.sites import find_sites
from attnflow.models.passes.trial import DoesNotRun, read, trial
from tests.conformance.miniature import Architecture, build
from tests.models import tiny


def state(model):
    modules = [(name, id(module), module.training, sorted(vars(module))) for name, module in model.named_modules()]
    tensors = {name: (id(t), t.clone(), t.grad) for name, t in (*model.named_parameters(), *model.named_buffers())}
    return modules, tensors, model.config.to_dict()


def assert_same(before, after):
    assert before[0] == after[0]
    assert before[2] == after[2]
    assert list(before[1]) == list(after[1])
    for name, (identity, value, grad) in before[1].items():
        assert after[1][name][0] == identity, name
        assert torch.equal(after[1][name][1], value), name
        assert after[1][name][2] is grad, name


@pytest.mark.parametrize(
    "model",
    [
        tiny("Llama").train(),
        tiny(
            "Llama",
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            max_position_embeddings=8,
        ),
        tiny("BigBirdPegasus"),  # puts other attention modules in place when it reads few tokens
    ],
    ids=["training", "growing rotary table", "replaces its attention"],
)
def test_model_and_random_numbers_are_as_before(model):
    before, seen = state(model), []
    python, numpy, pytorch = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002

    def look(call, proceed):
        seen.append(call.module)
        torch.rand(3), random.seed(0), np.random.rand()  # noqa: NPY002
        return proceed(call)

    sites = find_sites(model)
    with trial(model, dict.fromkeys(sites, look)):
        assert not model.training
        assert not torch.is_grad_enabled()
        read(model, [[5] * 12])
    assert seen
    assert_same(before, state(model))
    stream = random.Random()
    stream.setstate(python)  # the type checker of the tests draws a few numbers of it, too
    assert random.getrandbits(32) in [stream.getrandbits(32) for _ in range(1000)]
    assert np.array_equal(np.random.get_state()[1], numpy)  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), pytorch)


def test_hidden_states_that_a_config_asks_for_are_collected_once():
    """transformers adds hooks in the first pass that asks for them, and an attribute that says so."""
    model = tiny("Llama")
    model.config.output_hidden_states = True
    with trial(model):
        read(model, [[5, 6, 7]])
    assert len(read(model, [[5, 6, 7]]).hidden_states) == model.config.num_hidden_layers + 1


def test_a_refusal_is_named_and_nothing_stays():
    model = tiny("Llama")
    before = state(model)
    with pytest.raises(DoesNotRun, match="LlamaForCausalLM does not run on a few tokens") as raised, trial(model):
        read(model, [[5, 1000]])
    assert raised.value.why.startswith("IndexError")
    assert_same(before, state(model))


def test_one_half_of_a_model_reads_tokens_alone():
    decoder = build(Architecture("bigbird_pegasus", "BigBirdPegasusForCausalLM", "decoder"))
    with trial(decoder):
        assert read(decoder, [[5, 6, 7]]).logits.shape[0] == 1
