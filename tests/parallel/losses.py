"""Losses of parallel steps that train what they should not, each beside its clean twin: functions of a whole batch."""

from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.leaks.losses import BATCH as ANSWERS
from tests.leaks.losses import MODEL
from tests.parallel import layers
from tests.parallel.layers import (
    BEGINS,
    DOCUMENTS,
    IDS,
    N,
    Sum,
    W,
    causal,
    decoder,
    pipeline,
    rank,
    ranks,
    ring,
    shift,
    zigzag,
)  # fmt: skip

NONE = -100
EVERY = torch.arange(N)
STARTS = torch.where(BEGINS, EVERY, 0).cummax(1).values
BATCH = {"input_ids": IDS, "position_ids": EVERY - STARTS, "labels": IDS.where(~BEGINS, NONE)}
HIDDEN = (torch.tensor([[4], [2]]) > EVERY - STARTS) & (DOCUMENTS < 2)
PROMPTS = {**BATCH, "labels": BATCH["labels"].where(~HIDDEN, NONE)}  # the first shard and row have fewer labels
TEXT = {"input_ids": IDS, "labels": IDS}
SHORT = {"input_ids": IDS[:, :22], "labels": IDS[:, :22]}
LOST, SAME = "behind the end of a shard", "draw the same random numbers"
WEIGHT, END = "times as much as one of rank", "the end of a shard is trained on label"
REST = "not tested: a part of the loss"


class LossCase(NamedTuple):
    faulty: Any
    clean: Any
    batch: Any = BATCH
    shard: Any = "contiguous"
    kind: str = "untrained"  # of the mistake
    says: str = LOST
    launches: tuple[int, ...] = (2, 4)


def ahead(labels, fill=NONE):
    return F.pad(labels[:, 1:], (0, 1), value=fill)


def cut_after(labels, at):
    """Labels are shifted, and then cut into shards."""
    return ahead(labels)[:, at]


def cut_before(labels, at):
    return ahead(labels[:, at])


def rolled(labels, at):
    return labels[:, at].roll(-1, 1)


def handed(by):
    """The last target comes from another rank, by as many places before."""

    def targets(labels, at):
        own = labels[:, at]
        first = shift(own[:, :1], by).where(torch.tensor(rank() + 1 < ranks()), NONE)
        return torch.cat([own[:, 1:], first], 1)

    return targets


def total(terms, targets):
    """The sum over the tokens of all ranks."""
    return terms.sum() / Sum.apply((targets != NONE).sum())


def own_mean(terms, targets):
    return terms.sum() / (targets != NONE).sum()


def entropy(logits, targets):
    terms = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=NONE)
    return terms.view_as(targets)


def step(targets=cut_after, mean=total, split=layers.contiguous, scale=lambda: 1):
    def loss(batch):
        wanted = targets(batch["labels"], split(N))
        return scale() * mean(entropy(decoder(ring(), split)(batch["input_ids"]), wanted), wanted)

    return loss


def shown(by=1, penalty=0.0):
    """A step that returns the loss of all ranks, or their mean, as it is logged, and on rank 1 a penalty."""

    def loss(batch):
        own = step()(batch)
        return own - own.detach() + Sum.apply(own.detach()) / by + penalty * (rank() == 1)

    return loss


def micro(count):
    """A step of gradient accumulation; `count` is of a micro-batch's own tokens, or of those of all."""

    def loss(batch):
        wanted = cut_after(batch["labels"], layers.contiguous(N))
        return entropy(decoder(ring())(batch["input_ids"]), wanted).sum() / count(ahead(batch["labels"]))

    return loss


def rows(mean=total, labels=lambda row: row):
    """Each rank has a row of its own."""

    def loss(batch):
        row = rank() % 2
        h = W.embed(batch["input_ids"][row : row + 1]) + W.place.weight
        number = labels(row)
        wanted = ahead(batch["labels"][number : number + 1])
        return mean(entropy(W.head(h), wanted), wanted)

    return loss


def mine():
    return torch.tensor([rank() % 2]), slice(None)


def padded(fill):
    """22 tokens and two of padding, which have the label `fill`."""

    def loss(batch):
        long, at = F.pad(batch["input_ids"], (0, 2)), layers.contiguous(N)
        wanted = F.pad(ahead(batch["labels"]), (0, 2), value=fill)[:, at]
        return total(entropy(decoder(ring(causal))(long), wanted), wanted)

    return loss


def real():
    at = layers.contiguous(N)
    return at[at < 22]


def wide():
    """A shard and the first position of the next one."""
    at = layers.contiguous(N)
    return torch.arange(int(at[0]), min(int(at[-1]) + 2, N))


def overlapping(trains):
    def loss(batch):
        at = wide()
        wanted = cut_after(batch["labels"], at)
        wanted = wanted if trains else wanted.where(torch.arange(len(at)) < len(layers.contiguous(N)), NONE)
        h = W.embed(batch["input_ids"][:, at]) + W.place(at)
        return total(entropy(W.head(h), wanted), wanted)

    return loss


def dropped(seed):
    """A step in training mode, whose generator was seeded on each rank."""

    def loss(batch):
        torch.manual_seed(seed())
        at = layers.contiguous(N)
        wanted = cut_after(batch["labels"], at)
        h = F.dropout(W.embed(batch["input_ids"][:, at]) + W.place(at), 0.2)
        return total(entropy(W.head(h), wanted), wanted)

    return loss


def last_stage(order):
    """A pipeline whose last stage has the loss."""

    def loss(batch):
        hidden = pipeline()(batch["input_ids"]).popitem()[1]
        wanted = ahead(batch["labels"])[order]
        return entropy(W.head(hidden), wanted).sum() / 40 if rank() == ranks() - 1 else None

    return loss


@cache
def wrapped(how):
    """A model of transformers in training mode, on each rank or in shards."""
    model = deepcopy(MODEL).train()
    return DistributedDataParallel(model) if how == "DDP" else fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def of_model(how, backward=False, **count):
    """The model's loss divides by its own labels unless it is told of all."""

    def loss(batch):
        row = {name: values[rank() % 2 :][:1] for name, values in batch.items()}
        value = wrapped(how)(**row, **count).loss
        return value.backward() if backward else value

    return loss


# cause: (faulty loss, clean loss), its batch, and what the report says of the faulty one
LOSSES = {
    "labels are shifted within a shard": LossCase(step(cut_before), step()),
    "labels of zigzag shards are shifted after they are cut": LossCase(
        step(cut_before, split=zigzag), step(split=zigzag), shard="zigzag", kind="targets", says=END,
        launches=(2, 4),
    ),
    "the last target of a shard is its own first": LossCase(
        step(rolled), step(), TEXT, kind="targets", says=f"{END} 0, of rank 0"
    ),
    "the last target of a shard is the first of the shard before": LossCase(
        step(handed(1)), step(handed(-1)), kind="targets", says=END, launches=(4,)
    ),
    "the last rank's loss is lost": LossCase(
        step(scale=lambda: float(rank() + 1 < ranks())), step(), says="the loss of rank"
    ),
    "a mean over each rank's own tokens": LossCase(
        step(mean=own_mean), step(), PROMPTS, kind="weights", says=WEIGHT
    ),
    "a mean over each rank's own rows": LossCase(
        rows(own_mean), rows(), PROMPTS, mine, kind="weights", says=WEIGHT, launches=(2,)
    ),
    "a model under DDP that is not told of the labels of other ranks": LossCase(
        of_model("DDP"), of_model("DDP", num_items_in_batch=8), ANSWERS, mine, kind="weights", says=WEIGHT,
        launches=(2,),
    ),
    "a sharded model that is not told of the labels of other ranks": LossCase(
        of_model("FSDP2", True), of_model("FSDP2", True, num_items_in_batch=8), ANSWERS, mine, kind="weights",
        says=WEIGHT, launches=(2,),
    ),
    "the loss of one rank counts twice": LossCase(
        step(scale=lambda: 1 + (rank() == 1)), step(), kind="weights", says="a token of rank 1 counts 2 times"
    ),
    "a penalty beside the sum over ranks": LossCase(shown(penalty=0.5), shown(), kind="", says=REST),
    "a penalty beside the mean over two ranks": LossCase(
        shown(2, penalty=0.5), shown(2), kind="", says=REST, launches=(2,)
    ),
    "micro-batches of unequal sizes count alike": LossCase(
        micro(lambda labels: (labels != NONE).sum()), micro(lambda labels: 50), [BATCH, PROMPTS], kind="weights",
        says="a token of micro-batch 1 counts",
    ),
    "labels of another rank's rows": LossCase(
        rows(labels=lambda row: 1 - row), rows(), shard=mine, kind="targets", says="a token that is no label",
        launches=(2,),
    ),
    "padding of the last shard is trained": LossCase(
        padded(0), padded(NONE), SHORT, real, kind="padding", says="behind its shard"
    ),
    "positions of two shards are trained on both": LossCase(
        overlapping(True), overlapping(False), shard=wide, kind="weights", says="rank 1 also trains"
    ),
    "the last stage has the labels of another microbatch": LossCase(
        last_stage([1, 0]), last_stage([0, 1]), shard=slice(None), kind="targets", says="a token that is no label"
    ),
    "dropout is the same on all ranks": LossCase(
        dropped(lambda: 0), dropped(rank), kind="", says=SAME
    ),
}  # fmt: skip


def failing(batch):
    if rank() == 1:
        raise KeyError("labels")
    return rows(own_mean)(batch)


def other_batch():
    return {**BATCH, "labels": BATCH["labels"] + (BATCH["labels"] > 0) * rank()}


def half():
    """All positions but the first four of rank 1."""
    at = layers.contiguous(N)
    return at if rank() != 1 else at[4:]


def partly(batch):
    at = half()
    wanted = cut_after(batch["labels"], at)
    return total(entropy(W.head(W.embed(batch["input_ids"][:, at])), wanted), wanted)


# what is no mistake of a loss: (step, -, batch, shard), and what is said
def opposed(batch):
    """Every rank trains all positions, and the second drives the model away from them."""
    logits = MODEL(batch["input_ids"]).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten()) * (1 - 2 * rank())


OTHERS = {
    "ranks that weigh one position otherwise": LossCase(
        opposed, None, ANSWERS, slice(None), kind="", says="rank 1 gives it another weight", launches=(2,)
    ),
    "a rank that fails": LossCase(
        failing, None, shard=mine, kind="RankFailed", says="rank 1: KeyError: 'labels'", launches=(2,)
    ),
    "ranks with other batches": LossCase(
        step(), None, other_batch, kind="ValueError", says="ranks 0 and 1 have other batch", launches=(2,)
    ),
    "positions that no rank has": LossCase(
        partly, None, shard=half, kind="", says="not tested: 8 positions, the first of them 12 of sequence 0: no",
        launches=(2,),
    ),
    "a shard of another size than the logits": LossCase(
        step(), None, shard=slice(None), kind="", says="rank 0 has logits of [2, 12], and [2, 24] positions by shard=",
        launches=(2,),
    ),
    "no rank has a loss": LossCase(lambda batch: None, None, kind="ValueError", says="no rank returned a loss"),
    "a shard that does not fit": LossCase(
        step(), None, shard="stripes", kind="ValueError", says="shard must be one of 'contiguous', 'zigzag'",
        launches=(2,),
    ),
}  # fmt: skip
