"""What cannot be a mask says what was expected, what came and what to do."""

import numpy as np
import pytest
import torch

from attnflow import masks, order
from tests.refused import refused


def bad(error, match, make):
    return pytest.param(make, error, match, id=f"{match[:40]}")


def unchecked(function):
    """The function without the type checker that the tests put around it: what a user calls."""
    return getattr(function, "__wrapped__", function)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        bad(ValueError, "n must be at least 0, got -1", lambda: masks.causal(-1)),
        bad(ValueError, "window must be at least 1, got 0", lambda: masks.sliding_window(4, 0)),
        bad(ValueError, "window must be at least 1, got -2", lambda: masks.dilated_window(4, -2, 1)),
        bad(ValueError, "dilation must be at least 1, got 0", lambda: masks.dilated_window(4, 2, 0)),
        bad(ValueError, "window must be at least 1", lambda: masks.longformer(4, 0)),
        bad(ValueError, "window must be at least 1", lambda: masks.attention_sink(4, 1, 0)),
        bad(ValueError, "sinks must be at least 0", lambda: masks.attention_sink(4, -1, 1)),
        bad(ValueError, "prefix must be at most 4, got 5", lambda: masks.prefix_lm(4, 5)),
        bad(ValueError, r"n must be a multiple of block = 3, got 4; pad to 6", lambda: masks.block_causal(4, 3)),
        bad(ValueError, "multiple of block = 64, got 100; pad to 128", lambda: masks.big_bird(100)),
        bad(ValueError, "block must be at least 1, got 0", lambda: masks.block_causal(4, 0)),
        bad(ValueError, "num_window must be odd", lambda: masks.big_bird(8, 2, num_window=2)),
        bad(ValueError, "num_global must be at least 0", lambda: masks.big_bird(8, 2, num_global=-1)),
        bad(ValueError, "num_random must be at least 0", lambda: masks.big_bird(8, 2, num_random=-1)),
        bad(ValueError, r"indices must hold positions in \[0, 4\), got 4", lambda: masks.global_tokens(4, [1, 4])),
        bad(ValueError, r"indices must hold positions in \[0, 4\), got -1", lambda: masks.longformer(4, 1, [-1])),
        bad(ValueError, "lengths must not be negative, got -1", lambda: masks.document([2, -1])),
        bad(ValueError, 'inner must be "causal" or "full"', lambda: unchecked(masks.document)([2], inner="half")),
        bad(ValueError, r"parents\[0\] must be -1, the root, got 1", lambda: masks.tree([1, -1])),
        bad(ValueError, r"parents must lie in \[-1, 3\), got 3", lambda: masks.tree([-1, 0, 3])),
        bad(ValueError, r"parents must lie in \[-1, 3\), got -2", lambda: masks.tree([-1, 0, -2])),
        bad(ValueError, r"nodes \[1, 2, 3\] hang below a cycle", lambda: masks.tree([-1, 2, 1, 2])),
        bad(ValueError, r"nodes \[1\] hang below a cycle", lambda: masks.tree([-1, 1])),
        bad(ValueError, r"permutation must be a permutation of range\(3\)", lambda: masks.permutation_lm([0, 1, 1])),
        bad(ValueError, r"permutation must be a permutation", lambda: masks.permutation_lm([1, 2])),
        bad(ValueError, "num_blocks must be at least 1, got 0", lambda: masks.block_two_stream(0, 2)),
        bad(ValueError, "block must be at least 1, got 0", lambda: masks.block_two_stream(2, 0)),
        bad(ValueError, "num_blocks must be at least 1", lambda: masks.block_diffusion(0, 2)),
        bad(ValueError, "n must be at least 0", lambda: masks.butterfly(-1)),
        bad(ValueError, "horizon must be at least 1, got 0", lambda: masks.multi_token_prediction(3, 0)),
        bad(
            TypeError,
            "indices must hold integers, got dtype float",
            lambda: masks.global_tokens(4, torch.tensor([0.5])),
        ),
        bad(ValueError, r"indices must be one-dimensional", lambda: masks.global_tokens(4, torch.zeros(2, 2).long())),
        bad(TypeError, "lengths must hold integers", lambda: masks.document(torch.tensor([1.0, float("nan")]))),
    ],
)
def test_parameters_that_cannot_be_met(make, error, match):
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        bad(
            TypeError, r"expected a bool tensor, got torch.float32\..*mask == 0", lambda: masks.from_dense(torch.eye(2))
        ),
        bad(TypeError, r"It holds NaN", lambda: masks.from_dense(torch.tensor([[float("nan")]]))),
        bad(
            TypeError,
            r"got torch.uint8\..*mask.bool\(\)",
            lambda: masks.from_dense(torch.ones(2, 2, dtype=torch.uint8)),
        ),
        bad(TypeError, r"got torch.int64", lambda: masks.from_dense(torch.ones(2, 2, dtype=torch.int64))),
        bad(
            ValueError,
            r"expected shape \[queries, keys\] or .*, got \(2,\)",
            lambda: masks.from_dense(torch.ones(2) > 0),
        ),
        bad(
            ValueError,
            r"tensor\[1, 0\] differs from the first at query 0, key 0",
            lambda: masks.from_dense(torch.arange(2).reshape(2, 1, 1, 1).expand(2, 2, 3, 3) == 0),
        ),
        bad(ValueError, "meta device", lambda: masks.from_dense(torch.ones(2, 2, dtype=torch.bool, device="meta"))),
        bad(TypeError, "mask_mod must return a bool tensor, got torch.int64", lambda: mod(lambda b, h, q, k: q - k)),
        bad(TypeError, "mask_mod must return a bool tensor, got torch.float32", lambda: mod(lambda b, h, q, k: q / 2)),
        bad(ValueError, "num_queries must be at least 0", lambda: masks.from_mask_mod(lambda b, h, q, k: q >= k, -1)),
        bad(ValueError, r"row 1: expected 0 <= start <= end <= 2, got .*\(0, 3\)", lambda: rows([[(0, 1)], [(0, 3)]])),
        bad(ValueError, r"row 0: .*\(1, 0\)", lambda: rows([[(1, 0)], []])),
        bad(ValueError, r"row 0: .*\(-1, 1\)", lambda: rows([[(-1, 1)], []])),
        bad(
            ValueError,
            r"queries of edges must hold positions in \[0, 2\), got 2",
            lambda: masks.from_edges([(2, 0)], 2),
        ),
        bad(
            ValueError, r"keys of edges must hold positions in \[0, 2\), got -1", lambda: masks.from_edges([(0, -1)], 2)
        ),
    ],
)
def test_relations_that_are_not_masks(make, error, match):
    with pytest.raises(error, match=match):
        make()


def mod(function):
    return masks.from_mask_mod(function, 3)


ONE, TWO, THREE = (masks.full(n) for n in (1, 2, 3))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: masks.batch([]), ValueError, "at least one mask, got none"),
        (lambda: masks.batch([torch.ones(2, 2)]), TypeError, "expected a Mask, got Tensor"),
        (lambda: masks.batch([THREE, masks.causal(9)], size=8), ValueError, "sequence 1 has 9 positions, more"),
        (lambda: masks.batch([THREE[:1, :]], size=4), ValueError, "size is for square masks"),
        (lambda: masks.batch([masks.batch([ONE] * 2)]), ValueError, "mask of one sequence, got those of 2"),
        (lambda: masks.batch([masks.per_head([ONE] * n) for n in (2, 3)]), ValueError, "for 2 heads, another has .* 3"),
        (lambda: masks.per_head([]), ValueError, "at least one mask, got none"),
        (lambda: masks.per_head([TWO, THREE]), ValueError, r"mask 1 has shape \(3, 3\), mask 0 \(2, 2\)"),
        (lambda: masks.per_head([masks.batch([TWO])]), TypeError, "expected a Mask, got MaskGrid"),
        (lambda: masks.batch([TWO]) & THREE, ValueError, r"different sizes: \(2, 2\) and \(3, 3\)"),
        (lambda: masks.batch([TWO] * 2) & masks.batch([TWO] * 3), ValueError, "masks for 2 sequences with masks for 3"),
        (
            lambda: masks.batch([THREE, ONE]) | masks.batch([THREE, TWO]),
            ValueError,
            r"\(2, 2\) positions for sequence 1",
        ),
        (lambda: masks.batch([TWO]) & torch.ones(2, 2), TypeError, "expected a Mask, got Tensor"),
        (lambda: masks.batch([TWO] * 2)[2, 0], ValueError, "b must be at most 1"),
        (lambda: masks.batch([TWO]).row_intervals(0), ValueError, "min_width must be at least 1"),
    ],
)
def test_masks_of_a_batch_that_do_not_go_together(make, error, match):
    with refused(error, match):
        make()


def rows(intervals):
    return masks.from_intervals(intervals)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        bad(ValueError, "order must be a permutation", lambda: masks.causal(3).permute([0, 1])),
        bad(ValueError, "order must be a permutation", lambda: masks.causal(3).permute([0, 1, 3])),
        bad(ValueError, "keys must be a permutation", lambda: masks.causal(3).permute([0, 1, 2], [0, 0, 1])),
        bad(TypeError, "order must hold integers", lambda: masks.causal(2).permute([0.0, 1.0])),
        bad(ValueError, "sliced with step 1, got 2 and 1", lambda: masks.causal(4)[::2, :]),
        bad(ValueError, "sliced with step 1, got 1 and -1", lambda: masks.causal(4)[:, ::-1]),
        bad(ValueError, "query must be at most 2, got 3", lambda: masks.causal(3).keys(3)),
        bad(ValueError, "query must be at least 0", lambda: masks.causal(3).allows(-1, 0)),
        bad(ValueError, "key must be at most 2", lambda: masks.causal(3).allows(0, 3)),
        bad(ValueError, "limit must be at least 1", lambda: masks.causal(3).difference(masks.full(3), limit=0)),
        bad(ValueError, "chunk must be at least 1", lambda: list(masks.causal(3).dense_chunks(0))),
        bad(ValueError, "block_size must be at least 1, got 0", lambda: masks.causal(3).block_mask(0)),
        bad(ValueError, "at least one query and one key", lambda: masks.causal(0).block_mask()),
        bad(ValueError, "at least one query and one key", lambda: masks.full(3, 0).block_mask()),
        bad(
            ValueError,
            "backend must be one of eager, sdpa, flex, got 'flash'",
            lambda: unchecked(masks.Mask.cost)(masks.causal(4), "flash"),
        ),
        bad(ValueError, "num_heads must be at least 1", lambda: masks.causal(4).cost(num_heads=0)),
        bad(
            ValueError,
            "these masks are for 2 heads, one each, got num_heads=4",
            lambda: masks.per_head([masks.causal(4)] * 2).cost(num_heads=4),
        ),
        bad(ValueError, "expected a square mask", lambda: masks.full(2, 3).plan(2)),
        bad(
            ValueError,
            "sharding must be one of contiguous, head-tail, document, greedy, got 'ring'",
            lambda: unchecked(masks.Mask.plan)(masks.causal(4), 2, "ring"),
        ),
        bad(ValueError, "ranks must be at least 1", lambda: masks.causal(4).plan(0)),
    ],
)
def test_questions_that_a_mask_cannot_answer(make, error, match):
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize("value", [2.0, "3", None, True, np.array([1, 2])])
def test_sizes_are_integers(value):
    with pytest.raises(TypeError):
        masks.causal(value)


def test_a_mask_combines_with_masks_only():
    with pytest.raises(TypeError):
        masks.causal(2) & torch.ones(2, 2, dtype=torch.bool)


def test_an_unknown_device_is_torchs_error():
    with pytest.raises(RuntimeError):
        masks.causal(2).dense("no-such-device")


def test_rows_with_nothing_allowed_are_kept():
    mask = masks.from_dense(torch.tensor([[False, False], [True, False]]))
    assert mask.row_counts().tolist() == [0, 1]
    assert mask.keys(0).tolist() == []
    assert mask.block_mask(1).kv_num_blocks.flatten().tolist() == [0, 0]
    assert mask.block_mask(1).full_kv_num_blocks.flatten().tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_a_mask_mod_of_any_value_but_bool_is_refused(dtype):
    with pytest.raises(TypeError, match="bool tensor"):
        masks.from_mask_mod(lambda b, h, q, k: (q >= k).to(dtype), 3)


def test_a_mask_mod_may_ignore_an_argument():
    assert masks.from_mask_mod(lambda b, h, q, k: k < 2, 3, 4).dense().int().tolist() == [[1, 1, 0, 0]] * 3
    assert masks.from_mask_mod(lambda b, h, q, k: q < 1, 2).dense().int().tolist() == [[1, 1], [0, 0]]


WINDOW = masks.sliding_window(3, 2)
TABLE = WINDOW.dense()
ADVISED = {
    "function": WINDOW.mask_mod,
    "block_mask": WINDOW.block_mask(2),
    "tensor": TABLE,
    "array": TABLE.numpy(),
    "rows": TABLE.tolist(),
}


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (ADVISED["function"], "from_mask_mod(function, num_queries)"),
        (ADVISED["block_mask"], "from_block_mask(block_mask)"),
        (ADVISED["array"], "from_dense(torch.from_numpy(array))"),
        (ADVISED["rows"], "from_dense(torch.tensor(rows))"),
        (ADVISED["tensor"], "from_dense(tensor)"),
        (TABLE[None, None], "from_dense(tensor[0][0])"),
        (torch.where(TABLE, 0.0, -torch.inf)[None, None], "from_dense(tensor[0][0] == 0)"),
        (TABLE.int(), "from_dense(tensor.bool())"),
    ],
)
def test_the_advice_of_an_error_makes_the_mask(value, advice):
    """What the message says is run as it stands."""
    with pytest.raises(TypeError, match=r"expected a Mask, got .*af\.masks\.") as caught:
        unchecked(masks.Mask.__and__)(WINDOW, value)
    assert advice in str(caught.value)
    names = {**ADVISED, "tensor": value, "torch": torch, "num_queries": 3}
    assert eval(advice, {**names, **{name: getattr(masks, name) for name in masks.__all__}}) == WINDOW


@pytest.mark.parametrize(
    ("make", "value", "advice"),
    [
        (masks.from_dense, WINDOW, "got a Mask, which needs no wrapping"),
        (masks.from_dense, ADVISED["rows"], r"got list; pass torch\.tensor\(rows\)"),
        (masks.from_dense, ADVISED["block_mask"], r"from_block_mask"),
        (masks.from_dense, ADVISED["function"], r"from_mask_mod\(function, num_queries"),
        (masks.from_dense, ADVISED["array"], r"from_dense\(torch.from_numpy\(array\)\)"),
        (lambda value: unchecked(masks.from_mask_mod)(value, 3), TABLE, r"from_dense\(tensor\)"),
        (
            lambda value: unchecked(masks.from_mask_mod)(value, 3),
            ADVISED["block_mask"],
            r"from_block_mask",
        ),
        (WINDOW.difference, masks.causal, "call causal with its arguments first"),
        (WINDOW.difference, "causal", r"the catalogue, such as af.masks.causal\(n\)"),
    ],
)
def test_constructors_name_the_one_that_is_right(make, value, advice):
    with pytest.raises(TypeError, match=advice):
        unchecked(make)(value) if make is masks.from_dense else make(value)


def test_a_task_in_place_of_its_mask():
    from attnflow import tasks

    with pytest.raises(TypeError, match=r"got Task; pass its \.mask"):
        unchecked(masks.Mask.__and__)(WINDOW, tasks.causal_lm([1, 2, 3])[0])


def test_a_mask_mod_of_batch_or_head_is_refused():
    documents = torch.tensor([[0, 0, 1], [0, 1, 1]])
    with pytest.raises(ValueError, match=r"mask_mod depends on b: a mask is one relation.*masks.batch"):
        masks.from_mask_mod(lambda b, h, q, k: documents[b, q] == documents[b, k], 3)
    with pytest.raises(ValueError, match="mask_mod depends on h"):
        masks.from_mask_mod(lambda b, h, q, k: q - k <= h, 3)
    second = masks.from_mask_mod(lambda b, h, q, k: documents[1, q] == documents[1, k], 3)
    assert second.dense().tolist() == [[True, False, False], [False, True, True], [False, True, True]]
    assert masks.from_mask_mod(lambda b, h, q, k: documents[:1][b, q] == documents[:1][b, k], 3).density == 5 / 9


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: order.analyze([]), ValueError, "at least one mask"),
        (lambda: order.analyze(masks.full(2, 3)), ValueError, r"square mask.*\(2, 3\)"),
        (lambda: order.analyze([THREE, TWO]), ValueError, r"one size, got \(3, 3\) and \(2, 2\) \(layer 2\)"),
        (lambda: order.analyze([torch.ones(2, 2)]), TypeError, "Mask"),
        (lambda: order.analyze([THREE] * 2).path(3, 0), ValueError, "source must be at most 2, got 3"),
        (lambda: order.analyze([THREE] * 2).reachability(3), ValueError, "layers must be at most 2, got 3"),
        (lambda: order.analyze(THREE).receptive_field(1.5), TypeError, "query"),
        (lambda: order.analyze(masks.causal(0)).reaches(0, 0), ValueError, "no positions"),
        (lambda: order.analyze(THREE).sparsify(window=0), ValueError, "window must be at least 1"),
        (lambda: order.analyze(THREE).sparsify(anchors=[5]), ValueError, r"hold positions in \[0, 3\), got 5"),
    ],
)
def test_orders_that_are_refused(make, error, match):
    with refused(error, match):
        make()
