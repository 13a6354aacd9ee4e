"""Masks as relations: set algebra, equality, reordering, slicing, however the masks are numbered inside."""

import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnflow import masks
from tests.catalogue_cases import MASKS
from tests.strategies import dense_masks, mask_pairs, relations, square_masks


def table(mask):
    return mask.dense().numpy()


@given(mask_pairs())
def test_operators_are_set_operators(pair):
    a, b = pair
    assert np.array_equal(table(a & b), table(a) & table(b))
    assert np.array_equal(table(a | b), table(a) | table(b))
    assert np.array_equal(table(~a), ~table(a))


@given(mask_pairs())
def test_equality_hash_and_difference_are_those_of_the_relation(pair):
    a, b = pair
    differing = [tuple(p) for p in np.argwhere(table(a) != table(b)).tolist()]
    assert (a == b) == (not differing)
    assert a.difference(b, limit=1000) == differing
    assert a.difference(b, limit=2) == differing[:2]
    if a == b:
        assert hash(a) == hash(b)
    same = masks.from_dense(a.dense(), name="another name")
    assert a == same
    assert hash(a) == hash(same)
    assert len({a, same}) == 1


@given(st.lists(st.one_of(square_masks(6), dense_masks(5)), max_size=4))
def test_masks_side_by_side_are_the_block_diagonal_of_their_tables(parts):
    shape = tuple(sum(part.shape[axis] for part in parts) for axis in (0, 1))
    expected = torch.block_diag(*(part.dense().int() for part in parts)).bool().reshape(shape) if parts else shape
    packed = masks.block_diagonal(parts)
    assert packed.shape == shape
    assert not parts or torch.equal(packed.dense(), expected)


def test_long_masks_side_by_side_keep_their_numbering():
    parts = [masks.permutation_lm(np.random.default_rng(0).permutation(1 << 14)), masks.causal(1 << 15)]
    packed = masks.block_diagonal([*parts, masks.dilated_window(1 << 16, 100, 1000)])
    assert packed.shape == (1 << 17, 1 << 17)
    for query in (5, 1 << 14, 40_000):
        first, part = (0, parts[0]) if query < 1 << 15 else (1 << 15, parts[1])
        assert np.array_equal(packed.keys(query), part.keys(query - first) + first)
    assert masks.block_diagonal([masks.causal(4)] * (1 << 15)) == masks.document([4] * (1 << 15))
    assert len(packed.numbered_keys()[0].starts) < 3 << 17


@given(st.lists(st.integers(1, 5), max_size=6), st.sampled_from(["causal", "full"]))
def test_documents_however_they_are_said(lengths, inner):
    expected = masks.document(lengths, inner)
    ids = np.repeat(np.arange(len(lengths))[::-1], lengths)
    positions = [place for length in lengths for place in range(length)]
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
    for said in ({"ids": ids}, {"position_ids": positions}, {"cu_seqlens": offsets}):
        assert masks.document(inner=inner, **said) == expected
    assert masks.document(inner=inner, cu_seqlens=torch.cat([offsets, offsets[-1:]])) == expected


@given(square_masks(), st.data())
def test_permute_moves_queries_and_keys(mask, data):
    order = data.draw(st.permutations(range(mask.num_queries)))
    expected = table(mask)[np.ix_(order, order)]
    assert np.array_equal(table(mask.permute(order)), expected)
    assert mask.permute(order).permute(np.argsort(order) if order else []) == mask
    keys = data.draw(st.permutations(range(mask.num_queries)))
    assert np.array_equal(table(mask.permute(order, keys)), table(mask)[np.ix_(order, keys)])


@given(dense_masks(), st.data())
def test_permute_without_keys_moves_the_rows_of_a_mask_that_is_not_square(mask, data):
    if mask.num_queries != mask.num_keys:
        order = data.draw(st.permutations(range(mask.num_queries)))
        assert np.array_equal(table(mask.permute(order)), table(mask)[np.array(order, dtype=int)])


@given(square_masks(), st.data())
def test_slices_are_those_of_the_table(mask, data):
    bound = st.one_of(st.none(), st.integers(-10, 10))
    queries, keys = (slice(data.draw(bound), data.draw(bound)) for _ in range(2))
    assert np.array_equal(table(mask[queries, keys]), table(mask)[queries, keys])


@given(square_masks())
def test_every_view_of_a_mask_agrees(mask):
    dense = table(mask)
    assert mask.nnz == dense.sum()
    assert mask.density == (dense.mean() if dense.size else 0.0)
    assert mask.row_counts().tolist() == dense.sum(axis=1).tolist()
    assert [mask.keys(q).tolist() for q in range(len(dense))] == [np.flatnonzero(r).tolist() for r in dense]
    for chunk in (1, 3, 100):
        parts = list(mask.dense_chunks(chunk))
        assert [start for start, _ in parts] == list(range(0, len(dense), chunk))
        assert np.array_equal(np.concatenate([part for _, part in parts] or [dense]), dense)
    rows, rank = mask.relabelled()
    number = np.arange(len(dense)) if rank is None else rank
    assert np.array_equal(rows.to_bool()[number][:, number], dense)


@given(square_masks())
def test_intervals_are_canonical(mask):
    rows = mask.intervals()
    assert rows.num_rows == mask.num_queries
    assert rows.num_keys == mask.num_keys
    for q in range(mask.num_queries):
        row = rows.row(q)
        assert all(0 <= start < end <= mask.num_keys for start, end in row)
        assert all(end < start for (_, end), (start, _) in pairwise(row))  # sorted, never touching
        assert [k for start, end in row for k in range(start, end)] == mask.keys(q).tolist()
    assert masks.from_intervals([rows.row(q) for q in range(mask.num_queries)], mask.num_keys) == mask


@given(relations())
def test_a_mask_is_the_same_from_a_table_edges_intervals_or_a_function(allow):
    shape = allow.shape
    mask = masks.from_dense(torch.from_numpy(allow))
    assert mask.shape == shape
    assert masks.from_edges([(int(q), int(k)) for q, k in np.argwhere(allow)], *shape) == mask
    single = [[(int(k), int(k) + 1) for k in np.flatnonzero(row)[::-1]] for row in allow]
    assert masks.from_intervals(single, shape[1]) == mask
    lookup = torch.from_numpy(allow)
    if allow.size:
        assert masks.from_mask_mod(lambda b, h, q, k: lookup[q, k], *shape) == mask


@given(square_masks())
def test_pickle_keeps_relation_name_and_parameters(mask):
    copy = pickle.loads(pickle.dumps(mask))
    assert copy == mask
    assert hash(copy) == hash(mask)
    assert (copy.name, dict(copy.parameters)) == (mask.name, dict(mask.parameters))


def test_masks_of_different_shapes_are_unequal_and_do_not_combine():
    a, b = masks.causal(3), masks.causal(4)
    assert a != b != a.dense().tolist()
    for operation in (a.__and__, a.__or__, a.difference):
        with pytest.raises(ValueError, match=r"shapes: \(3, 3\) and \(4, 4\)"):
            operation(b)


@pytest.mark.parametrize(
    "mask", [masks.causal(3), masks.tree([-1, 0, 0]), masks.from_dense(torch.eye(3).bool())], ids=repr
)
def test_a_mask_is_immutable(mask):
    with pytest.raises(AttributeError, match="immutable"):
        mask.name = "other"
    with pytest.raises(AttributeError, match="immutable"):
        del mask.num_keys
    with pytest.raises(TypeError):
        mask.parameters["n"] = 4
    with pytest.raises(ValueError, match="read-only"):
        mask.intervals().starts[0] = 1
    mask.dense()[:] = False  # a copy
    mask.row_counts()[:] = 0
    assert mask == pickle.loads(pickle.dumps(mask))
    assert mask.nnz > 0


def test_the_order_given_to_permute_may_change_afterwards():
    order = np.array([2, 0, 1])
    mask = masks.causal(3).permute(order)
    before = mask.dense()
    order[:] = [0, 1, 2]
    assert torch.equal(mask.dense(), before)


@pytest.mark.parametrize("mask", [m for m in MASKS if 0 in m.shape], ids=repr)
def test_empty_masks_have_defined_answers(mask):
    assert mask.nnz == 0
    assert mask.density == 0.0
    assert tuple(mask.dense().shape) == mask.shape
    assert mask & mask == mask | mask == ~mask == mask
    assert mask.difference(mask) == []


@given(square_masks(), st.sampled_from([torch.device("cpu"), "cpu"]))
def test_dense_goes_to_the_device_asked_for(mask, device):
    assert mask.dense(device).device.type == "cpu"
    assert mask.dense("meta").shape == mask.shape


def test_masks_show_themselves_in_notebooks_and_print_short():
    mask = masks.sliding_window(300, 40)
    assert "<svg" in mask._repr_html_()
    for _ in range(8):
        mask = mask & ~(mask | masks.causal(300))
    assert len(repr(mask)) <= 220
    assert repr(mask).startswith("((((((((sliding_window(n=300")
