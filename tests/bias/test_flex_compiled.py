"""Compiled FlexAttention with a captured bias agrees with the reference: forward on the CPU, gradients on a GPU."""

import pytest
import torch

from attnflow.bias import flex
from attnflow.bias.attention import reference
from attnflow.testing import tolerance
from tests.bias.cases import Case, cast, check_against_float64, plain

pytestmark = pytest.mark.compiled

CASES = [
    Case(terms=(("guidance", "one"), ("additive", "kv"), ("offset", "heads")), mask="holes", queries=63, keys=127),
    Case(terms=(("product", "kv"),), mask="padding", softcap=5.0, queries=130, keys=130),
    Case(terms=(("dense", "one"),), mask="heads", num_heads=6, num_kv_heads=2, queries=1, keys=63),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_forward_on_the_cpu(case):
    call = case.build()
    with torch.no_grad():
        found = flex.run(call)
        true = reference(cast(call, torch.float64, False)[0])[0]
        limit = tolerance(plain(call), true)
    assert found.dtype == call.value.dtype
    assert float((found.double() - true).abs().max()) <= limit


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_gradients_on_a_gpu(case, dtype):
    from dataclasses import replace

    check_against_float64(replace(case, device="cuda", dtype=dtype), "flex", rounded_bias=True)
