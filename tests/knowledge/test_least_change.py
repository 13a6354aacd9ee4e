"""The least change against the whole system of its conditions, solved in float64 by numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnflow.knowledge.editing.edit import least_change


def problem(seed, places, others, entries=12, width=5):
    draw = torch.Generator().manual_seed(seed)
    some = torch.randn(40, entries, generator=draw, dtype=torch.float64)
    moment = some.T @ some / 40 + 1e-3 * torch.eye(entries, dtype=torch.float64)
    shapes = ((places, entries), (places, width), (others, entries))
    return (*(torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes), moment)


def by_conditions(weights, wanted, untouched, moment, ridge):
    """Stationary points of the Lagrangian, one linear system for each column: 2 M X + ... = 0 with its constraints."""
    entries = weights.shape[1]
    others = len(untouched)
    if ridge:
        upper = moment + weights.T @ weights / ridge
        right = weights.T @ wanted / ridge
        bound, target = untouched, torch.zeros(others, wanted.shape[1], dtype=torch.float64)
    else:
        upper, right = moment, torch.zeros(entries, wanted.shape[1], dtype=torch.float64)
        bound = torch.cat([weights, untouched])
        target = torch.cat([wanted, torch.zeros(others, wanted.shape[1], dtype=torch.float64)])
    system = torch.zeros(entries + len(bound), entries + len(bound), dtype=torch.float64)
    system[:entries, :entries] = upper
    system[:entries, entries:], system[entries:, :entries] = bound.T, bound
    solved = np.linalg.lstsq(system.numpy(), torch.cat([right, target]).numpy(), rcond=None)[0]
    return torch.from_numpy(solved[:entries])


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 5), st.sampled_from([0.0, 0.1, 3.0]))
def test_it_meets_its_conditions(seed, places, others, ridge):
    weights, wanted, untouched, moment = problem(seed, places, others)
    change = least_change(weights, wanted, moment, untouched=untouched, ridge=ridge)
    expected = by_conditions(weights, wanted, untouched, moment, ridge)
    torch.testing.assert_close(change, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))
    size = float(change.abs().max())
    assert float((untouched @ change).abs().max() if others else 0) <= 1e-9 * size
    if not ridge:
        torch.testing.assert_close(weights @ change, wanted, rtol=1e-7, atol=1e-7)


def test_what_is_refused():
    weights, wanted, untouched, moment = problem(0, 2, 2)
    with pytest.raises(ValueError, match="must be positive definite"):
        least_change(weights, wanted, -moment)
    for bad in (weights * torch.nan, weights / 0):
        with pytest.raises(ValueError, match="must be finite"):
            least_change(bad, wanted, moment)
    with pytest.raises(ValueError, match="ridge at least 0"):
        least_change(weights, wanted, moment, ridge=-1.0)
    with pytest.raises(ValueError, match="linearly dependent"):
        least_change(torch.cat([weights, weights]), torch.cat([wanted, wanted]), moment)
    with pytest.raises(ValueError, match="must not change"):
        least_change(weights, wanted, moment, untouched=torch.cat([untouched, weights[:1]]), ridge=0.1)
