"""The interception of attention: nothing changes for the model, interceptors see what the kernel would, any order."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

from attnflow.models.anatomy.sites import find_sites, models_around
from attnflow.models.passes.interception import intercept
from attnflow.models.passes.mask_request import asking, request_of
from tests.conformance.miniature import named
from tests.models import outputs, state, tiny, tokens
from tests.models.table import BIDIRECTIONAL, CAUSAL

LENGTH = 9
INTERFACES = [*CAUSAL, *BIDIRECTIONAL, "Doge", "BigBirdPegasus", "Bart"]


class Watch:
    def __init__(self):
        self.calls = []

    def __call__(self, call, proceed):
        self.calls.append(call)
        return proceed(call)


class Add:
    def __init__(self, number):
        self.number = number

    def __call__(self, call, proceed):
        output, weights = proceed(call)
        return output + self.number, weights


def double(call, proceed):
    output, weights = proceed(call)
    return 2 * output, weights


def put(model, interceptor, role="bias", **options):
    sites = find_sites(model)
    return intercept(models_around(sites), {s.module: interceptor for s in sites}, role=role, **options)


def inputs(name, **more):
    given = {"input_ids": tokens(2, 64 if name == "BigBirdPegasus" else LENGTH), **more}
    return given | ({"decoder_input_ids": tokens(2, 6)} if name in ("BigBirdPegasus", "Bart") else {})


def run(model, given):
    with torch.no_grad():
        return outputs(model, **given)


@pytest.mark.parametrize("name", INTERFACES)
@pytest.mark.parametrize("implementation", [None, "eager"])
@pytest.mark.parametrize("replaces_mask", [False, True])
def test_an_interceptor_that_only_watches_changes_no_bit(name, implementation, replaces_mask):
    model, given, watch = tiny(name), inputs(name), Watch()
    if implementation:
        model.set_attn_implementation(implementation)
    plain, before = run(model, given), state(model)
    handle = put(model, watch, replaces_mask=replaces_mask)
    ours = run(model, given)
    if replaces_mask:  # SDPA may choose another kernel for a mask than for no mask with a flag
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(ours, plain)
    assert watch.calls
    for call in watch.calls:
        assert (call.request is None) or call.request is request_of(call.mask)
    assert handle.remove() == handle.remove() == []
    assert state(model) == before


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_request_says_where_tokens_lie(implementation):
    model, ids, watch = tiny("Llama"), tokens(2, LENGTH), Watch()
    model.set_attn_implementation(implementation)
    real = torch.ones_like(ids)
    real[0, :2] = 0
    put(model, watch, replaces_mask=True)
    cache = DynamicCache()
    with torch.no_grad():
        model(ids[:, :5], attention_mask=real[:, :5], past_key_values=cache)
        model(ids[:, 5:], attention_mask=real, past_key_values=cache)
    first, second = watch.calls[0].request, watch.calls[-1].request
    assert [(r.first_query, r.first_key, r.num_queries, r.num_keys) for r in (first, second)] == [
        (0, 0, 5, 5),
        (5, 0, 4, 9),
    ]
    assert second.pads()[1].tolist() == [2, 0]
    assert torch.equal(second.pads()[0], real.bool())
    assert watch.calls[2].request is watch.calls[3].request  # one for the layers of one forward pass


def test_copies_have_interceptors_of_their_own():
    model, given = tiny("Llama"), inputs("Llama")
    plain = run(model, given)
    holder = torch.nn.ModuleList([model])
    holder.handle = put(model, double)
    ours = run(model, given)
    for twin in (copy.deepcopy(holder), pickle.loads(pickle.dumps(holder))):
        assert torch.equal(run(twin[0], given), ours)
        twin.handle.remove()
        assert torch.equal(run(twin[0], given), plain)
    assert torch.equal(run(model, given), ours)


def test_copies_of_a_mask_are_known_and_changed_masks_are_not():
    model, ids, watch = tiny("Llama"), tokens(2, LENGTH), Watch()
    put(model, watch, replaces_mask=True)
    outputs(model, input_ids=ids)
    mask, request = watch.calls[0].mask, watch.calls[0].request
    assert mask is not None
    for twin in (mask.detach(), mask.clone(), mask.to("cpu", copy=True)):
        assert request_of(twin) is request
    assert request_of(mask[:, :, 1:]) is None
    assert request_of(mask | True) is None
    assert request_of(torch.zeros(3)) is request_of(None) is None
    assert request_of(mask) is request
    mask[0, 0, 0, 0] = False
    assert request_of(mask) is None


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_roles_and_removal_in_any_order(order):
    """ "mask" stands around "bias"; within a role the newest is in force."""
    model, given = tiny("Llama"), inputs("Llama")
    before, plain = state(model), run(model, given)
    number, other = Add(1.0), Add(5.0)
    making = [(number, "mask"), (double, "bias"), (other, "mask")]
    handles = [put(model, *one) for one in making]
    alive = {0, 1, 2}
    for index in order:
        in_force = [making[i] for i in sorted(alive)]
        newest = {role: interceptor for interceptor, role in in_force}
        twin = tiny("Llama")
        twin.load_state_dict(model.state_dict())
        for role in ("bias", "mask"):
            if role in newest:
                put(twin, newest[role], role)
        assert torch.equal(run(model, given), run(twin, given))
        handles[index].remove()
        alive.discard(index)
        assert handles[index].active is False
    assert state(model) == before
    assert torch.equal(run(model, given), plain)


def test_a_block_mask_of_the_padding_alone_stands_in_under_flex_attention():
    """No table of all pairs: the model is given something real, and cheap."""
    from transformers.masking_utils import create_causal_mask

    model = tiny("Llama")
    put(model, double, implementation="flex_attention", replaces_mask=True)
    real = torch.ones(2, 1000, dtype=torch.int64)
    real[1, :3] = 0
    mask = create_causal_mask(model.config, torch.empty(2, 1000, 0), real, None)
    assert isinstance(mask, BlockMask)
    assert mask.shape == (2, 1, 1000, 1000)
    assert mask.kv_indices.numel() == 2
    b, k = torch.meshgrid(torch.arange(2), torch.arange(1000), indexing="ij")
    assert torch.equal(mask.mask_mod(b, b * 0, k * 0, k), real.bool())
    assert request_of(mask).num_keys == request_of(mask.to("cpu")).num_keys == 1000


def test_listeners_that_overlap_leave_the_mask_functions_as_they_were(monkeypatch):
    """Threads enter and leave in any order, and others register functions meanwhile."""
    functions = AttentionMaskInterface._global_mapping
    monkeypatch.setitem(functions, "late", sdpa_mask)
    del functions["late"]
    before, model, ids = dict(functions), tiny("Llama"), tokens(1, LENGTH)
    first, second = asking(), asking()
    asked = first.__enter__()
    functions["late"] = sdpa_mask
    also = second.__enter__()
    outputs(model, input_ids=ids)
    first.__exit__(None, None, None)
    outputs(model, input_ids=ids)
    with ThreadPoolExecutor(1) as others:
        others.submit(outputs, model, input_ids=ids).result()
    second.__exit__(None, None, None)
    outputs(model, input_ids=ids)
    assert [len(one.made) for one in (asked, also)] == [1, 2]
    assert functions == {**before, "late": sdpa_mask}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_masks_die_with_their_forward_pass(implementation):
    """Without waiting for the garbage collector: they are tables of all pairs."""
    import gc
    import weakref

    import attnflow as af

    model, ids = tiny("Llama", torch.float32), tokens(2, LENGTH)
    model.set_attn_implementation(implementation)
    real = torch.ones_like(ids)
    real[0, :2] = 0
    masks = []

    def watch(call, proceed):
        masks.extend(weakref.ref(one) for one in (call.mask, call.request) if one is not None)
        return proceed(call)

    af.bias.attach(model, af.bias.GuidanceConfig(hidden_dim=4, layers="every"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "score_terms" in name:
                parameter.normal_()
    put(model, watch, "mask")
    gc.collect()
    gc.disable()
    try:
        run(model, {"input_ids": ids, "attention_mask": real})
        outputs(model, input_ids=ids, attention_mask=real).sum().backward()
        assert masks
        assert [one() for one in masks if one() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_keys_that_an_indexer_chose_stay_the_only_ones(implementation):
    if not hasattr(transformers, "DeepseekV32Config"):
        pytest.skip("this transformers has no DeepSeek-V3.2")
    model = named("DeepseekV32ForCausalLM").double()
    model.set_attn_implementation(implementation)
    given = {"input_ids": tokens(1, LENGTH)}
    before, watch = run(model, given), Watch()
    handle = put(model, watch)
    assert torch.equal(run(model, given), before)
    mask = watch.calls[0].mask
    allowed = mask if mask.dtype == torch.bool else mask == 0
    assert allowed.sum(-1).max() == model.config.index_topk < LENGTH
    handle.remove()
