"""Two processes train a tiny model with a bias; run by test_distributed.py, which compares with one process.

accelerate launch ... distributed_job.py RESULT.json
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

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


def train(model, optimizer, data, rank=0, world=1, accelerator=None):
    """Losses of the whole batch, one per step."""
    losses = []
    for batch in data:
        ids = batch[rank::world]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        accelerator.backward(loss) if accelerator else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean") if accelerator else loss.detach()))
    return losses


def main(mode, target):
    accelerator = Accelerator(cpu=True)
    model, data = model_and_data()
    names = [name for name, _ in model.named_parameters()]
    if mode == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trained = accelerator.prepare(model) if mode == "ddp" else model
    losses = train(trained, optimizer, data, accelerator.process_index, accelerator.num_processes, accelerator)
    summary = str(handle_of(model))
    sharded = [name for name, parameter in model.named_parameters() if type(parameter).__name__ == "DTensor"]
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    refused = ""
    if mode == "fsdp2":
        try:
            af.bias.save(model, Path(target).parent / "bias")
        except ValueError as error:
            refused = str(error)
    if accelerator.is_main_process:
        result = {
            "wrapper": type(trained).__name__,
            "type": str(accelerator.distributed_type),
            "processes": accelerator.num_processes,
            "losses": losses,
            "sharded": sharded == names,
            "refused": refused,
            "summary": summary,
            "state": {name: state[name].double().flatten().tolist() for name in names},
        }
        Path(target).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
