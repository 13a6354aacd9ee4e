"""Without a GPU and without the interpreter, the Triton implementation says so, and nothing imports Triton."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch
from attnflow.bias import attention
from attnflow.bias.terms import Additive
q = torch.ones(1, 1, 2, 8)
try:
    attention(q, q, q, [Additive(torch.zeros(1, 1, 2))], backend="triton")
except ValueError as error:
    assert "Triton compiles for CUDA GPUs" in str(error) and "TRITON_INTERPRET=1" in str(error), error
else:
    raise SystemExit("it ran on the CPU")
attention(q, q, q, [Additive(torch.zeros(1, 1, 2))])
assert "triton" not in sys.modules, "the choice of an implementation imported triton"
print("said so")
"""


@pytest.mark.parametrize("code", [SCRIPT])
def test_says_what_is_missing(code, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "said so", done.stderr
