"""Two processes on the CPU train a model with a bias as one process does: DDP by accelerate."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.bias.hf.common import handle_of
from tests.bias.hf.distributed_job import model_and_data, train

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    job, target = Path(__file__).with_name("distributed_job.py"), tmp_path / "result.json"
    paths = f"{ROOT / 'src'}:{ROOT}"
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*launch, job, target], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(target.read_text())
    assert (found["wrapper"], found["processes"]) == ("DistributedDataParallel", 2)
    model, data = model_and_data()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert found["losses"] == pytest.approx(train(model, data), rel=1e-5)
    assert found["summary"] == str(handle_of(model))
    for name, parameter in model.named_parameters():
        theirs = torch.tensor(found["state"][name], dtype=torch.float64).view(parameter.shape)
        torch.testing.assert_close(theirs, parameter.double(), rtol=1e-4, atol=1e-5)
        if "score_terms" in name and "output_bias" not in name:
            assert not torch.equal(parameter, before[name])  # trained in both
