"""The reference implementation is as accurate as plain attention, for every kind of term and mask."""

import pytest
import torch

from tests.bias.cases import MASKS, TERMS, Case, check_against_float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", TERMS)
def test_values_and_gradients(kind, mask, dtype):
    check_against_float64(Case(terms=((kind, "kv"),), mask=mask, dtype=dtype), "reference")


@pytest.mark.parametrize("maps", ["one", "kv", "heads"])
@pytest.mark.parametrize("ratio", [1, 3, 4, 8])
def test_grouped_queries(ratio, maps):
    terms = (("guidance", maps), ("additive", "one"))
    check_against_float64(Case(terms=terms, num_heads=2 * ratio, num_kv_heads=2, mask="holes"), "reference")
