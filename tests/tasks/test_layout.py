"""Where the positions of a merged sequence stand; and that arrays carry it to real lengths."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attnflow as af
from attnflow import tasks
from attnflow.tasks import Label, Task, Token

BLANK = 99


def data(ids: list[int]) -> list[Token]:
    return [Token(id, i) for i, id in enumerate(ids)]


def ids_of(merged: tasks.merging.MergedTask) -> list[int]:
    return [token.ids[0] for token in merged.task.inputs]


def test_contents_that_are_labelled_and_read_stay_in_their_stream():
    """Next token and the one after it, from a mask behind each position: contents first, masks last."""
    ids = [11, 12, 13, 14, 15]
    tokens = data(ids)
    family = list(tasks.causal_lm(ids))
    for k in range(3):
        inputs = [*tokens[: k + 1], Token(BLANK, k + 1, ())]
        family.append(Task(inputs, [Label(k + 1, tokens[k + 2])], af.masks.causal(k + 2)))
    merged = tasks.merge(family)
    assert ids_of(merged) == [11, 12, 13, 14, BLANK, BLANK, BLANK]
    assert merged.position_ids.tolist() == [0, 1, 2, 3, 1, 2, 3]
    assert tasks.check(merged).ok


@pytest.mark.parametrize("own_numbers", [True, False])
def test_the_end_of_a_response_stays_with_it(own_numbers):
    """Labelled, and nothing reads it: it is a data token at its own place, whichever way branches are numbered."""

    def branch(ids: list[int], number: int) -> Task:
        tokens = [Token(id, i, (i if i < 2 or not own_numbers else 10 * number + i,)) for i, id in enumerate(ids)]
        return Task(tokens[:-1], [Label(len(ids) - 2, tokens[-1])], af.masks.causal(len(ids) - 1))

    merged = tasks.merge([branch([1, 2, 3, 4, 5], 1), branch([1, 2, 6, 7], 2), branch([1, 2, 8, 9], 3)])
    assert ids_of(merged) == [1, 2, 3, 4, 6, 8]


def test_branches_stand_behind_what_they_leave_the_last_one_first():
    merged = tasks.merge(tasks.rollouts([1], [[2, 3, 4, 5, 0], [2, 6, 7, 0], [2, 3, 8, 0], [2, 6, 9, 0], [9, 9, 0]]))
    assert ids_of(merged) == [1, 2, 3, 4, 5, 8, 6, 9, 7, 9, 9]
    rows = merged.task.mask.intervals()
    assert [len(rows.row(i)) for i in range(11)] == [1, 1, 1, 1, 1, 2, 2, 2, 3, 2, 2]


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    n = draw(st.integers(1, 40))
    return [-1, *(draw(st.integers(0, i - 1)) for i in range(1, n))]


@given(trees())
@settings(max_examples=200)
def test_any_tree_stands_in_its_preorder(parents):
    """And its rows have as few intervals as a path that leaves one stretch for another has to have."""
    paths = []
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        paths.append(path[::-1])
    depth = {node: place for path in paths for place, node in enumerate(path)}
    tokens = [Token(100 + node, depth[node], (node,)) for node in range(len(parents))]
    family = [Task([tokens[node] for node in path], [], af.masks.causal(len(path))) for path in paths]
    merged = tasks.merge(family)
    order = [token.ids[0] - 100 for token in merged.task.inputs]
    assert sorted(order) == list(range(len(parents)))
    allow = merged.task.mask.dense().numpy()
    assert np.array_equal(allow, af.masks.tree(parents).dense().numpy()[order][:, order])
    below = [np.flatnonzero(column).tolist() for column in allow.T]
    assert below == [list(range(place, place + len(each))) for place, each in enumerate(below)]


def test_tasks_that_begin_another_are_not_looked_at_twice():
    """Labels of all; of equal tasks one; of tasks over other tokens none."""
    family = tasks.causal_lm([5, 6, 7, 8])
    merged = tasks.merge([*family, *tasks.causal_lm([5, 6, 9]), family[1], Task([], [], af.masks.causal(0))])
    assert ids_of(merged) == [5, 6, 7]
    assert [(e.position, e.target_id, e.task) for e in merged.task.labels] == [
        *[(0, 6, 0), (0, 6, 3), (1, 7, 1), (1, 9, 4), (1, 7, 5)],
        (2, 8, 2),
    ]
    assert [part.tolist() for part in merged.positions] == [[0], [0, 1], [0, 1, 2], [0], [0, 1], [0, 1], []]
    sparse = Task(family[2].inputs, [], af.masks.sliding_window(3, 2))
    merged = tasks.merge([*family, sparse])  # its last position reads one token less
    assert (ids_of(merged), merged.positions[3].tolist()) == ([5, 6, 7, 7], [0, 1, 2])


AT_SCALE = """
import json, resource, sys, time
import numpy as np
import attnflow as af
kind = sys.argv[1]
generator = np.random.default_rng(0)
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if kind == "causal":
    merged = af.tasks.merge(af.tasks.causal_lm(generator.integers(1, 30_000, 8192)))
else:
    pieces = generator.integers(1, 30_000, (127, 516))
    paths = []
    for leaf in range(63, 127):
        path = [leaf]
        while path[-1]:
            path.append((path[-1] - 1) // 2)
        paths.append(pieces[path[::-1]].ravel())
    merged = af.tasks.merge(af.tasks.rollouts(paths[0][:1], [path[1:] for path in paths[:]]))
report = af.tasks.check(merged)
counts = merged.task.mask.block_counts()
merged.task.mask.block_mask()
print(json.dumps({
    "size": merged.task.size, "ok": report.ok, "dead": len(report.dead), "share": float((counts > 0).mean()),
    "megabytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1e3,
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), [("causal", 8191), ("tree", 127 * 516 - 64)])
def test_real_lengths_take_little_memory(kind, size):
    """64 rollouts with seven levels of common beginnings; causal training on 8,192 tokens: 33 million positions."""
    run = subprocess.run([sys.executable, "-c", AT_SCALE, kind], capture_output=True, text=True, check=True)
    result = json.loads(run.stdout)
    assert (result["size"], result["ok"], result["dead"]) == (size, True, 0)
    assert result["megabytes"] < 1000
    if kind == "tree":
        parents = [-1, *((i - 1) // 2 for i in range(1, 127))]
        nodes = np.arange(127 * 516).reshape(127, 516)
        above = np.arange(127 * 516) - 1
        above[nodes[:, 0]] = [nodes[parent, -1] if parent >= 0 else -1 for parent in parents]
        tree = af.masks.tree(above)
        rank = tree.relabelled()[1]
        assert rank is not None
        depth_first = tree.permute(np.argsort(rank)).block_counts() > 0
        assert result["share"] * depth_first.size < depth_first.sum() + len(
            depth_first
        )  # one more in each row of blocks
