"""A bias under every mask, in float64, against attention written out in full."""

from functools import partial

import pytest
import torch

import attnflow as af
from tests.bias.cases import Dense
from tests.bias.hf.common import (
    EVERY_OTHER_KIND,
    GUIDANCE,
    biased,
    disturb,
    family,
    handle_of,
    layer_biases,
    outputs,
    padded,
    tokens,
)
from tests.catalogue_cases import CASES

SQUARE = {case.mask.name: case.mask for case in CASES if 3 <= case.mask.num_queries == case.mask.num_keys <= 24}
KINDS = (*GUIDANCE, *(one for one in EVERY_OTHER_KIND if one.kind != "cumulative"))


class Watch:
    """Sees the attention calls of the first biased layer, and what its attention module makes of them."""

    def __init__(self, model):
        self.bias = next(bias for _, bias in layer_biases(model))
        owner = next(module for module in model.modules() if getattr(module, "score_terms", None) is self.bias)
        self.calls, self.outputs, self.weights = [], [], []
        self.bias.observer = self.calls.append
        names = ("o_proj", "c_proj", "dense", "out_proj", "out_lin", "Wo")
        last = next((m for name, m in owner.named_children() if name in names), None)
        if last is None:  # BERT's output projection lies outside
            owner.register_forward_hook(lambda module, args, output: self.outputs.append(output[0]))
        else:
            last.register_forward_pre_hook(lambda module, args: self.outputs.append(args[0]))

    def expected(self, allow):
        """The last call's attention output under the mask `allow`, [queries, keys] or [batch, queries, keys]."""
        call = self.calls[-1]
        groups = call.query.shape[1] // call.key.shape[1]
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (call.key, call.value))
        score = call.query @ key.mT * call.scale
        for term in call.terms:
            tile = term.tile(slice(0, score.shape[2]), slice(0, score.shape[3]))
            score = score + tile.repeat_interleave(score.shape[1] // tile.shape[1], dim=1)
        allow = allow if allow.ndim == 3 else allow[None]
        weights = score.masked_fill(~allow[:, None], -torch.inf).softmax(dim=-1).nan_to_num()
        return (weights @ value).transpose(1, 2).flatten(2)


def check(watch, allow):
    torch.testing.assert_close(watch.outputs[-1], watch.expected(allow), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", SQUARE)
def test_any_mask_of_the_catalogue(name):
    model, mask = biased("Bert", KINDS), SQUARE[name]
    watch = Watch(model)
    with torch.no_grad(), af.masks.attach(model, mask):
        outputs(model, input_ids=tokens(2, mask.num_queries))
    check(watch, mask.dense())


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Mistral", "Gemma3", "Bert", "ModernBert", "OPT", "Phi3"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_models_own_mask_with_padding(name, implementation):
    model = family(name)
    model.set_attn_implementation(implementation)
    af.bias.attach(model, KINDS)
    disturb(model)
    watch = Watch(model)
    _, batch = padded((9, 5), "right" if name in ("Bert", "ModernBert") else "left")
    with torch.no_grad():
        outputs(model, **batch)
    size, real = 9, batch["attention_mask"].bool()
    distance = torch.arange(size)[:, None] - torch.arange(size)
    allow = {"Mistral": (distance >= 0) & (distance < 4), "Gemma3": (distance >= 0) & (distance < 4)}
    own = allow.get(name, distance >= 0 if name not in ("Bert", "ModernBert") else torch.ones(size, size) > 0)
    seen, made = real[:, None] & own, watch.expected(real[:, None] & own)
    kept = seen.any(dim=-1)  # what a pad may see is the model's affair
    tolerance = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(watch.outputs[-1][kept], made[kept], **tolerance)


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_packed_documents_are_the_documents_one_by_one(name):
    model = biased(name, (*GUIDANCE, *EVERY_OTHER_KIND))
    documents = [tokens(1, 4), tokens(1, 6)]
    ids, positions = torch.cat(documents, dim=1), torch.cat([torch.arange(4), torch.arange(6)])[None]
    same = torch.block_diag(torch.ones(4, 4), torch.ones(6, 6)).bool() & (torch.ones(10, 10).tril() > 0)
    additive = torch.zeros(1, 1, 10, 10, dtype=torch.float64).masked_fill(~same, torch.finfo(torch.float64).min)
    ways = {
        "position ids": {},
        "boolean": {"attention_mask": same[None, None]},
        "additive": {"attention_mask": additive},
    }
    infinite = {"attention_mask": additive.masked_fill(~same, -torch.inf)}
    if name == "GPT2":
        handle_of(model).remove()  # a number per pair of absolute positions, which GPT-2 keeps to itself
        af.bias.attach(model, (*GUIDANCE, *(one for one in EVERY_OTHER_KIND if one.kind != "dense")))
        disturb(model)
    with torch.no_grad():
        expected = torch.cat([outputs(model, input_ids=document) for document in documents], dim=1)
        for inputs in (ways | {"infinite": infinite}).values():
            found = outputs(model, input_ids=ids, position_ids=positions, **inputs, use_cache=False)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_an_additive_mask_that_is_itself_a_bias_is_added():
    model, ids = biased("Bert"), tokens(2, 7)
    extra = torch.randn(2, 1, 7, 7, dtype=torch.float64)
    watch = Watch(model)
    with torch.no_grad():
        outputs(model, input_ids=ids, attention_mask=extra)
    check(watch, torch.ones(7, 7).bool())
    assert any(isinstance(term, Dense) and torch.equal(term.values, extra) for term in watch.calls[0].terms)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Qwen3"])
@pytest.mark.parametrize("task", ["block", "butterfly"])
def test_merged_tasks_of_unequal_length(name, task):
    """Block two-stream and butterfly batches: their masks are 4D and additive, their positions repeat."""
    family_of = partial(af.tasks.block_two_stream, block=2, mask_token=1) if task == "block" else af.tasks.butterfly
    batch = af.tasks.Collator(family_of, dtype=torch.float64)([[5, 6, 7, 8], [9, 10, 11, 12, 13, 14]])
    labels = batch.pop("labels")
    model = biased(name, (*GUIDANCE, *EVERY_OTHER_KIND))
    af.tasks.average_embeddings(model)
    watch = Watch(model)
    result = model(**batch, use_cache=False)
    check(watch, batch["attention_mask"][:, 0] == 0)
    af.tasks.loss(result, labels).backward()
    assert all(parameter.grad is not None for parameter in handle_of(model).parameters())


def test_a_query_with_nothing_allowed_gets_zero_under_a_bias():
    model, mask = (
        biased("Llama"),
        af.masks.causal(8) & ~af.masks.from_intervals([[(0, 8)] if q == 3 else [] for q in range(8)]),
    )
    with af.masks.attach(model, mask):
        watch = Watch(model)
        outputs(model, input_ids=tokens(2, 8)).sum().backward()
    assert (watch.outputs[0][:, 3] == 0).all()
    check(watch, mask.dense())
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
