"""Trains three steps on batches of row intervals under `accelerate`, in one process or in several, and saves the model.

python distributed_loading.py TARGET "sampler" | "dispatch" | "dispatch split" BATCH
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

import attnflow as af
from tests.models import tiny
from tests.processes import leave


def main(target: str, way: str, batch_size: int) -> None:
    torch.manual_seed(0)
    samples = [[(7 * i + j) % 31 for j in range(4 + 2 * (i % 3))] for i in range(24)]
    family = partial(af.tasks.block_two_stream, block=2, mask_token=31)
    collate = af.tasks.Collator(family, masks="intervals", pad_to_multiple_of=16, min_width=2)
    model = tiny("Llama")
    af.masks.attach(model, "batch")
    options = DataLoaderConfiguration(dispatch_batches=way.startswith("dispatch"), split_batches="split" in way)
    accelerator = Accelerator(cpu=True, dataloader_config=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(samples, batch_size, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        labels = batch.pop("labels")
        count = accelerator.reduce((labels[..., 0, 1:] != -100).sum().double(), "mean")
        loss = af.tasks.loss(model(**batch, use_cache=False), labels, reduction="sum") / count
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), target)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    leave()
