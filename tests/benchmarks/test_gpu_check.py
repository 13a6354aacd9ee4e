"""The script for a GPU, tried on a CPU: every part runs, and what it says of errors holds."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.gpu_check import PARTS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_a_dry_run_goes_through_every_part(tmp_path):
    paths = os.pathsep.join(["src", ".", *sys.path[1:]])
    environment = os.environ | {"TRITON_INTERPRET": "1", "OUT": str(tmp_path), "PYTHONPATH": paths}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_check", "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    findings = [json.loads(line) for line in (tmp_path / "gpu_check.jsonl").read_text().splitlines()]
    assert [f for f in findings if {"failed", "skipped"} & set(f)] == []
    assert list(dict.fromkeys(f["part"] for f in findings)) == ["machine", *(p.__name__ for p in PARTS), "daa_cost"]
    assert findings[-1]["code"] == 0
    exact, *paths = (f for f in findings if "gradients" in f)
    assert exact["same_bits"]
    assert max(exact["forward"], *exact["gradients"]) < 2e-6
    assert max(max(f["output"], *f["gradients"]) for f in paths) < 1e-5
