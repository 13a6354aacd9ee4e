"""Two processes on the CPU train a model with a bias as one process does: DDP by accelerate, FSDP2 by PyTorch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnflow.bias.hf.attach import handle_of
from tests.bias.hf.distributed_job import model_and_data, train

ROOT = Path(__file__).parents[3]


def processes(number: int, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A program beside this file, run in so many processes."""
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(number)] if number > 1 else []
    command = [sys.executable, *launch, str(Path(__file__).with_name(program)), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_processes_train_as_one(mode, tmp_path):
    target = tmp_path / "result.json"
    done = processes(2, "distributed_job.py", mode, target)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(target.read_text())
    assert (found["type"], found["processes"]) == ("DistributedType.MULTI_CPU", 2)
    model, data = model_and_data()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.05), data)
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    assert found["summary"] == str(handle_of(model))
    assert found["wrapper"] == ("DistributedDataParallel" if mode == "ddp" else "FSDPLlamaForCausalLM")
    assert found["sharded"] == (mode == "fsdp2")
    assert ("sharded over processes" in found["refused"]) == (mode == "fsdp2")
    for name, parameter in model.named_parameters():
        theirs = torch.tensor(found["state"][name], dtype=torch.float64).view(parameter.shape)
        torch.testing.assert_close(theirs, parameter.double(), rtol=1e-4, atol=1e-5)
        if "score_terms" in name and "output_bias" not in name:
            assert not torch.equal(parameter, before[name])  # trained in both
