"""The fixtures of the pytest plugin, in a pytest of their own: this project's typed runs turn the plugin off."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = """
import torch
from torch import nn

import attnflow as af

HIDDEN = torch.randn(2, 5, 8)


class Ahead(nn.Module):
    def forward(self, hidden):
        return hidden + hidden.roll(-1, 1)


def test_clean(assert_no_leak): assert_no_leak(nn.Linear(8, 8), HIDDEN, order=af.masks.causal(5))
def test_leak(assert_no_leak): assert_no_leak(Ahead(), HIDDEN, order=af.masks.causal(5))
def test_same(assert_same_mask): assert_same_mask(af.masks.causal(4).dense(), af.masks.causal(4))
def test_other(assert_same_mask): assert_same_mask(af.masks.full(4), af.masks.causal(4))
def test_guarded(guard_leaks): guard_leaks(model := nn.Linear(8, 8), order=af.masks.causal(5)); model(HIDDEN)
def test_leaking(guard_leaks): guard_leaks(model := Ahead(), order=af.masks.causal(5)); model(HIDDEN)
def test_logged(guard_leaks): guard_leaks(model := Ahead(), on_leak="log", order=af.masks.causal(5)); model(HIDDEN)
def test_forgotten(guard_leaks): guard_leaks(nn.Linear(8, 8), order=af.masks.causal(5))


def test_it_is_there_until_the_end(guard_leaks):
    model = nn.Linear(8, 8)
    guard = guard_leaks(model, order=af.masks.causal(5))
    model(HIDDEN)
    assert guard.ok and model._forward_hooks
"""
IDLE = """
import sys

def test_nothing(): assert not {"torch", "numpy", "attnflow.audit", "attnflow.testing.assertions"} & set(sys.modules)
"""


def run(folder, source, *options):
    (folder / "test_own.py").write_text(source)
    plugins = ["-p", "attnflow.testing.plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout


def test_a_fixture_is_enough(tmp_path):
    said = run(tmp_path, OWN, "-rA")
    failed = {line.split("::")[1].split(" ")[0] for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))}
    assert failed == {"test_leak", "test_other", "test_leaking", "test_logged", "test_forgotten"}, said
    assert "information flows against the order" in said
    assert "no call yet" in said


def test_the_plugin_is_cheap_where_no_test_uses_it(tmp_path):
    assert "1 passed" in run(tmp_path, IDLE)
