"""Models whose weights accelerate brings to each call: the same answers as in place, or one sentence."""

import copy

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model

import attnflow as af
from tests.models import tiny, tokens

MIXED = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu"}
MIXED |= {"model.norm": "cpu", "lm_head": "disk", "model.rotary_emb": "cpu"}
WAYS = {
    "cpu": lambda model, folder: cpu_offload(model, execution_device=torch.device("cpu")),
    "disk": lambda model, folder: disk_offload(model, folder, execution_device=torch.device("cpu")),
    "mixed": lambda model, folder: dispatch_model(model, MIXED, "cpu", offload_dir=folder, force_hooks=True),
}


@pytest.fixture(params=WAYS)
def models(request, tmp_path):
    model = tiny("Llama", torch.float32)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(3)
    offloaded = WAYS[request.param](copy.deepcopy(model), tmp_path)
    assert any(parameter.is_meta for parameter in offloaded.parameters())
    return model, offloaded


def rows():
    ids = tokens(3, 8)
    ids[:, :5] = ids[0, :5]
    return ids


def under(change):
    def run(model, ids):
        with torch.no_grad(), change(model):
            return model(input_ids=ids).logits

    return run


def guided(model):
    torch.manual_seed(5)
    handle = af.bias.attach(model, af.bias.GuidanceConfig(hidden_dim=8))
    with torch.no_grad():
        for parameter in handle.parameters():
            parameter.normal_()
    return handle


@pytest.mark.parametrize(
    "run",
    [
        under(lambda model: af.masks.attach(model, af.masks.sliding_window(8, 3))),
        under(guided),
        under(af.audit.guard),
        under(af.tasks.share_prefixes),
        lambda model, ids: torch.tensor(af.audit.check(model, {"input_ids": ids}).ok),
        lambda model, ids: af.audit.measure(model, {"input_ids": ids}).reachability(),
        lambda model, ids: torch.tensor([row["symmetry"] for row in af.geometry.score(model).rows()]),
    ],
    ids=["mask", "bias", "guard", "shared prefixes", "audit", "measure", "scores"],
)
def test_the_answers_are_those_of_the_model_in_place(models, run):
    model, offloaded = models
    ids = rows()
    with torch.no_grad():
        plain = offloaded(input_ids=ids).logits
        assert torch.equal(plain, model(input_ids=ids).logits)
    held = {name: (parameter.is_meta, parameter.dtype) for name, parameter in offloaded.named_parameters()}
    assert torch.equal(run(offloaded, ids), run(model, ids))
    assert held == {name: (parameter.is_meta, parameter.dtype) for name, parameter in offloaded.named_parameters()}
    with torch.no_grad():
        assert torch.equal(offloaded(input_ids=ids).logits, plain)


def test_what_writes_or_moves_weights_is_refused_in_one_sentence(models):
    _, offloaded = models
    facts = [{"prompt": "a", "answer": "b"}]
    for run in (
        lambda: af.knowledge.from_ffn(offloaded),
        lambda: af.knowledge.trace(offloaded, tokens(1, 4)),
        lambda: af.knowledge.edit(offloaded, facts),
        lambda: af.geometry.init_symmetric_(offloaded),
    ):
        with pytest.raises(af.UnsupportedArchitecture, match=r"weights.* offloaded .*; load it without device_map"):
            run()
