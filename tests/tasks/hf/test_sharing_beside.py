"""Shared prefixes beside other features: each gives what it gives without them, or says in a sentence why not."""

import pytest
import torch
import transformers
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.integrations.neftune import activate_neftune

import attnflow as af
from tests.models import ZOO
from tests.tasks.hf.test_sharing import BATCHES, assert_same, labelled, run

GIVEN = labelled(BATCHES["a group"])
CALL = {**GIVEN, "use_cache": False}


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_experts_are_balanced_over_the_tokens_of_the_rows(name):
    model = ZOO[name].build()
    model.config.output_router_logits = True
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = 10.0
    stock = run(model, GIVEN)
    with af.tasks.share_prefixes(model) as handle:
        shared = run(model, GIVEN)
        routers = model(**CALL).router_logits
    assert handle.report.shared == 2
    assert_same(stock, shared, 1e-5)
    real = GIVEN["attention_mask"].flatten().bool()
    for one, other in zip(model(**CALL).router_logits, routers, strict=True):
        torch.testing.assert_close(one[real], other[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["trained with NEFTune", "a generator of its own", "drawn, but not used"])
def test_numbers_drawn_in_a_forward_are_refused(kind):
    model = ZOO["Llama"].make().train()
    generator = torch.Generator().manual_seed(0)
    with af.tasks.share_prefixes(model) as handle:
        model(**CALL)  # without noise, which a trainer switches on later
        if kind == "trained with NEFTune":
            activate_neftune(model, 5.0)
        else:
            own = {"generator": generator} if "generator" in kind else {}
            scale = 0.0 if "not used" in kind else 0.01
            model.model.norm.register_forward_hook(lambda m, i, out: out + scale * torch.randn(out.shape, **own))
        if "not used" not in kind:
            with pytest.raises(ValueError, match="draws random numbers in training"):
                model(**CALL)
            model.eval()
        model(**CALL)
    assert handle.report.shared >= 2


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_float64_with_the_softmax_of_eager_attention_in_float32(name):
    model = ZOO[name].make().double()
    model.set_attn_implementation("eager")
    stock = run(model, GIVEN)
    with af.tasks.share_prefixes(model) as handle:
        shared = run(model, GIVEN)
    assert handle.report.shared == 1
    assert_same(stock, shared, 1e-5)


@pytest.mark.parametrize("flag", ["output_attentions", "return_dict"])
def test_what_a_config_asks_for_runs_as_it_came(flag):
    model = ZOO["Llama"].make().model
    model.set_attn_implementation("eager")
    setattr(model.config, flag, flag != "return_dict")
    given = {**BATCHES["a group"], "use_cache": False}
    stock = model(**given)
    with af.tasks.share_prefixes(model) as handle:
        assert torch.equal(model(**given)[0], stock[0])
    assert len(handle.report.stock) == 1
    assert flag in next(iter(handle.report.stock))


def test_a_guard_audits_the_rows_and_the_step_is_shared():
    model = ZOO["Llama"].make()
    with af.audit.guard(model) as guard, af.tasks.share_prefixes(model) as handle:
        model(**CALL)
    assert guard.ok
    assert guard.reports[0].layers == 2
    assert guard.reports[0].positions == GIVEN["input_ids"].shape[1]  # of the batch, not of the check of the handle
    assert (handle.report.calls, handle.report.shared) == (1, 1)


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_data_parallel(kind, tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = ZOO["Llama"].make().train()
        stock = run(model, GIVEN)
        handle = af.tasks.share_prefixes(model)
        if kind == "FSDP2":
            for layer in model.model.layers:
                fully_shard(layer)
        loss, logits, gradients = run(fully_shard(model) if kind == "FSDP2" else DistributedDataParallel(model), GIVEN)
        assert handle.report.shared == 1
        whole = {n.removeprefix("module."): getattr(g, "full_tensor", g.clone)() for n, g in gradients.items()}
        assert_same(stock, (loss, logits, whole), 1e-4)
        handle.remove()
        if kind == "FSDP2":
            with pytest.raises(af.UnsupportedArchitecture, match="call share_prefixes before fully_shard"):
                af.tasks.share_prefixes(model)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_every_call_of_a_compiled_model_is_counted():
    model = ZOO["Llama"].make().train()
    stock = run(model, GIVEN)
    with af.tasks.share_prefixes(model) as handle:
        model.compile(backend="eager")
        for number in (1, 2):
            assert_same(stock, run(model, GIVEN), 1e-5)
            assert handle.report.shared == number


@pytest.mark.parametrize("name", ["Bart", "Pegasus"])
@pytest.mark.parametrize("batch", ["a group", "both sides", "packed"])
def test_a_decoder_without_position_ids_has_those_of_its_rows(name, batch):
    small = {"vocab_size": 50, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    config = getattr(transformers, f"{name}Config")(**small)
    model = getattr(transformers, f"{name}ForCausalLM")(config).double().eval()
    given = {**labelled(BATCHES[batch]), "position_ids": BATCHES[batch].get("position_ids")}
    stock = run(model, given)
    with af.tasks.share_prefixes(model) as handle:
        assert_same(stock, run(model, given), 1e-9)
    assert handle.report.shared == (batch != "packed")  # one sequence to a model without position_ids
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
