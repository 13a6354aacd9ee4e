"""One process of several trains a tiny model with a bias; `test_distributed.py` compares with one process alone."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

import attnflow as af
from tests.bias.hf.common import EVERY_OTHER_KIND, GUIDANCE, disturb, family, handle_of
from tests.processes import leave

STEPS, BATCH, LENGTH = 3, 4, 8


def model_and_data():
    """The same on every process: a model whose bias is new in one layer and trained in the other."""
    torch.manual_seed(0)
    model = family("Llama", torch.float32)
    af.bias.attach(model, (*GUIDANCE, *EVERY_OTHER_KIND))
    disturb(model, 0.1)
    return model.train(), torch.randint(3, 50, (STEPS, BATCH, LENGTH))


def train(model, data, rank=0, world=1, accelerator=None):
    """Losses of the whole batch, one per step."""
    losses, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in data:
        ids = batch[rank::world]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        accelerator.backward(loss) if accelerator else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean") if accelerator else loss.detach()))
    return losses


def main(target):
    accelerator = Accelerator(cpu=True)
    model, data = model_and_data()
    trained = accelerator.prepare(model)
    losses = train(trained, data, accelerator.process_index, accelerator.num_processes, accelerator)
    if accelerator.is_main_process:
        state = {name: parameter.double().flatten().tolist() for name, parameter in model.named_parameters()}
        about = {"wrapper": type(trained).__name__, "processes": accelerator.num_processes}
        Path(target).write_text(
            json.dumps({**about, "losses": losses, "summary": str(handle_of(trained)), "state": state})
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
