"""The memory-bounded implementation: values, gradients, memory, dropout, and life under a compiler."""

import pytest
import torch

from tests.bias.cases import MASKS, TERMS, Case, check_against_float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", TERMS)
def test_values_and_gradients(kind, mask, dtype):
    check_against_float64(Case(terms=((kind, "kv"),), mask=mask, dtype=dtype), "tiled")
