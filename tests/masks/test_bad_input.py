"""What cannot be a mask says what was expected, what came and what to do."""

import numpy as np
import pytest
import torch

from attnflow import masks, order, tasks
from tests.refused import refused

ONE, TWO, THREE = (masks.full(n) for n in (1, 2, 3))
CAUSAL = masks.causal(4)


def unchecked(function):
    """The function without the type checker that the tests put around it: what a user calls."""
    return getattr(function, "__wrapped__", function)


def mod(function):
    return masks.from_mask_mod(function, 3)


def test_documents_that_only_look_unusual():
    """Fewer than 16 lengths may look like ids, and lengths that only rise are those of prefixes."""
    for lengths in ([1, 1, 2, 2, 2], [1] * 15, range(1, 30), [1] * 15 + [3], [5] * 40):
        assert masks.document(lengths).num_queries == sum(lengths)


PARAMETERS = [
    (lambda: masks.causal(-1), "n must be at least 0, got -1"),
    (lambda: masks.sliding_window(4, 0), "window must be at least 1, got 0"),
    (lambda: masks.dilated_window(4, -2, 1), "window must be at least 1, got -2"),
    (lambda: masks.dilated_window(4, 2, 0), "dilation must be at least 1, got 0"),
    (lambda: masks.longformer(4, 0), "window must be at least 1"),
    (lambda: masks.attention_sink(4, 1, 0), "window must be at least 1"),
    (lambda: masks.attention_sink(4, -1, 1), "sinks must be at least 0"),
    (lambda: masks.prefix_lm(4, 5), "prefix must be at most 4, got 5"),
    (lambda: masks.block_causal(4, 3), "n must be a multiple of block = 3, got 4; pad to 6"),
    (lambda: masks.big_bird(100), "multiple of block = 64, got 100; pad to 128"),
    (lambda: masks.block_causal(4, 0), "block must be at least 1, got 0"),
    (lambda: masks.big_bird(8, 2, num_window=2), "num_window must be odd"),
    (lambda: masks.big_bird(8, 2, num_global=-1), "num_global must be at least 0"),
    (lambda: masks.big_bird(8, 2, num_random=-1), "num_random must be at least 0"),
    (lambda: masks.global_tokens(4, [1, 4]), r"indices must hold positions in \[0, 4\), got 4"),
    (lambda: masks.longformer(4, 1, [-1]), r"indices must hold positions in \[0, 4\), got -1"),
    (lambda: masks.global_tokens(4, torch.zeros(2, 2).long()), "indices must be one-dimensional"),
    (lambda: masks.document([2, -1]), "lengths must count at least 1 token, but entry 1"),
    (lambda: masks.document([0, 0, 0, 1, 1]), "ids of tokens as ids="),
    (lambda: masks.document(torch.tensor([3, 0, 2])), r"entry 1 of \[3, 0, 2\]"),
    (lambda: masks.document([0, 1, 2, 0, 1]), "their positions as position_ids="),
    (lambda: masks.document([0, 5, 8]), "offsets as cu_seqlens="),
    (lambda: masks.document([1] * 9 + [2] * 9), r"would be 18 documents of \[1, 2\] tokens"),
    (lambda: masks.document([1] * 16), r"16 documents of \[1\] tokens.*sliding_window\(n, 1\)"),
    (lambda: masks.document(ids=range(16)), r"ids=.* would be 16 documents of \[1\]"),
    (lambda: masks.document(position_ids=[0] * 16), r"position_ids=.* would be 16 documents of \[1\]"),
    (lambda: masks.document(cu_seqlens=range(17)), r"cu_seqlens=.* would be 16 documents of \[1\]"),
    (lambda: masks.document(ids=[7, 9, 7]), "ids must stand together for each document, but entry 2"),
    (lambda: masks.document(position_ids=[0, 1, 3]), "position_ids must count up from 0 .* entry 2"),
    (lambda: masks.document(position_ids=[3, 4, 0]), "position_ids must count up from 0 .* entry 0"),
    (lambda: masks.document(cu_seqlens=[5, 3]), "cu_seqlens must start at 0 and never decrease, but entry 0"),
    (lambda: masks.document(cu_seqlens=[0, 5, 3]), "but entry 2"),
    (lambda: masks.document(cu_seqlens=[]), "must start at 0"),
    (lambda: masks.document(), "one of lengths, ids, position_ids, cu_seqlens, such as .* got none"),
    (lambda: masks.document([2], ids=[0, 0]), "got lengths and ids"),
    (lambda: masks.document(torch.tensor([[0, 0, 1], [0, 1, 1]])), "lengths must be one-dimensional"),
    (lambda: unchecked(masks.document)([2], inner="half"), 'inner must be "causal" or "full"'),
    (lambda: masks.tree([1, -1]), r"parents\[0\] must be -1, the root, got 1"),
    (lambda: masks.tree([-1, 0, 3]), r"parents must lie in \[-1, 3\), got 3"),
    (lambda: masks.tree([-1, 0, -2]), r"parents must lie in \[-1, 3\), got -2"),
    (lambda: masks.tree([-1, 2, 1, 2]), r"nodes \[1, 2, 3\] hang below a cycle"),
    (lambda: masks.permutation_lm([0, 1, 1]), r"permutation must be a permutation of range\(3\)"),
    (lambda: masks.block_two_stream(0, 2), "num_blocks must be at least 1, got 0"),
    (lambda: masks.block_two_stream(2, 0), "block must be at least 1, got 0"),
    (lambda: masks.block_diffusion(0, 2), "num_blocks must be at least 1"),
    (lambda: masks.butterfly(-1), "n must be at least 0"),
    (lambda: masks.look_ahead(3, 0), "horizon must be at least 1, got 0"),
]
RELATIONS = [
    (lambda: masks.from_dense(torch.ones(2) > 0), r"expected shape \[queries, keys\] or .*, got \(2,\)"),
    (
        lambda: masks.from_dense(torch.arange(2).reshape(2, 1, 1, 1).expand(2, 2, 3, 3) == 0),
        r"tensor\[1, 0\] differs from the first at query 0, key 0",
    ),
    (lambda: masks.from_dense(torch.ones(2, 2, dtype=torch.bool, device="meta")), "meta device"),
    (lambda: masks.from_mask_mod(lambda b, h, q, k: q >= k, -1), "num_queries must be at least 0"),
    (lambda: masks.from_intervals([[(0, 1)], [(0, 3)]]), r"row 1: expected 0 <= start <= end <= 2, got .*\(0, 3\)"),
    (lambda: masks.from_intervals([[(1, 0)], []]), r"row 0: .*\(1, 0\)"),
    (lambda: masks.from_intervals([[(-1, 1)], []]), r"row 0: .*\(-1, 1\)"),
    (lambda: masks.from_edges([(2, 0)], 2), r"queries of edges must hold positions in \[0, 2\), got 2"),
    (lambda: masks.from_edges([(0, -1)], 2), r"keys of edges must hold positions in \[0, 2\), got -1"),
]
BATCHES = [
    (lambda: masks.batch([]), "at least one mask, got none"),
    (lambda: masks.batch([THREE, masks.causal(9)], size=8), "sequence 1 has 9 positions, more"),
    (lambda: masks.batch([THREE[:1, :]], size=4), "size is for square masks"),
    (lambda: masks.batch([masks.batch([ONE] * 2)]), "mask of one sequence, got those of 2"),
    (lambda: masks.batch([masks.per_head([ONE] * n) for n in (2, 3)]), "for 2 heads, another has .* 3"),
    (lambda: masks.per_head([]), "at least one mask, got none"),
    (lambda: masks.per_head([TWO, THREE]), r"mask 1 has shape \(3, 3\), mask 0 \(2, 2\)"),
    (lambda: masks.batch([TWO] * 2)[2, 0], "b must be at most 1"),
    (lambda: masks.batch([TWO]).row_intervals(0), "min_width must be at least 1"),
]
QUESTIONS = [
    (lambda: THREE.permute([0, 1]), "order must be a permutation"),
    (lambda: THREE.permute([0, 1, 3]), "order must be a permutation"),
    (lambda: THREE.permute([0, 1, 2], [0, 0, 1]), "keys must be a permutation"),
    (lambda: CAUSAL[::2, :], "sliced with step 1, got 2 and 1"),
    (lambda: CAUSAL[:, ::-1], "sliced with step 1, got 1 and -1"),
    (lambda: THREE.keys(3), "query must be at most 2, got 3"),
    (lambda: THREE.allows(-1, 0), "query must be at least 0"),
    (lambda: THREE.allows(0, 3), "key must be at most 2"),
    (lambda: THREE.difference(masks.causal(3), limit=0), "limit must be at least 1"),
    (lambda: list(THREE.dense_chunks(0)), "chunk must be at least 1"),
    (lambda: CAUSAL.block_mask(0), "block_size must be at least 1, got 0"),
    (lambda: masks.causal(0).block_mask(), "at least one query and one key"),
    (lambda: masks.full(3, 0).block_mask(), "at least one query and one key"),
    (lambda: CAUSAL.block_sparsity(0), "block_size must be at least 1, got 0"),
]
ORDERS = [
    (lambda: order.analyze([]), "at least one mask"),
    (lambda: order.analyze([THREE, TWO]), r"one size, got \(3, 3\) and \(2, 2\) \(layer 2\)"),
    (lambda: order.analyze([THREE] * 2).path(3, 0), "source must be at most 2, got 3"),
    (lambda: order.analyze([THREE] * 2).reachability(3), "layers must be at most 2, got 3"),
    (lambda: order.analyze(masks.causal(0)).reaches(0, 0), "no positions"),
    (lambda: order.analyze(THREE).sparsify(window=0), "window must be at least 1"),
    (lambda: order.analyze(THREE).sparsify(anchors=[5]), r"hold positions in \[0, 3\), got 5"),
]


@pytest.mark.parametrize(("make", "match"), [*PARAMETERS, *RELATIONS, *BATCHES, *QUESTIONS, *ORDERS])
def test_values_that_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: masks.global_tokens(4, torch.tensor([0.5])), "indices must hold integers, got dtype float"),
        (lambda: masks.document(torch.tensor([1.0, float("nan")])), "lengths must hold integers"),
        (
            lambda: masks.from_dense(torch.eye(2)),
            r"expected a bool tensor, got torch.float32\..*look like .*mask.bool\(\)",
        ),
        (lambda: masks.from_dense(torch.eye(2).log()), "look like those of `mask == 0`"),
        (lambda: masks.from_dense(torch.tensor([[0.0, -1e9, 1.0]])), "These values are of neither kind"),
        (lambda: masks.from_dense(torch.tensor([[float("nan")]])), "It holds NaN"),
        (lambda: masks.from_dense(torch.ones(2, 2).byte()), r"got torch.uint8\..*mask.bool\(\)"),
        (lambda: mod(lambda b, h, q, k: q - k), "mask_mod must return a bool tensor, got torch.int64"),
        (lambda: mod(lambda b, h, q, k: q / 2), "mask_mod must return a bool tensor, got torch.float32"),
        (lambda: masks.causal(2).permute([0.0, 1.0]), "order must hold integers"),
        (lambda: masks.batch(TWO), r"a list with one mask for each sequence, got .*: pass \[mask\]"),
        (lambda: masks.per_head(TWO), r"a list with one mask for each head, got .*: pass \[mask\]"),
        (lambda: masks.batch([torch.ones(2, 2)]), "expected a Mask, got Tensor"),
        (lambda: masks.block_diagonal(TWO), r"a list with one mask for each block, got .*: pass \[mask\]"),
        (lambda: masks.block_diagonal([TWO, torch.ones(2, 2)]), "expected a Mask, got Tensor"),
        (lambda: masks.per_head([masks.batch([TWO])]), "expected a Mask, got MaskGrid"),
        (lambda: CAUSAL & torch.ones(4, 4).bool(), "expected a Mask, got Tensor"),
        (lambda: CAUSAL & tasks.causal_lm([1, 2])[0], r"got Task; pass its \.mask"),
        (lambda: CAUSAL & masks.batch([CAUSAL]), "expected a Mask, got MaskGrid"),
        (lambda: order.analyze([torch.ones(2, 2)]), "Mask"),
        (lambda: order.analyze(THREE).receptive_field(1.5), "query"),
        *((lambda n=n: masks.causal(n), "n must be an integer") for n in (2.0, "3", None, True, np.array([1, 2]))),
    ],
)
def test_types_that_are_refused(make, match):
    with refused(TypeError, match):
        make()


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
        (TABLE.float(), "from_dense(tensor.bool())"),
    ],
)
def test_the_advice_of_an_error_makes_the_mask(value, advice):
    """What the message says is run as it stands."""
    for verb in (lambda mask: unchecked(masks.Mask.__and__)(WINDOW, mask), unchecked(order.analyze)):
        with pytest.raises(TypeError, match=r"expected a Mask, got .*af\.masks\.") as caught:
            verb(value)
        assert advice in str(caught.value)
    names = {**ADVISED, "tensor": value, "torch": torch, "num_queries": 3}
    assert eval(advice, {**names, **{name: getattr(masks, name) for name in masks.__all__}}) == WINDOW


def test_a_mask_mod_of_batch_or_head_is_refused():
    documents = torch.tensor([[0, 0, 1], [0, 1, 1]])
    with pytest.raises(ValueError, match=r"mask_mod depends on b: a mask is one relation.*masks.batch"):
        masks.from_mask_mod(lambda b, h, q, k: documents[b, q] == documents[b, k], 3)
    with pytest.raises(ValueError, match="mask_mod depends on h"):
        masks.from_mask_mod(lambda b, h, q, k: q - k <= h, 3)
    second = masks.from_mask_mod(lambda b, h, q, k: documents[1, q] == documents[1, k], 3)
    assert second.dense().tolist() == [[True, False, False], [False, True, True], [False, True, True]]
    assert masks.from_mask_mod(lambda b, h, q, k: documents[:1][b, q] == documents[:1][b, k], 3).density == 5 / 9
