"""Models and layers inside wrappers are audited by their own names, eagerly; transforms and bare shapes are refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, grad, vmap

import attnflow as af
from attnflow.audit import check, declared_order, guard, measure
from tests.audit.common import tiny, tokens
from tests.audit.test_outputs import Returns

IDS = tokens(2, 8)
CAUSAL = af.masks.causal(8)


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled_layers(model):
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend="eager")
    return model


def compiled_in_place(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


def checkpointed_layers(model):
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)
    return model


def sharded(model):
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    return model


WRAPPERS = {
    "compiled layers": compiled_layers,
    "layers compiled in place": compiled_in_place,
    "a compiled model": lambda model: torch.compile(model, backend="eager"),
    "a compiled part": lambda model: setattr(model, "model", torch.compile(model.model, backend="eager")) or model,
    "checkpointed layers": checkpointed_layers,
    "data parallel": nn.parallel.DistributedDataParallel,
    "data parallel, compiled": lambda model: torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager"),
    "sharded layers": sharded,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_models_keep_their_names(name, one_process):
    model = WRAPPERS[name](tiny("Llama"))
    bare = check(tiny("Llama"), IDS, passes=3)
    report = check(model, IDS, passes=3)
    assert report.ok, str(report)
    names = [module.module for module in report.modules]
    assert sorted(names) == sorted(module.module for module in bare.modules)
    assert not report.notes or "sharded" in name  # a layer that is sharded does not run alone
    assert check(model, IDS, mode="quick").ok
    assert declared_order(model, IDS).masks[0] == CAUSAL
    with torch.compiler.set_stance("force_eager"), guard(model, passes=2) as watching:
        model(IDS)
    assert watching.ok
    if "sharded" not in name:  # a layer that is sharded does not run alone
        assert measure(model, IDS[:1, :5]).masks[0] == af.masks.causal(5)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_leak_in_a_wrapped_model_has_the_models_own_name(name, one_process):
    model = tiny("Llama")
    model.model.layers[1].mlp.register_forward_hook(lambda _, args, out: out + args[0].roll(-1, 1))
    report = check(WRAPPERS[name](model), IDS, passes=3)
    assert [violation.module for violation in report.violations] == ["model.layers.1.mlp"]
    status = {module.module: module.status for module in report.modules}
    assert (status["model.layers.1.mlp"], status["model.layers.2"]) == ("breaks", "carries")


LOOKS = {
    "check": lambda model: check(model, IDS, passes=1),
    "a function": lambda model: check(lambda ids: -ids[:, 1:].double(), IDS),
    "measure": lambda model: measure(model, IDS),
    "declared order": lambda model: declared_order(model, IDS),
}


@pytest.mark.parametrize("name", LOOKS)
@pytest.mark.parametrize("transform", [vmap, lambda f: grad(lambda x: f(x).sum())])
def test_audits_inside_transforms_are_refused(name, transform):
    model = tiny("Llama")

    def look(x):
        LOOKS[name](model)
        return x

    with pytest.raises(RuntimeError, match=r"inside a transform of torch\.func"):
        transform(look)(torch.randn(3))


def test_a_guard_inside_a_transform_is_refused_and_the_log_goes_on():
    model = tiny("Llama")
    parameters = dict(model.named_parameters())

    def loss(values):
        return functional_call(model, values, (IDS,)).logits.sum()

    with guard(model), pytest.raises(RuntimeError, match="take a guard off"):
        grad(loss)(parameters)
    with guard(model, on_leak="log") as watching:
        assert len(grad(loss)(parameters)) == len(parameters)
    assert not watching.ok


UNREADABLE = {
    "sparse ids": ({"input_ids": IDS.to_sparse()}, r"input_ids is sparse .* pass input_ids.to_dense\(\)"),
    "a sparse mask": (
        {"input_ids": IDS, "attention_mask": torch.ones_like(IDS).to_sparse()},
        "attention_mask is sparse",
    ),
    "ids without numbers": ({"input_ids": IDS.to("meta")}, "input_ids is on the meta device"),
    "a mask without numbers": (
        {"input_ids": IDS, "attention_mask": torch.ones_like(IDS, device="meta")},
        "attention_mask is on the meta device",
    ),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_inputs_that_hold_nothing_to_change_are_refused(name):
    given, message = UNREADABLE[name]
    for look in (check, measure, declared_order):
        with pytest.raises(ValueError, match=message):
            look(tiny("Llama"), given)


@pytest.mark.parametrize("beside", [False, True])
def test_outputs_without_numbers_are_not_clean(beside):
    def output(y, ids):
        empty = torch.empty(*ids.shape, 5, device="meta")
        return {"logits": y, "shape": empty} if beside else empty

    report = check(Returns(output, False).eval(), IDS % 50, order=CAUSAL)
    assert report.verdict == "nothing tested"
    assert "on the meta device" in report.untested[0]


class SparseBuffer(Returns):
    """Holds and returns sparse tensors."""

    def __init__(self, leak):
        super().__init__(lambda y, ids: y.to_sparse(), leak)
        self.register_buffer("graph", torch.eye(3).to_sparse())


def test_sparse_buffers_and_outputs_are_read():
    for leak in (False, True):
        with guard(SparseBuffer(leak), order=CAUSAL, on_leak="log") as watching:
            watching.model(IDS % 50)
        assert watching.ok != leak
    scores = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert check(lambda ids: scores[ids][:, 1:].to_sparse(), IDS % 50).ok
    assert not check(lambda ids: scores[ids].flip(1)[:, 1:].to_sparse(), IDS % 50).ok
    with pytest.raises(ValueError, match="returned a tensor on the meta device"):
        check(lambda ids: scores[ids].to("meta"), IDS % 50)
