"""What `torchrun ... attnflow audit audited.py:NAME` is tried on: steps of two processes, each rank with half a row."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn

torch.manual_seed(0)
table = nn.Embedding(50, 50)
ids = torch.arange(24).reshape(2, 12)


def joined():
    """The rank; a second group of the same ranks would find the addresses of the first, as one of them is late."""
    dist.init_process_group("gloo")
    rank, new_group = dist.get_rank(), dist.new_group
    if rank:
        dist.new_group = lambda *args, **kwargs: (time.sleep(0.5), new_group(*args, **kwargs))[1]
    return rank


def made(change=lambda ids, rank: 0.0):
    rank = joined()
    half = slice(6 * rank, 6 * rank + 6)
    return lambda ids: table(ids[:, half]) + change(ids, rank), ids, None, half


def clean():
    return made()


def leaks():
    return made(lambda ids, rank: rank * table(ids[:, -1:]))


def fails():
    def change(ids, rank):
        if rank:
            raise RuntimeError("no kernel for this shard")
        return 0.0

    return made(change)


def unmade():
    if joined():
        raise RuntimeError("out of memory")
    return table, ids


def early():
    if os.environ["RANK"] == "1":
        raise RuntimeError("no device")
    return made()


def alone(ids):
    return table(ids)
