"""Audit a training step under FSDP2 on two processes: each rank holds half of every weight and half of the batch.

    torchrun --nproc-per-node 2 audit_fsdp2_step.py [--leak]

With `--leak` a norm of one layer takes its statistics over all positions, the future included.
"""

import argparse
import sys

import torch
import torch.distributed as dist
from ranks import memory, say
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import attnflow as af

VOCABULARY, BATCH, LENGTH = 101, 4, 24


class NormOverTheSequence(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden / hidden.pow(2).mean(dim=(-1, -2), keepdim=True).add(1e-6).sqrt()


def build(leak: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 160}
    config = LlamaConfig(**size, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    model = LlamaForCausalLM(config)
    if leak:
        model.model.layers[2].post_attention_layernorm = NormOverTheSequence()
    return model


parser = argparse.ArgumentParser()
parser.add_argument("--leak", action="store_true")
options = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

whole, model = build(options.leak), build(options.leak)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
rows = slice(rank * BATCH // world, (rank + 1) * BATCH // world)


def losses(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The loss of each next token, [rows, n - 1]."""
    logits = model(input_ids=ids).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)


def step(ids: torch.Tensor) -> torch.Tensor:
    """The forward pass of a training step: every rank is given the whole batch, and takes its rows."""
    return losses(model, ids[rows])


ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
report = af.audit.check(step, ids, shard=(rows, slice(0, LENGTH - 1)), against=lambda ids: losses(whole, ids))
if rank == 0:
    print(report)
if report.ok:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with af.audit.guard(model) as guard:  # audits the first batch of each rank, before it is computed
        for number in range(3):
            batch = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2 + number))
            loss = losses(model, batch[rows]).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            say(f"step {number}, loss {loss.item():.3f}")
    say(str(guard))
say(memory(model))
dist.destroy_process_group()
sys.exit(0 if report.ok else 1)
