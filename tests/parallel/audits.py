"""Audits, guards and measurements on several processes; under torchrun: `python audits.py FOLDER` writes what came.

A case is a function of the process; its answer is {rank: words}. `test_audits.py` says what they must be.
"""

import json
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import attnflow as af
from attnflow.models.passes import processes
from tests.processes import leave

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
SIZE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ROWS, LAST = {"q": ColwiseParallel, "k": ColwiseParallel, "v": ColwiseParallel, "o": RowwiseParallel}, 7
MLP = {"gate": ColwiseParallel, "up": ColwiseParallel, "down": RowwiseParallel}


def tiny():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZE)).eval()


def leaking(model, only=None, length=None):
    """Let layer 1's feed-forward read the next token, on one rank alone or in batches of one length."""
    inner = getattr(model, "module", model)

    def leak(_, args, output):
        there = (only is None or dist.get_rank() == only) and length in (None, args[0].shape[1])
        return output + 0.1 * args[0].roll(-1, 1) if there else output

    inner.model.layers[1].mlp.register_forward_hook(leak)
    return model


def sharded(model, mesh=None):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def split(model, mesh=None):
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {f"self_attn.{n}_proj": kind() for n, kind in ROWS.items()}
    plan |= {f"mlp.{n}_proj": kind() for n, kind in MLP.items()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def split_by_its_plan(model):
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return LlamaForCausalLM.from_pretrained(folder[0], tp_plan="auto", device_mesh=mesh).eval()


def both(model):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "parts"))
    return sharded(split(model, mesh["parts"]), mesh["data"])


WRAPPED = {
    "DDP": nn.parallel.DistributedDataParallel,
    "FSDP2": sharded,
    "tensor parallel": split,
    "tp_plan": split_by_its_plan,
    "FSDP2 x tensor parallel": both,
}


class Normed(nn.Module):
    """An embedding and a norm that runs on a part of the sequence (`SequenceParallel`), over the right axis or not."""

    def __init__(self, leak):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.leak = nn.Embedding(97, 32), nn.LayerNorm(32), leak

    def forward(self, input_ids):
        hidden = self.norm(self.embed(input_ids))
        return hidden - hidden.mean(1, keepdim=True) if self.leak else hidden


def in_parts(leak):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parts = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False)
    return parallelize_module(Normed(leak).eval(), mesh, {"embed": parts, "norm": SequenceParallel()})


def place(kind):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = torch.arange(16).chunk(2 * ranks if kind == "zigzag" else ranks)
    return torch.cat([chunks[rank], chunks[-1 - rank]]) if kind == "zigzag" else chunks[rank]


torch.manual_seed(0)
E, P, U = torch.randn(97, 16), torch.randn(16, 16), torch.randn(16, 97)
Q, K, V = (torch.randn(16, 16) / 4 for _ in range(3))
TEXT = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(2))


def attended(x, keys, queries_at, keys_at):
    scores = (x @ Q @ (keys @ K).mT / 4).masked_fill(keys_at[None] > queries_at[:, None], -1e30)
    return (x + scores.softmax(-1) @ keys @ V) @ U


def step_of(kind, fault=""):
    mine, second = place(kind), dist.get_rank() == 1

    def gathered(part):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, -2)

    def step(ids):
        positions = torch.arange(len(mine)) if fault == "positions" else mine
        x, at = E[ids[:, mine]] + P[positions], gathered(mine[:, None].float())[:, 0]
        if fault == "raises inside" and second:
            raise ValueError("planted")
        at = at - 4 if fault == "mask" and second else at
        logits = attended(x, gathered(x), mine, at)
        if fault == "raises" and second:
            raise ValueError("planted")
        return logits

    return step


def reference(ids):
    x, at = E[ids] + P[: ids.shape[1]], torch.arange(ids.shape[1])
    return attended(x, x, at, at)


class Ring(nn.Module):
    """A model that exchanges tensors: no rank can audit it alone."""

    def __init__(self):
        super().__init__()
        self.embed, self.step = nn.Embedding(97, 97), step_of("contiguous")

    def forward(self, input_ids):
        return self.step(input_ids) + self.embed(input_ids)[:, place("contiguous")]


def nosy(ids, much=1.0):
    """The reference, reading a little of the next token."""
    return reference(ids) + much * E[ids.roll(-1, -1)][..., :1]


def copied_by_one():
    """A step that rank 0 cannot copy, as it holds an open file."""
    log, at = (open(tempfile.mkstemp()[1], "w") if dist.get_rank() == 0 else None), place("zigzag")  # noqa: SIM115
    step = step_of("zigzag")

    def logged(ids):
        print(at.tolist(), file=log)
        return step(ids)

    return checked(logged if log else lambda ids: step(ids))


def told(report):
    found = [str(violation) for violation in report.violations]
    return [report.verdict, *found, *report.untested, *(note for note in report.notes if "rank" in note)]


def checked(step, shard="zigzag", ids=TEXT, **options):
    return told(af.audit.check(step, ids, shard=shard, **options))


def guarded(model, ids, on_leak="raise", backward=True):
    watching = af.audit.guard(model, on_leak=on_leak)
    try:
        output = model(ids)
        if backward:
            output.logits.sum().backward()
        return [watching.ok, len(watching.reports), watching.elsewhere]
    finally:
        watching.remove()


def checked_batch(model, batch):
    """The batch, its loss and its rows alone; and a batch whose labels are shifted twice."""
    twice = {**batch, "labels": batch["input_ids"].roll(-1, 1)}
    looks = (af.audit.check_batch(batch, model), af.audit.check_alone(model, batch), af.audit.check_batch(twice, model))
    return [look.verdict for look in looks]


def trained(looks):
    """Gradients of two steps of DDP after a look at the model; the same on all ranks."""
    model = nn.parallel.DistributedDataParallel(tiny().train())
    for look in (looks, None):
        if look is not None:
            look(model)
        model.zero_grad()
        model(own_batch(), labels=own_batch()).loss.backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    parts = [torch.empty_like(gradients) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, gradients)
    assert all(torch.equal(part, gradients) for part in parts), "ranks have other gradients"
    return gradients.sum().item()


def ddp_goes_on():
    def guard(model):
        with af.audit.guard(model):
            model(own_batch(), labels=own_batch()).loss.backward()

    looks = (
        guard,
        lambda model: af.audit.check(leaking(model), IDS, passes=4),
        lambda model: af.audit.check_alone(model, IDS),
    )
    return [trained(looks[0]) == trained(None), *(trained(look) != 0 for look in looks[1:])]


def guarded_then_sharded():
    model = tiny()
    with af.audit.guard(model) as watching:
        sharded(model)(own_batch()).logits.sum().backward()
    return [watching.ok, len(watching.reports), all(p.grad is not None for p in model.parameters())]


def own_batch():
    return torch.randint(97, (2, 12 + 2 * dist.get_rank()), generator=torch.Generator().manual_seed(dist.get_rank()))


def on_one_rank():
    processes.BEGIN = timedelta(seconds=1)
    return guarded(tiny(), IDS) if dist.get_rank() == 0 else ["no guard"]


def cases():
    where = range(dist.get_world_size())
    names = [name for name in WRAPPED if len(where) > 2 or name != "FSDP2 x tensor parallel"]
    for name in names if len(where) == 2 else names[-1:]:
        wrap = WRAPPED[name]
        yield f"check, {name}", lambda wrap=wrap: told(af.audit.check(wrap(tiny()), IDS, passes=8))
        yield f"leak, {name}", lambda wrap=wrap: told(af.audit.check(leaking(wrap(tiny())), IDS, passes=8))
        yield f"quick, {name}", lambda wrap=wrap: told(af.audit.check(wrap(tiny()), IDS, mode="quick"))
        alike = name not in ("DDP", "FSDP2")
        given = IDS if alike else own_batch()
        yield f"guard, {name}", lambda wrap=wrap, given=given: guarded(wrap(tiny()), given)
        yield f"guard of a leak, {name}", lambda wrap=wrap, given=given: guarded(leaking(wrap(tiny())), given)
        batch = {"input_ids": IDS, "labels": IDS, "position_ids": torch.arange(12).expand(2, -1)}
        yield f"batch, {name}", lambda wrap=wrap, batch=batch: checked_batch(wrap(tiny()), batch)
        if not alike:
            yield f"other batches, {name}", lambda wrap=wrap: checked_batch(wrap(tiny()), {"input_ids": own_batch()})
            yield f"other inputs, {name}", lambda wrap=wrap: told(af.audit.check(wrap(tiny()), own_batch(), passes=4))
            for on_leak in ("raise", "log"):
                yield (
                    f"guard of rank 1's batch, {name}, {on_leak}",
                    lambda wrap=wrap, o=on_leak: guarded(leaking(wrap(tiny()), length=14), own_batch(), o),
                )
            yield f"guard of rank 1, {name}", lambda wrap=wrap: guarded(leaking(wrap(tiny()), only=1), own_batch())
    yield (
        "measured, FSDP2",
        lambda: [af.audit.measure(sharded(tiny()), IDS[:1, :5], by="output").masks[0] == af.masks.causal(5)],
    )
    yield "DDP trains on", ddp_goes_on
    yield "guard before FSDP2", guarded_then_sharded
    yield "layers, FSDP2", lambda: [str(af.audit.measure(sharded(tiny()), IDS[:1, :5]))]
    for leak in (False, True):
        yield (
            f"a norm on parts of the sequence, {leak}",
            lambda leak=leak: told(af.audit.check(in_parts(leak), IDS, af.masks.causal(12))),
        )
    for kind in ("contiguous", "zigzag"):
        yield f"step, {kind}", lambda kind=kind: checked(step_of(kind), kind, against=reference)
        yield f"step, {kind} by indices", lambda kind=kind: checked(step_of(kind), place(kind))
        for fault in ("mask", "positions"):
            yield f"{fault}, {kind}", lambda k=kind, f=fault: checked(step_of(k, f), k, against=reference)
        yield f"one row, {kind}", lambda k=kind: checked(lambda ids: step_of(k)(ids[None])[0], k, TEXT[0])
    yield "halves exchanged", lambda: checked(step_of("zigzag"), "contiguous", against=reference)
    yield "without a shard", lambda: checked(step_of("zigzag"), None)
    yield "whole on each rank", lambda: checked(reference, None)
    yield "a hole", lambda: checked(lambda ids: step_of("zigzag")(ids)[:, :-1], place("zigzag")[:-1])
    yield "replicas that differ", lambda: checked(lambda ids: reference(ids) + dist.get_rank(), slice(None))
    yield (
        "rows of their own",
        lambda: checked(
            lambda ids: reference(ids[dist.get_rank() :: dist.get_world_size()]),
            (slice(dist.get_rank(), None, dist.get_world_size()), slice(None)),
            TEXT.repeat(dist.get_world_size(), 1),
            against=reference,
        ),
    )
    first, half = dist.get_rank() == 0, place("contiguous")
    yield "a replica that leaks", lambda: checked(lambda ids: nosy(ids, 0.01) if first else reference(ids), slice(None))
    yield (
        "beside a whole output",
        lambda: checked(
            lambda ids: {"a": reference(ids[None])[0][half], "b": nosy(ids[None])[0].logsumexp(-1)}, half, TEXT[0]
        ),
    )
    yield (
        "without the last",
        lambda: checked(lambda ids: step_of("contiguous")(ids)[:, : len(half[half < 15])], half[half < 15]),
    )
    yield (
        "an outlier",
        lambda: checked(
            lambda ids: (reference(ids) + dist.get_rank()).index_fill(-1, torch.tensor([3]), -1e30)[:, half],
            half,
            against=lambda ids: reference(ids).index_fill(-1, torch.tensor([3]), -1e30),
        ),
    )
    yield "other arguments", lambda: checked(step_of("zigzag"), passes=8 + dist.get_rank())
    yield "a reference on one rank", lambda: checked(step_of("zigzag"), against=reference if first else None)
    yield "another order on one rank", lambda: checked(step_of("zigzag"), order=af.masks.causal(16 - (not first)))
    yield "a step that one rank cannot copy", copied_by_one
    yield (
        "one row beside its reference",
        lambda: checked(
            lambda ids: step_of("zigzag")(ids[None])[0], ids=TEXT[0], against=lambda ids: reference(ids[None])[0]
        ),
    )
    yield "progress that raises", lambda: checked(reference, None, progress=None if first else lambda *_: 1 / 0)
    yield "other ids", lambda: checked(step_of("zigzag"), ids=TEXT + dist.get_rank())
    yield "a length that does not fit", lambda: checked(step_of("zigzag"), ids=TEXT[:, :15])
    yield "what cannot be sent", lambda: checked(lambda ids: {"a": reference(ids), "b": lambda: 0}, slice(None))
    yield "guard of a ring", lambda: guarded(Ring(), TEXT)
    yield "check of a ring", lambda: told(af.audit.check(Ring(), TEXT, af.masks.causal(16)))
    yield "guard on one rank", on_one_rank
    yield "raises", lambda: checked(step_of("zigzag", "raises"))
    processes.GRACE = timedelta(seconds=2)
    yield "raises inside", lambda: checked(step_of("zigzag", "raises inside"))  # the last: it closes the groups


def main(folder):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, answers = dist.get_rank(), {}
    for name, case in cases():
        try:
            answers[name] = case()
        except Exception as error:
            answers[name] = [type(error).__name__, str(error)]
        (Path(folder) / f"{rank}.json").write_text(json.dumps(answers))
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
