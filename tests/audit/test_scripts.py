"""What a user names as SCRIPT.py:function: on the command line, in pytest and in the reusable workflow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from attnflow.cli import main

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch
from torch import nn
from helper import VOCABULARY

table = nn.Embedding(VOCABULARY, VOCABULARY)
steps = 5

def score(ids):
    return table(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

def leaky(ids):
    return score(ids) - score(ids).mean(1, keepdim=True)

def model():
    return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8))

def breaks(ids):
    return score(ids + 100)

if __name__ == "__main__":
    raise SystemExit("the main part is not run")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "helper.py").write_text("VOCABULARY = 50\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "torn.py").write_text("def score(ids:\n")
    yield str(tmp_path / "train.py")
    for name in ("helper", "train", "script_train", "torn"):
        sys.modules.pop(name, None)


def test_the_command(script, capsys):
    assert main(["audit", f"{script}:score"]) == 0
    assert main(["audit", f"{script}:score", "--ids", "1,2,3,4", "--order", "causal", "--float64"]) == 0
    assert main(["audit", f"{script}:model", "--order", "causal", "--tokens", "8"]) == 0
    capsys.readouterr()
    assert main(["audit", f"{script}:leaky", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["violations"][0]["module"]) == (False, "leaky")


REFUSED = {
    "train.py:breaks": "IndexError: index out of range in self (line 10)",
    "train.py:scor": "did you mean score?",
    "train.py:steps": "is a int: name a function",
    "train.py:nn.Linear": "is a class: name a function",
    "torn.py:score": "SyntaxError",
    "nowhere.py:score": "no script",
    "train.py:score --text words": "give --ids",
    "train.py:score --cache": "leave out cache=",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_run_is_one_sentence(words, script, capsys):
    assert main(["audit", *f"{Path(script).parent}/{words}".split()]) == 2
    (said,) = capsys.readouterr().err.splitlines()[:1]
    assert REFUSED[words] in said
    assert "defect" not in said


def run(command, folder, **environment):
    path = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
    return subprocess.run(command, cwd=folder, env=path, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_pytest_and_the_workflow(script, tmp_path):
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "attnflow.testing.plugin", "-p", "no:cacheprovider"]
    done = run([*command, "--attnflow", "train.py:score", "--attnflow", "train.py:leaky"], tmp_path)
    assert "1 failed, 2 passed" in done.stdout
    assert "position 1 is" in done.stdout
    (tmp_path / "pytest.ini").write_text("[pytest]\nattnflow =\n    train.py:model\n")
    assert "1 failed, 1 passed" in run(command, tmp_path).stdout, "a model has no order of its own"
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "audit.yml").read_text())
    audit = flow["jobs"]["audit"]["steps"][-1]["run"].replace("attnflow audit", f"{sys.executable} -m attnflow audit")
    summary = tmp_path / "summary"
    for names, code in (("train.py:score", 0), ("train.py:leaky train.py:score", 1)):
        said = run(["bash", "-eo", "pipefail", "-c", audit], tmp_path, NAMES=names, GITHUB_STEP_SUMMARY=str(summary))
        assert said.returncode == code, said.stderr
        assert "clean" in summary.read_text()
