"""The two Triton kernels without a GPU: numbers from Triton's interpreter, resources from its compiler.

Both need Triton, which installs on Linux without a GPU; without it they skip.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from attnflow.bias.terms import Guidance
from tests.bias.cases import MASKS, Case, check_against_float64
from tests.bias.triton_resources import resources

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

UINT8 = {"needed": "*u8"}
ROOT = Path(__file__).parents[2]
# batch, groups, queries, keys, hidden, causal: odd sizes, one block and several, widths that are no power of two
SIZES = [(1, 1, 70, 70, 64, True), (2, 2, 33, 140, 16, False), (1, 2, 40, 5, 24, True), (2, 1, 3, 150, 100, False)]


@pytest.fixture(scope="module")
def interpreted():
    """What the functions of this file return in a process in which Triton interprets its kernels, by name."""
    code = """
import json
from tests.bias import test_pairs as t
print(json.dumps({name: getattr(t, name)() for name in ("errors", "cancelling", "steps", "registered")}))
"""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(["src", ".", *sys.path[1:]])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def errors():
    """For each size, the relative errors against float64: of B where a pair exists, then of each gradient."""
    from attnflow.bias.pairs import blocks, pairs

    torch.manual_seed(0)
    found = []
    for batch, groups, queries, keys, hidden, causal in SIZES:
        shapes = (batch, groups, queries, hidden), (batch, groups, keys, hidden), *[(groups, hidden)] * 3, (groups,)
        tensors = [torch.randn(shape) for shape in shapes]
        allow = torch.ones(queries, keys, dtype=torch.bool)
        allow = allow.tril() if causal else allow
        upstream = torch.randn(batch, groups, queries, keys) * allow
        exact = [tensor.double().requires_grad_() for tensor in tensors]
        true = Guidance(*exact).tile(slice(0, queries), slice(0, keys))
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        bias = pairs(*leaves, blocks(allow, queries, keys))
        gradients = torch.autograd.grad(bias, leaves, upstream)
        expected = torch.autograd.grad(true, exact, upstream.double())
        both = [(bias * allow, true * allow), *zip(gradients, expected, strict=True)]
        found.append([float((one - other).norm() / other.norm()) for one, other in both])
    return found


@pytest.mark.slow
def test_values_and_gradients_against_float64(interpreted):
    for size, (value, *gradients) in zip(SIZES, interpreted["errors"], strict=True):
        assert value < 2e-6, size
        assert max(gradients) < 2e-6, size


def steps():
    """A training step through the kernels and the definition of the operator: `check_against_float64` raises."""
    from attnflow.bias import dense
    from tests.bias import efficient

    dense._forward, dense._backward = efficient.forward, efficient.backward
    for mask in MASKS:
        case = Case((("guidance", "kv"), ("additive", "one")), mask, queries=37, keys=37, hidden=8, batch=1)
        check_against_float64(case, dense.run, rounded_bias=True)
    return len(MASKS)


@pytest.mark.slow
def test_a_training_step_under_every_mask(interpreted):
    assert interpreted["steps"] == len(MASKS)


def cancelling():
    """B where a row and a column nearly cancel, against float64."""
    from attnflow.bias.pairs import blocks, pairs

    term = Case(queries=37, keys=37, mask="everything", batch=1).build().terms[0]
    term = Guidance(term.rows, -term.rows * (1 + 1e-3), term.scale, term.shift, term.weight, term.offset)
    exact = Guidance(*(t.double() for t in term.tensors().values())).tile(slice(0, 37), slice(0, 37))
    found = pairs(*term.tensors().values(), blocks(None, 37, 37))
    return float((found - exact).abs().max() / exact.abs().max())


@pytest.mark.slow
def test_where_row_and_column_cancel_the_variance_stays_sane(interpreted):
    """Each side's own centring is rounded: 1e-3 of its size remains, at 6e-8."""
    assert interpreted["cancelling"] < 1e-4


def registered():
    """What PyTorch's own check says of the operator: schema, shapes without numbers, autograd, tracing."""
    from attnflow.bias.pairs import blocks

    term = Case(queries=3, keys=5, mask="everything", batch=1, hidden=8).build().terms[0]
    tensors = [tensor.requires_grad_() for tensor in term.tensors().values()]
    return torch.library.opcheck(torch.ops.attnflow.pairs.default, (*tensors, blocks(None, 3, 5)))


@pytest.mark.slow
def test_pytorch_finds_the_operator_well_registered(interpreted):
    assert set(interpreted["registered"].values()) == {"SUCCESS"}


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [16, 48, 64, 128, 256])
def test_an_h100_can_hold_the_kernels(hidden):
    """At most 168 registers a thread keep three blocks of 128 threads on a multiprocessor."""
    from attnflow.bias import pairs

    tile = resources(pairs.tile_kernel, pairs.TILE_WARPS, UINT8, HIDDEN=hidden, ROWS=pairs.ROWS, COLUMNS=pairs.COLUMNS)
    own, units = pairs.owned(hidden)
    shape = {"HIDDEN": hidden, "UNITS": units, "OWN": own}
    rows = {"BLOCK": pairs.ROWS, "STEP": pairs.COLUMNS, "PARAMETERS": True, "gradient_col": 1}
    columns = {"BLOCK": pairs.COLUMNS, "STEP": pairs.ROWS, "PARAMETERS": False, "gradient_row": 1}
    sides = [resources(pairs.side_kernel, pairs.SIDE_WARPS, UINT8, **shape, **side) for side in (rows, columns)]
    for registers, stack, shared in (tile, *sides):
        assert registers <= 168
        assert stack == 0
        assert shared <= 64 << 10
