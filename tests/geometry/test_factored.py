"""Scores straight from the weights against the matrices that they stand for, in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnflow.geometry import scores
from attnflow.geometry.scores import full_scores, full_symmetry, head_scores, head_symmetry
from tests.geometry import oracle
from tests.memory import Largest

EPS = torch.finfo(torch.float32).eps
HEADS = [(1, 1), (4, 4), (6, 2), (8, 1), (3, 3), (9, 3)]
FIELDS = ("symmetry", "directionality", "norm", "outlier_rows", "outlier_columns")


def weights(num_heads, num_kv_heads, head_dim, width, seed=0, key_width=None):
    """Random query and key weights, float64, with some directions of the token far above the others."""
    draw = torch.Generator().manual_seed(seed)

    def make(rows, columns):
        scale = torch.randn(columns, generator=draw, dtype=torch.float64).exp()
        return torch.randn(rows, columns, generator=draw, dtype=torch.float64) * scale

    return make(num_heads * head_dim, width), make(num_kv_heads * head_dim, key_width or width)


@st.composite
def cases(draw):
    heads = draw(st.sampled_from(HEADS))
    head_dim, width = draw(st.integers(1, 9)), draw(st.integers(1, 48))
    return *weights(*heads, head_dim, width, draw(st.integers(0, 2**31))), *heads


def agree(found, matrices, gamma, mode, tolerance):
    for index, matrix in enumerate(matrices):
        scores = {name: getattr(found, name).reshape(-1)[index].item() for name in FIELDS}
        assert scores["norm"] == pytest.approx(float((matrix**2).sum() ** 0.5), rel=tolerance)
        assert scores["symmetry"] == pytest.approx(oracle.symmetry(matrix), abs=tolerance)
        expected = oracle.directionality(matrix, gamma, mode)
        assert scores["directionality"] == pytest.approx(expected, abs=1000 * tolerance)


@given(cases(), st.sampled_from(["excess", "norm"]), st.sampled_from([1.0, 2.0]))
def test_scores_are_those_of_the_matrices(case, mode, gamma):
    query, key, heads, kv_heads = case
    matrices = oracle.head_matrices(query, key, heads, kv_heads)
    agree(head_scores(query, key, heads, kv_heads, gamma, mode), matrices, gamma, mode, 1e-10)
    agree(full_scores(query, key, heads, kv_heads, gamma, mode), [sum(matrices)], gamma, mode, 1e-10)


@given(cases())
def test_float32_is_as_exact_as_forming_the_matrix_in_float32(case):
    query, key, heads, kv_heads = case
    matrix = sum(oracle.head_matrices(query, key, heads, kv_heads))
    formed = sum(
        q.T @ k
        for q, k in zip(
            query.float().chunk(heads),
            key.float().unflatten(0, (kv_heads, -1)).repeat_interleave(heads // kv_heads, 0),
            strict=True,
        )
    )
    expected = oracle.symmetry(matrix)
    band = 2 * abs(oracle.symmetry(formed) - expected) + 64 * EPS
    assert abs(full_scores(query.float(), key.float(), heads, kv_heads).symmetry.item() - expected) <= band


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("key_width", [None, 50, 91])
def test_tiles_and_factors_agree(heads, key_width, monkeypatch):
    query, key = weights(*heads, 8, 70, key_width=key_width)
    monkeypatch.setattr(scores, "_TILE", 16)  # 70 = 4 tiles and a rest
    found = []
    for ratio in (0, 10**6):
        monkeypatch.setattr(scores, "_WIDTH_PER_ROW", ratio)
        found.append(full_scores(query, key, *heads))
    for name in FIELDS:
        torch.testing.assert_close(getattr(found[0], name), getattr(found[1], name), equal_nan=True)


def test_widths_that_differ_have_no_symmetry_but_all_else():
    query, key = weights(2, 2, 8, 40, key_width=61)
    scores, matrix = full_scores(query, key, 2, 2), query.T @ key
    assert math.isnan(scores.symmetry.item())
    assert scores.norm.item() == pytest.approx(matrix.norm().item())
    assert scores.directionality.item() == pytest.approx(oracle.directionality(matrix), abs=1e-9)
    assert head_scores(query, key, 2, 2).symmetry.isnan().all()


@given(cases())
def test_heads_that_share_a_key_head_are_neighbours(case):
    query, key, heads, kv_heads = case
    group = heads // kv_heads
    repeated = key.unflatten(0, (kv_heads, -1)).repeat_interleave(group, 0).flatten(0, 1)
    for function in (head_scores, full_scores):
        shared, own = function(query, key, heads, kv_heads), function(query, repeated, heads, heads)
        for name in ("symmetry", "norm"):
            torch.testing.assert_close(getattr(shared, name), getattr(own, name), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("factor", [1e-25, 1e-12, 1e12])
def test_scaling_changes_only_the_norm(factor):
    query, key = (w.float() for w in weights(6, 2, 8, 60))
    for function in (head_scores, full_scores):
        before, after = function(query, key, 6, 2), function(query * factor, key, 6, 2)
        torch.testing.assert_close(after.symmetry, before.symmetry, rtol=0, atol=1e-5)
        torch.testing.assert_close(after.directionality, before.directionality, rtol=0, atol=1e-4)
        torch.testing.assert_close(after.norm, before.norm * factor, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_computed_in_float32(dtype):
    query, key = (w.to(dtype) for w in weights(4, 4, 8, 60))
    found, expected = full_scores(query, key, 4, 4), full_scores(query.float(), key.float(), 4, 4)
    assert all(torch.equal(getattr(found, name), getattr(expected, name)) for name in FIELDS)


@given(cases())
def test_differentiable_symmetries_are_the_same_numbers(case):
    query, key, heads, kv_heads = case
    per_head, full = head_scores(query, key, heads, kv_heads), full_scores(query, key, heads, kv_heads)
    torch.testing.assert_close(head_symmetry(query, key, heads, kv_heads), per_head.symmetry, rtol=0, atol=1e-10)
    torch.testing.assert_close(full_symmetry(query, key, heads, kv_heads), full.symmetry, rtol=0, atol=1e-10)


def test_no_matrix_of_width_squared_is_made():
    width = 3000
    query, key = (w.float() for w in weights(4, 4, 32, width))
    with Largest() as heads:
        head_scores(query, key, 4, 4)
    assert heads.numel <= query.numel()
    wide = torch.randn(1600, width)  # more than a quarter of the width: tiles
    with Largest() as full:
        full_scores(wide, wide, 50, 50)
    assert full.numel <= max(wide.numel(), 1024**2)
    with Largest() as gradients:
        head_symmetry(query, key, 4, 4)
    assert gradients.numel <= query.numel()
