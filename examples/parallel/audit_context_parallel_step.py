"""Audit a training step under context parallelism on two processes: ring attention over zigzag halves.

    torchrun --nproc-per-node 2 audit_context_parallel_step.py [--leak]

Rank r of W holds the chunks r and 2 W - 1 - r of a sequence, so that causal attention gives every rank the same work.
Keys and values travel round the ring. With `--leak` the mask takes the chunks of the other ranks for contiguous ones.
On CUDA, `torch.distributed.tensor.experimental.context_parallel` does what `ring_attention` does here; torch 2.13 has
no such operator for the CPU.
"""

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from ranks import memory, say
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import attnflow as af

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 101, 64, 4, 3, 32


def zigzag(rank: int, world: int) -> Tensor:
    """The global positions that a rank holds."""
    chunks = torch.arange(LENGTH).chunk(2 * world)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


class Rotate(torch.autograd.Function):
    """Gives a tensor to the next rank and takes that of the last; gradients travel the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return passed(tensor, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return passed(gradient, -1)


def passed(tensor: Tensor, steps: int) -> Tensor:
    rank, world = dist.get_rank(), dist.get_world_size()
    received, sent = torch.empty_like(tensor, memory_format=torch.contiguous_format), tensor.contiguous()
    to, source = (rank + steps) % world, (rank - steps) % world
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, source)]):
        work.wait()
    return received


def ring_attention(query: Tensor, key: Tensor, value: Tensor, leak: bool) -> Tensor:
    """Attention [batch, heads, held, width] over the keys of all ranks, one rank's at a time."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own, output, total = zigzag(rank, world), torch.zeros_like(query), None
    for turn in range(world):
        source = (rank - turn) % world
        keys = torch.arange(LENGTH).chunk(world)[source] if leak and turn else zigzag(source, world)
        scores = query @ key.mT / query.shape[-1] ** 0.5
        scores = scores.masked_fill(own[:, None] < keys, -torch.inf)
        part = scores.logsumexp(-1, keepdim=True)
        both = part if total is None else torch.logaddexp(total, part)
        weights = (scores - both).exp()  # of keys before, (total - both).exp() is left
        output = weights @ value + (0 if total is None else (total - both).exp() * output)
        total = both
        if turn < world - 1:
            key, value = Rotate.apply(key), Rotate.apply(value)
    return output


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor, leak: bool | None) -> Tensor:
        parts = self.qkv(self.before(hidden)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        alone = leak is None  # on one process
        mixed = scaled_dot_product_attention(*parts, is_causal=True) if alone else ring_attention(*parts, leak)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(-2))
        return hidden + self.mlp(self.after(hidden))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, positions: Tensor, leak: bool | None = None) -> Tensor:
        hidden = self.tokens(ids) + self.places(positions)
        for layer in self.layers:
            hidden = layer(hidden, leak)
        return self.head(self.norm(hidden))


def outputs(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """What a step returns: the logits, and the loss of each label."""
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
    return {"logits": logits, "loss": loss.view(labels.shape)}


def shifted(ids: Tensor) -> Tensor:
    """The labels of the whole sequence: shifted before it is cut, as the next token may lie on another rank."""
    return torch.cat([ids[:, 1:], ids.new_full((len(ids), 1), -100)], 1)


parser = argparse.ArgumentParser()
parser.add_argument("--leak", action="store_true")
options = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = Decoder()
held = zigzag(rank, world)


def step(ids: Tensor) -> dict[str, Tensor]:
    """The forward pass of a training step: every rank is given whole sequences, and takes its positions."""
    return outputs(model(ids[:, held], held, options.leak), shifted(ids)[:, held])


def alone(ids: Tensor) -> dict[str, Tensor]:
    """The same on one process."""
    return outputs(model(ids, torch.arange(LENGTH)), shifted(ids))


ids = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
report = af.audit.check(step, ids, shard="zigzag", against=alone)
if rank == 0:
    print(report)
if report.ok:
    loss = step(ids)["loss"].sum() / (ids.numel() - len(ids))  # of all ranks' labels, not of this rank's
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    dist.all_reduce(loss.detach())
    norm = sum(float(parameter.grad.pow(2).sum()) for parameter in model.parameters()) ** 0.5
    say(f"{len(held)} of {LENGTH} positions, loss {loss.item():.4f}, norm of the gradient {norm:.4f}")
say(memory(model))
dist.destroy_process_group()
sys.exit(0 if report.ok else 1)
