"""Hypothesis strategies: random relations, and random masks however they came about."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attnflow import masks
from tests.catalogue_cases import MASKS


@st.composite
def relations(draw, max_queries: int = 8, square: bool = False) -> np.ndarray:
    """bool[q, k]; sizes from 0; some rows empty, some full, all densities."""
    num_queries = draw(st.integers(0, max_queries))
    num_keys = num_queries if square else draw(st.integers(0, max_queries))
    table = draw(arrays(np.bool_, (num_queries, num_keys), elements=st.booleans()))
    fate = draw(st.lists(st.sampled_from(["empty", "full", "keep"]), min_size=num_queries, max_size=num_queries))
    for row, what in enumerate(fate):
        if what != "keep":
            table[row] = what == "full"
    return table


def dense_masks(max_queries: int = 8, square: bool = False):
    """Masks from random relations."""
    return relations(max_queries, square=square).map(lambda table: masks.from_dense(torch.from_numpy(table)))


@st.composite
def permuted_masks(draw, max_size: int = 8):
    """Square masks with a hidden relabelling: a random relation or a catalogue mask, then a permutation."""
    mask = draw(st.one_of(dense_masks(max_size, square=True), catalogue_masks(max_size)))
    return mask.permute(draw(st.permutations(range(mask.num_queries))))


def catalogue_masks(max_size: int = 12):
    """Square catalogue masks of at most `max_size` positions."""
    return st.sampled_from([m for m in MASKS if m.num_queries == m.num_keys <= max_size])


def square_masks(max_size: int = 8):
    """Any square mask: random, from the catalogue, relabelled."""
    return st.one_of(dense_masks(max_size, square=True), catalogue_masks(max_size), permuted_masks(max_size))


@st.composite
def mask_pairs(draw, max_queries: int = 7):
    """Two masks of one shape, each with or without hidden relabellings of its queries and keys."""
    first = draw(relations(max_queries))
    second = draw(arrays(np.bool_, first.shape))
    return draw(_relabelled(first)), draw(_relabelled(second))


@st.composite
def _relabelled(draw, table: np.ndarray):
    """The mask of `table`, built permuted and permuted back, so that its inner numbering is arbitrary."""
    mask = masks.from_dense(torch.from_numpy(table))
    if not draw(st.booleans()):
        return mask
    order = [np.array(draw(st.permutations(range(size))), dtype=np.int64) for size in table.shape]
    shuffled = masks.from_dense(torch.from_numpy(table[np.ix_(*order)]))
    return shuffled.permute(np.argsort(order[0]), np.argsort(order[1]))
