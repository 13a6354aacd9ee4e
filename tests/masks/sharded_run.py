"""One rank of attention under a sharded mask: `python -m tests.masks.sharded_run RANK WORLD SHARDING FOLDER`.

Two layers in float64. A rank holds the positions of its plan, is sent keys and values, reads those that its plan names
(all others are NaN), and applies its local mask. It writes its outputs, and the gradients of all ranks.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from attnflow import masks
from tests.processes import leave

WIDTH, HEADS = 16, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64)
        self.outer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, allow: Tensor, gather) -> Tensor:
        query, keys = self.inner(x).split([WIDTH, 2 * WIDTH], -1)
        key, value = gather(keys).chunk(2, -1)
        parts = (part.unflatten(-1, (HEADS, -1)).transpose(0, 1) for part in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(*parts, attn_mask=allow)
        return x + torch.tanh(self.outer(out.transpose(0, 1).flatten(1)))


class Gather(torch.autograd.Function):
    """What each rank holds, put together at all ranks; gradients of all ranks go back to the holder."""

    @staticmethod
    def forward(ctx, held: Tensor, positions: Tensor, size: int) -> Tensor:
        ctx.positions = positions
        whole = held.new_zeros(size, held.shape[1])
        whole[positions] = held
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, gradient: Tensor):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient[ctx.positions], None, None


def layers_and_inputs(size: int) -> tuple[nn.ModuleList, Tensor]:
    torch.manual_seed(0)
    return nn.ModuleList([Block(), Block()]), torch.randn(size, WIDTH, dtype=torch.float64)


def run(layers: nn.ModuleList, x: Tensor, allow: Tensor, gather) -> tuple[Tensor, list[Tensor]]:
    """Outputs, and the gradients of the sum of their squares."""
    for layer in layers:
        x = layer(x, allow, gather)
    x.pow(2).sum().backward()
    return x.detach(), [parameter.grad for parameter in layers.parameters()]


def main(rank: int, world: int, sharding: str, folder: str) -> None:
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", rendezvous, timedelta(seconds=60), world_size=world, rank=rank)
    plan = masks.Mask.from_json(Path(folder, "mask.json").read_text()).plan(world, sharding)
    size = plan.mask.num_queries
    layers, inputs = layers_and_inputs(size)
    own, needed = torch.tensor(plan.positions[rank]), torch.from_numpy(plan.keys(rank))
    other = torch.ones(size, dtype=torch.bool)
    other[needed] = False

    def gather(held: Tensor) -> Tensor:
        whole = Gather.apply(held, own, size)
        return whole.masked_fill(other[:, None], torch.nan)[needed]

    out, gradients = run(layers, inputs[own], plan.local(rank).dense(), gather)
    for gradient in gradients:
        dist.all_reduce(gradient)
    torch.save({"out": out, "gradients": gradients}, f"{folder}/rank{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
    leave()
