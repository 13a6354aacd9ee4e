"""What a user names as SCRIPT.py:function: on the command line, in pytest and in the workflow of the guide."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch import nn

import attnflow as af
from attnflow.audit import scripts
from attnflow.cli import main

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os
import sys
import torch
from torch import nn
from helper import VOCABULARY
import attnflow as af

assert sys.argv == [__file__] and sys.path[0] == os.path.dirname(__file__), (sys.argv, sys.path)

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

def with_inputs():
    return model(), torch.arange(14).reshape(2, 7), af.masks.causal(7)

def without_order():
    return score, torch.arange(14).reshape(2, 7)

def leaks_in_order():
    layer = nn.Linear(8, 8)
    class Ahead(nn.Module):
        def forward(self, hidden):
            return layer(hidden.flip(1))
    return Ahead(), torch.randn(2, 5, 8), af.masks.causal(5)

def two():
    return 1, 2

def leaves(ids):
    os._exit(0)

def quits(ids):
    sys.exit(0)

def forks(ids):
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    return score(ids)

if __name__ == "__main__":
    raise SystemExit("the main part is not run")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    process, leave = os.getpid(), os._exit

    def ended(code):  # where the audit let it through, it would end these tests with 0
        if os.getpid() != process:
            leave(code)
        raise AssertionError("the script ended the process")

    monkeypatch.setattr(os, "_exit", ended)
    (tmp_path / "helper.py").write_text("VOCABULARY = 50\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "torn.py").write_text("def score(ids:\n")
    (tmp_path / "gone.py").write_text("import os\nos._exit(0)\n")
    (tmp_path / "bye.py").write_text("try:\n    raise SystemExit(0)\nfinally:\n    pass\n")
    (tmp_path / "none.py").write_text("import math\nfrom torch.nn.functional import relu\nvalue = 1\n")
    yield str(tmp_path / "train.py")
    for name in ("helper", "train", "script_train", "torn", "gone", "bye", "none"):
        sys.modules.pop(name, None)


def test_the_command(script, capsys):
    assert main(["audit", f"{script}:score"]) == 0
    assert main(["audit", f"{script}:score", "--ids", "1,2,3,4", "--order", "causal", "--float64"]) == 0
    assert main(["audit", f"{script}:model", "--order", "causal", "--tokens", "8"]) == 0
    capsys.readouterr()
    assert main(["audit", f"{script}:leaky", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["violations"][0]["module"]) == (False, "leaky")
    assert main(["audit", f"{script}:with_inputs"]) == 0
    assert "14" not in capsys.readouterr().out
    assert main(["audit", f"{script}:without_order"]) == 0
    assert main(["audit", f"{script}:leaks_in_order"]) == 1
    assert main(["audit", f"{script}:leaks_in_order", "--order", "full"]) == 1  # it forbids what crosses sequences
    assert main(["audit", f"{script}:forks"]) == 0
    with pytest.raises(AssertionError, match="ended the process"):
        os._exit(0)  # it is put back


REFUSED = {
    "train.py:breaks": "IndexError: index out of range in self (line 15)",
    "train.py:leaves": "raised SystemExit: os._exit(0) (line 43)",
    "train.py:quits": "raised SystemExit: 0 (line 46)",
    "gone.py:score": "raised SystemExit: os._exit(0) (line 2)",
    "bye.py:score": "raised SystemExit: 0 (line 2)",
    "gone.py": "raised SystemExit: os._exit(0) (line 2)",
    "train.py": "train.py defines table, score, leaky, model, breaks",
    "none.py": "none.py defines no function and no module",
    "nowhere.py": "no script",
    "train.py:two": "is a tuple: name a function",
    "train.py:with_inputs --tokens 5": "the script gives its own inputs",
    "train.py:model": "Pass --order causal, --order full, or a JSON file with a mask",
    "train.py:scor": "did you mean score?",
    "train.py:steps": "is a int: name a function",
    "train.py:nn.Linear": "is a class: name a function",
    "torn.py:score": "SyntaxError",
    "nowhere.py:score": "no script",
    "train.py:score --text words": "give --ids",
    "train.py:score --cache": "leave out --cache",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_run_is_one_sentence(words, script, capsys):
    assert main(["audit", *f"{Path(script).parent}/{words}".split()]) == 2
    (said,) = capsys.readouterr().err.splitlines()[:1]
    assert REFUSED[words] in said
    assert "defect" not in said


@pytest.mark.parametrize("width", [16, 32, 64])
def test_the_tokens_of_an_example_are_no_width(width):
    model = nn.Sequential(nn.Embedding(50, width), nn.Linear(width, width))
    assert scripts.example(scripts.Audited(model)).shape[1] not in (width, 2 * width)
    report = af.audit.check(model, scripts.example(scripts.Audited(model)), af.masks.causal(scripts.LENGTH))
    assert report.ok


def run(command, folder, **environment):
    path = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
    return subprocess.run(command, cwd=folder, env=path, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_pytest(script, tmp_path):
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "attnflow.testing.plugin", "-p", "no:cacheprovider"]
    names = ("score", "leaky", "with_inputs", "leaks_in_order", "leaves")
    done = run([*command, *(word for name in names for word in ("--attnflow", f"train.py:{name}"))], tmp_path)
    assert "3 failed, 3 passed" in done.stdout
    assert "os._exit(0)" in done.stdout
    assert "position 1 is" in done.stdout
    (tmp_path / "pytest.ini").write_text("[pytest]\nattnflow =\n    train.py:model\n")
    assert "1 failed, 1 passed" in run(command, tmp_path).stdout, "a model has no order of its own"


GUIDE = (ROOT / "docs" / "guides" / "audit.md").read_text()
WORKFLOW = yaml.safe_load(re.findall(r"```yaml\n(# \.github/.*?)```", GUIDE, re.DOTALL)[0])["jobs"]["audit"]
STEPS = [step["run"] for step in WORKFLOW["steps"] if "run" in step]


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="installs from a clone, and this is none")
def test_the_workflow_of_the_guide_runs_as_written(script, tmp_path):
    """With this clone as its address; packages that attnflow needs are those that are installed here."""
    (tmp_path / "requirements.txt").write_text("")
    (own := tmp_path / "bin").mkdir()
    for name, words in (("python", '"$@"'), ("attnflow", '-m attnflow "$@"')):
        (own / name).write_text(f"#!/bin/sh\nexec {sys.executable} {words}\n")
        (own / name).chmod(0o755)
    site = str(tmp_path / "site")
    path = {
        "PATH": f"{own}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": site,
        "PIP_TARGET": site,
        "PIP_NO_DEPS": "1",
    }
    path |= {
        "PIP_NO_BUILD_ISOLATION": "0",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "",
        "PYTEST_ADDOPTS": "-p no:cacheprovider",
    }
    install, *audits = STEPS
    assert "ATTNFLOW: is not set" in run(["bash", "-e", "-c", install], tmp_path, **path, ATTNFLOW="").stderr
    done = run(["bash", "-e", "-c", install], tmp_path, **path, ATTNFLOW=f"file://{ROOT}")
    assert done.returncode == 0, done.stderr
    where = run(["python", "-c", "import attnflow; print(attnflow.__file__)"], tmp_path, **path).stdout
    assert Path(where.strip()).is_relative_to(site)
    for name, code in (("score", 0), ("leaky", 1)):
        steps = [step.replace("train.py:score", f"train.py:{name}") for step in audits]
        assert [run(["bash", "-e", "-c", step], tmp_path, **path).returncode for step in steps] == [code] * 2
