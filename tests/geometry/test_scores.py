"""Symmetry and directionality of whole matrices: definitions, propositions S1.17 and S1.18, invariances."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnflow.geometry import directionality, symmetry
from tests.geometry import oracle

EPS = torch.finfo(torch.float32).eps
seeds = st.integers(0, 2**31)
sizes = st.integers(1, 40)
modes = st.sampled_from(["excess", "norm"])


def matrix_of(seed, rows, columns=None, heavy=True):
    """A random matrix, float64, with some rows and columns far above the others if `heavy`."""
    draw = np.random.default_rng(seed)
    columns = rows if columns is None else columns
    m = draw.standard_normal((rows, columns))
    if heavy:
        m *= draw.lognormal(0, 1, (rows, 1)) * draw.lognormal(0, 1, columns)
    return torch.from_numpy(m)


@given(seeds, sizes)
def test_symmetry_is_as_defined_and_within_its_bounds(seed, d):
    m = matrix_of(seed, d)
    expected = oracle.symmetry(m)
    assert symmetry(m).item() == pytest.approx(expected, abs=1e-12)
    assert abs(symmetry(m.float()).item() - expected) <= 64 * EPS
    assert -1.0 <= symmetry(m.float()).item() <= 1.0


@given(seeds, sizes, sizes, modes, st.sampled_from([-0.5, 0.0, 1.0, 2.0, 3.5]))
def test_directionality_is_as_defined_and_within_its_bounds(seed, rows, columns, mode, gamma):
    m = matrix_of(seed, rows, columns)
    expected = oracle.directionality(m, gamma, mode)
    assert directionality(m, gamma, mode).item() == pytest.approx(expected, abs=1e-9)
    assert -1.0 <= directionality(m.float(), gamma, mode).item() <= 1.0


@given(seeds, sizes)
def test_symmetry_is_one_exactly_for_symmetric_and_minus_one_for_skew_matrices(seed, d):
    m = matrix_of(seed, d)
    assert symmetry(m + m.T).item() == 1.0
    assert symmetry(m - m.T).item() == (-1.0 if d > 1 else 0.0)  # a 1 x 1 skew matrix is zero
    if d > 1:
        assert abs(symmetry(m).item()) < 1.0


@pytest.mark.parametrize("d", [64, 256, 1024])
def test_symmetry_of_random_matrices_vanishes_from_above(d):
    m = torch.randn(d, d, generator=torch.Generator().manual_seed(d))
    # S = (|diagonal|^2 + sum of independent products) / |M|^2: mean 1/d, standard deviation about sqrt(2)/d
    assert abs(symmetry(m).item() - 1 / d) < 5 * math.sqrt(2) / d


@pytest.mark.parametrize("mode", ["excess", "norm"])
def test_directionality_of_random_matrices_has_mean_zero(mode):
    m = torch.randn(400, 64, 64, generator=torch.Generator().manual_seed(0)) / 8
    found = directionality(m, mode=mode)
    assert abs(found.mean()) < 4 * found.std() / math.sqrt(len(found))


@pytest.mark.parametrize("mode", ["excess", "norm"])
def test_directionality_is_one_exactly_if_outstanding_norms_are_only_in_rows(mode):
    m = torch.ones(50, 50)
    m[3] = 7
    assert directionality(m, mode=mode) == 1.0
    assert directionality(m.T, mode=mode) == -1.0
    m[:, 4] += 1  # now columns stand out, too, but less
    assert 0 < directionality(m, mode=mode) < 1


@given(seeds, sizes, modes)
def test_transposing_keeps_symmetry_and_turns_directionality(seed, d, mode):
    m = matrix_of(seed, d)
    assert symmetry(m.T).item() == pytest.approx(symmetry(m).item(), abs=1e-13)
    assert directionality(m.T, mode=mode).item() == pytest.approx(-directionality(m, mode=mode).item(), abs=1e-10)


@given(seeds, sizes, st.sampled_from([1e-30, -0.25, 3.0, 1e30]))
def test_scaling_changes_neither(seed, d, factor):
    m = matrix_of(seed, d).float()
    assert symmetry(m * factor).item() == pytest.approx(symmetry(m).item(), abs=1e-5)
    assert directionality(m * factor).item() == pytest.approx(directionality(m).item(), abs=1e-4)


@given(seeds, st.integers(2, 30))
def test_symmetry_does_not_depend_on_the_orthonormal_basis(seed, d):
    m = matrix_of(seed, d)
    basis, _ = torch.linalg.qr(matrix_of(seed + 1, d, heavy=False))
    assert symmetry(basis.T @ m @ basis).item() == pytest.approx(symmetry(m).item(), abs=1e-9)


def test_batches_are_scored_one_by_one():
    m = torch.randn(2, 3, 30, 30).double()
    for function in (symmetry, directionality):
        assert function(m).shape == (2, 3)
        assert torch.allclose(function(m), torch.stack([torch.stack([function(x) for x in row]) for row in m]))
    assert symmetry(m[:0]).shape == (0, 3)


@pytest.mark.parametrize("m", [torch.zeros(30, 30), torch.ones(30, 30), torch.eye(30), 0.1 * torch.ones(1, 1)])
def test_matrices_without_outstanding_norms_have_directionality_zero(m):
    assert directionality(m) == 0.0
    assert directionality(m, gamma=0.0, mode="norm") == 0.0  # rounding must not make a norm exceed its equals


def test_zero_matrices_have_symmetry_zero_and_no_gradient():
    m = torch.zeros(2, 4, 4, requires_grad=True)
    score = symmetry(m)
    assert score.tolist() == [0.0, 0.0]
    score.sum().backward()
    assert m.grad is not None
    assert torch.equal(m.grad, torch.zeros_like(m))


def test_symmetry_has_the_right_gradient():
    m = torch.randn(3, 5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(symmetry, (m,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    m = torch.randn(40, 40).to(dtype)
    assert symmetry(m).dtype == torch.float32
    assert symmetry(m) == symmetry(m.float())
    assert directionality(m) == directionality(m.float())
