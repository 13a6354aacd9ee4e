from dataclasses import replace

import numpy as np
import pytest
import torch

import attnflow as af
from attnflow import tasks
from attnflow.tasks import Label, Task, Token
from attnflow.tasks.merging import embedding


def numbers(n: int) -> list[int]:
    return [100 + i for i in range(n)]


def relation(*pairs: tuple[int, int], n: int) -> af.masks.Mask:
    return af.masks.from_edges([*pairs, *((i, i) for i in range(n))], n)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 63])
def test_causal_is_the_closed_form(n):
    merged = tasks.merge(tasks.causal_lm(numbers(n)))
    assert merged.task.mask == af.masks.causal(n - 1)
    assert merged.position_ids.tolist() == list(range(n - 1))
    assert [(e.position, e.data_index, e.task) for e in merged.task.labels] == [(k, k + 1, k) for k in range(n - 1)]
    assert merged.is_minimal
    assert tasks.check(merged.task).ok


@pytest.mark.parametrize("predict_first", [False, True])
@pytest.mark.parametrize(("num_blocks", "block"), [(2, 1), (2, 3), (3, 1), (4, 2), (5, 4), (13, 3)])
def test_block_two_stream_is_eq_45(num_blocks, block, predict_first):
    n = num_blocks * block
    merged = tasks.merge(tasks.block_two_stream(numbers(n), block, predict_first, mask_token=0))
    assert merged.task.mask == af.masks.block_two_stream(num_blocks, block, predict_first)
    first = 0 if predict_first else block
    assert merged.position_ids.tolist() == [*range(n - block), *range(first, n)]
    assert len(merged.nodes) == 2 * (num_blocks - 1) + predict_first
    assert merged.is_minimal
    report = tasks.check(merged.task)
    assert (report.ok, report.dead, report.depth) == (True, (), 1)
    assert report.unsupervised == (() if predict_first else tuple(range(block)))


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 63])
def test_butterfly_is_eq_58_corrected(n):
    merged = tasks.merge(tasks.butterfly(numbers(n)))
    assert merged.task.mask == af.masks.butterfly(n)
    assert merged.task.mask.nnz == n * (2 * n - 1)
    assert merged.position_ids.tolist() == [*range(n - 1), *range(1, n), *range(n)]
    assert (len(merged.nodes), merged.is_minimal, merged.task.is_dense) == (3 * n - 2, True, True)
    report = tasks.check(merged.task)
    assert (report.ok, report.dead, report.unsupervised) == (True, (), ())


@pytest.mark.parametrize("seed", range(4))
def test_permutation_is_xlnet_without_its_dead_position(seed):
    order = np.random.default_rng(seed).permutation(9).tolist()
    merged = tasks.merge(tasks.permutation_lm(numbers(9), order, mask_token=0))
    keep = [i for i in range(18) if i != order[-1]]
    expected = af.masks.permutation_lm(order).dense()[keep][:, keep]
    assert torch.equal(merged.task.mask.dense(), expected)
    assert tasks.check(merged.task).dead == ()


def test_block_diffusion_is_its_mask_without_the_dead_block():
    merged = tasks.merge(tasks.block_diffusion(numbers(8), 2, mask_token=0)).task
    order = [8, 9, 10, 11, 12, 13, 0, 1, 2, 3, 4, 5, 6, 7]  # clean blocks first, without the last
    expected = af.masks.block_diffusion(4, 2).dense()[order][:, order]
    assert torch.equal(merged.mask.dense(), expected)


def test_a_single_task_is_left_as_it_is():
    for task in (*tasks.masked_lm(numbers(5), [1, 3], mask_token=0), tasks.butterfly(numbers(4))[2]):
        merged = tasks.merge([task])
        assert merged.task == Task(task.inputs, [replace(label, task=0) for label in task.labels], task.mask)
        assert [part.tolist() for part in merged.positions] == [list(range(task.size))]


def test_merging_what_is_merged_changes_nothing():
    for family in (tasks.butterfly(numbers(5)), tasks.block_two_stream(numbers(6), 2, mask_token=0)):
        once = tasks.merge(family).task
        twice = tasks.merge([once, *family])
        assert twice.task.mask == once.mask
        assert twice.task.inputs == once.inputs


def test_theorem_3_7_fails_for_two_equal_roots_under_one_node():
    """One node per equivalence class, as printed, would leave c with one root."""
    root, top = Token(5, 0), Token(6, 1)
    task = Task([root, root, top], [Label(2, Token(7, 2))], relation((2, 0), (2, 1), n=3))
    merged = tasks.merge([task, task])
    assert (merged.task.size, len(merged.nodes), merged.is_minimal) == (3, 3, True)
    assert merged.task.inputs.count(root) == 2
    assert merged.task.mask == task.mask
    assert np.array_equal(*merged.positions)  # identified across the tasks, not within one
    quotient = Task([root, top], [], relation((1, 0), n=2))
    assert [node.positions for node in embedding(quotient, [task]).missing] == [(2,)]


def test_multiplicity_is_the_largest_that_one_down_set_needs():
    root = Token(5, 0)

    def fan(width: int, top: Token) -> Task:
        return Task([*[root] * width, top], [], relation(*((width, i) for i in range(width)), n=width + 1))

    merged = tasks.merge([fan(2, Token(6, 1)), fan(3, Token(7, 1)), fan(1, Token(8, 1))])
    assert merged.task.inputs.count(root) == 3
    assert (len(merged.nodes), merged.is_minimal) == (6, True)
    assert str(merged).startswith(
        "3 tasks with 9 positions merged into 6: 6 nodes (the fewest possible), 12 allowed pairs; "
    )
    assert repr(merged) == "MergedTask(3 subtasks in Task(6 inputs, 0 labels, merged(n=6)))"


def test_largest_numbers_alone_do_not_suffice():
    """c needs u's over different a's, d needs u's over one a: a third u, though no down-set holds three."""
    a, u = Token(1, 0), Token(2, 0)
    apart = Task([a, a, u, u, Token(3, 0)], [], relation((2, 0), (3, 1), (4, 0), (4, 1), (4, 2), (4, 3), n=5))
    together = Task([a, u, u, Token(4, 0)], [], relation((1, 0), (2, 0), (3, 0), (3, 1), (3, 2), n=4))
    merged = tasks.merge([apart, together])
    assert (len(merged.nodes), merged.lower_bound, merged.is_minimal) == (7, 6, True)
    assert embedding(merged.task, [apart, together]).ok


def test_equal_tokens_within_a_node_stay():
    """The input of a node is a multiset."""
    token = Token(5, 0)
    merged = tasks.merge([Task([token, token], [], af.masks.full(2)), Task([token], [], af.masks.full(1))])
    assert merged.task.size == 3
    assert sorted(map(len, merged.nodes)) == [1, 2]


def test_labels_are_sets_and_keep_weight_and_task():
    tokens = [Token(i, i) for i in range(3)]
    one = Task(tokens[:1], [Label(0, tokens[1], task=8, weight=0.5)], af.masks.causal(1))
    two = Task(tokens[:1], [Label(0, tokens[2]), Label(0, tokens[1])], af.masks.causal(1))
    labels = tasks.merge([one, two]).task.labels
    assert labels == (Label(0, tokens[1], 0, 0.5), Label(0, tokens[2], 1), Label(0, tokens[1], 1))


@pytest.mark.parametrize("n", [2, 3, 4, 6, 9])
def test_the_printed_eq_58_loses_all_centres_but_the_last(n):
    family = tasks.butterfly(numbers(n))
    merged = tasks.merge(family).task
    assert embedding(merged, family).ok
    printed = Task(merged.inputs, merged.labels, tasks.families.butterfly_as_printed(n))
    found = embedding(printed, family)
    assert [(node.task, node.positions) for node in found.missing] == [(k, (k,)) for k in range(n - 1)]
    assert found.num_nodes == n * n
    assert str(found).startswith(f"{n - 1} of {n * n} nodes of the family are not embedded:\n  task 0: positions [0]")


def test_eq_58_as_printed_is_what_the_paper_prints():
    n = 6
    i, j = np.meshgrid(np.arange(3 * n - 2), np.arange(3 * n - 2), indexing="ij")
    first, middle, last = i < n - 1, (i >= n - 1) & (i < 2 * n - 2), i >= 2 * n - 2
    allow = (
        (first & (j <= i))
        | (middle & (i <= j) & (j < 2 * n - 2))
        | (last & ((j < i - 2 * n + 2) | ((i - n + 1 < j) & (j < 2 * n - 2)) | (j == i)))
    )
    assert tasks.families.butterfly_as_printed(n) == af.masks.from_dense(torch.from_numpy(allow))
    assert tasks.families.butterfly_as_printed(1) == af.masks.full(1)
    assert tasks.families.butterfly_as_printed(0) == af.masks.full(0)


def test_embedded_takes_sparse_realisations_and_longer_layouts():
    family = tasks.block_two_stream(numbers(8), 2, mask_token=0)
    merged = tasks.merge(family).task
    sparse = merged.flow.sparsify().mask
    assert embedding(Task(merged.inputs, [], sparse), family).ok
    copies = af.masks.from_dense(merged.mask.dense().repeat(2, 2))
    twice = Task(merged.inputs * 2, [], af.masks.document([12, 12], "full") & copies)
    assert embedding(twice, family).ok
    missing = [(node.task, node.positions) for node in embedding(family[0], family).missing]
    assert missing == [(1, (2, 3)), (1, (4, 5)), (2, (2, 3)), (2, (4, 5)), (2, (6, 7))]


def test_empty_tasks_merge_to_an_empty_task():
    empty = Task([], [], af.masks.causal(0))
    merged = tasks.merge([empty, empty])
    assert (merged.task.size, merged.nodes, [*map(len, merged.positions)]) == (0, (), [0, 0])
    assert tasks.merge([empty, *tasks.causal_lm([1, 2])]).task.size == 1
    assert tasks.check(merged.task).ok
    assert embedding(merged.task, [empty]).ok


def test_large_families_merge_in_the_compact_form():
    """Nothing n x n x tasks: 400 tasks of 400 tokens."""
    merged = tasks.merge(tasks.butterfly(numbers(400)))
    assert merged.task.mask == af.masks.butterfly(400)
    order = np.random.default_rng(0).permutation(400).tolist()
    shuffled = tasks.merge(tasks.permutation_lm(numbers(400), order, mask_token=0))
    assert len(shuffled.nodes) == 799
    rows, rank = shuffled.task.mask.relabelled()
    assert rank is not None
    assert len(rows.starts) <= 2 * 799


def test_many_equal_tokens_do_not_hang():
    """Beyond the search's budget the result is still a common supergraph, and says whether it is proved minimal."""
    root = Token(1, 0)
    rng = np.random.default_rng(1)
    family = []
    for t in range(4):
        allow = np.tril(rng.random((10, 10)) < 0.4) | np.eye(10, dtype=bool)
        inputs = [root] * 4 + [Token(2 + int(rng.integers(2)), 0) for _ in range(5)] + [Token(9, t)]
        allow[9] = True
        family.append(Task(inputs, [], af.masks.from_dense(torch.from_numpy(allow))).densified())
    merged = tasks.merge(family)
    assert embedding(merged.task, family).ok
    assert merged.lower_bound <= len(merged.nodes) <= 40
