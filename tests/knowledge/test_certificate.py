"""What a certificate says holds against all entries, in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr
from torch.nn import functional

from attnflow.knowledge.retrieval import Certificate

ACTIVATIONS = {
    "relu": functional.relu,
    "gelu": lambda scores: scores * torch.from_numpy(ndtr(scores.numpy())),
    "silu": functional.silu,
}


def residual(scores, kept, values, activation):
    """The norm of what the entries that were not kept would have added, for each query."""
    left = ACTIVATIONS[activation](scores).scatter(1, kept, 0.0)
    return (left @ values).norm(dim=1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@given(
    seed=st.integers(0, 10_000),
    entries=st.integers(1, 30),
    k=st.integers(1, 33),
    shift=st.sampled_from([-8.0, -2.0, -0.9, 0.0, 0.3, 4.0]),
    counted=st.booleans(),
)
def test_the_bound_holds_and_completeness_is_exact(activation, seed, entries, k, shift, counted):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, entries, generator=generator, dtype=torch.float64) + shift
    scores[:, ::5] = scores[:, :1].clone()  # ties
    values = torch.randn(entries, 4, generator=generator, dtype=torch.float64)
    best = scores.topk(min(k, entries))
    active = (scores > 0).sum(dim=1) if counted else None
    certificate = Certificate(False, k, entries, best.values[:, -1], active)
    left = residual(scores, best.indices, values, activation)
    norm = float(values.norm(dim=1).max())
    assert bool((left <= certificate.error_bound(norm, activation) * (1 + 1e-12)).all())
    if counted:
        below = scores.scatter(1, best.indices, -1.0)
        assert torch.equal(certificate.complete, (below <= 0).all(dim=1))
    if activation == "relu":
        assert not bool(left[certificate.complete].any())


def test_range_searches_count_what_each_query_kept():
    scores = torch.tensor([[3.0, 1.0, 0.5, -1.0], [2.0, 0.7, 0.2, 0.1]])
    certificate = Certificate(False, torch.tensor([2, 1]), 4, torch.tensor([0.8, 0.8]), (scores > 0).sum(dim=1))
    assert certificate.error_bound(1.0).tolist() == pytest.approx([1 * 0.8, 3 * 0.8])
    assert certificate[1].error_bound(1.0) == certificate.error_bound(1.0)[1]
    assert certificate[1].k == 1


def test_joined_certificates_go_query_by_query():
    parts = [Certificate(False, 2, 9, torch.tensor([1.0, 2.0]) + i, torch.tensor([3, 4]) + i) for i in (0, 10)]
    whole = Certificate.joined(parts)
    assert whole.last.tolist() == [1.0, 11.0, 2.0, 12.0]
    assert whole.active.tolist() == [3, 13, 4, 14]
    assert whole.k == 2
    assert not whole.approximate
    mixed = Certificate.joined([parts[0], Certificate(True, 3, 9, torch.tensor([1.0, 2.0]))])
    assert mixed.approximate
    assert mixed.active is None
    assert mixed.k.tolist() == [2, 3, 2, 3]
    grown = Certificate(False, 2, 11, torch.tensor([1.0, 2.0]), torch.tensor([3, 4]))
    later = Certificate.joined([parts[0], grown]).error_bound(1.0, "gelu").view(2, 2)
    assert torch.equal(later[:, 1], grown.error_bound(1.0, "gelu"))
    assert bool((later[:, 0] >= parts[0].error_bound(1.0, "gelu")).all())
