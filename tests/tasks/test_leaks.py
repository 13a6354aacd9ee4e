import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnflow as af
from attnflow import tasks
from attnflow.tasks import Label, Task, Token
from attnflow.testing import closure, depth, power


@st.composite
def specs(draw: st.DrawFn) -> tuple:
    """(mask bits, provenance of each input, (position, data index) of each label), as plain data."""
    n = draw(st.integers(1, 8))
    bits = draw(st.integers(0, 2 ** (n * n) - 1)) & draw(st.integers(0, 2 ** (n * n) - 1))
    index = st.integers(0, 4)
    provenance = [draw(st.sets(index, max_size=2)) for _ in range(n)]
    labels = draw(st.lists(st.tuples(st.integers(0, n - 1), index | st.none()), max_size=6))
    return np.array([bits >> i & 1 for i in range(n * n)], dtype=bool).reshape(n, n), provenance, labels


def build(spec: tuple) -> Task:
    table, provenance, labels = spec
    inputs = [Token(7, i, sources) for i, sources in enumerate(provenance)]
    targets = [Label(p, Token(9, 0, () if d is None else (d,)), task=i) for i, (p, d) in enumerate(labels)]
    return Task(inputs, targets, af.masks.from_dense(torch.from_numpy(table)))


@given(specs(), st.none() | st.integers(0, 4))
@settings(max_examples=1000)
def test_against_the_definition(spec, layers):
    task = build(spec)
    report = tasks.check(task, layers=layers)
    table = task.mask.dense()
    below = closure(table) if layers is None else power(table, layers)
    expected = {
        (label.position, label.task, carrier)
        for label in task.labels
        for carrier, token in enumerate(task.inputs)
        if label.data_index in token.provenance and below[label.position, carrier]
    }
    assert {(leak.position, leak.label.task, leak.carrier) for leak in report.leaks} == expected
    assert len(report.leaks) == len(expected)
    assert report.ok == (not expected)
    labelled = [label.position for label in task.labels]
    assert report.dead == tuple(i for i in range(task.size) if not below[labelled, i].any())
    carried = {index for token in task.inputs for index in token.provenance}
    assert report.unsupervised == tuple(sorted(carried - {label.data_index for label in task.labels}))
    assert report.depth == depth(table)
    assert report.density == task.mask.density
    for leak in report.leaks:
        assert_shortest_witness(leak, table.numpy() | np.eye(task.size, dtype=bool))
    json.dumps(report.to_dict())


def assert_shortest_witness(leak: tasks.leaks.Leak, step: np.ndarray) -> None:
    path = leak.witness
    assert (path[0], path[-1]) == (leak.carrier, leak.position)
    assert all(step[there, here] for here, there in pairwise(path))
    assert len(path) == 1 or not power(step, len(path) - 2)[leak.position, leak.carrier]


def leaky() -> Task:
    """Position 3 predicts token 2, and reads it by 2 -> 1 -> 3."""
    tokens = [Token(10 + i, i) for i in range(3)]
    mask = af.masks.from_edges([(1, 2), (3, 1), (0, 0)], 4)
    return Task([*tokens, Token(0, 2, ())], [Label(3, tokens[2]), Label(3, tokens[0], weight=0)], mask)


def test_the_witness_is_rendered_layer_by_layer():
    report = tasks.check(leaky())
    assert [leak.route for leak in report.leaks] == ["layer 1: 2 -> 1, layer 2: 1 -> 3"]
    assert [row["route"] for row in report.rows()] == [leak.route for leak in report.leaks]
    assert report.to_dict()["ok"] is False
    assert type(report).from_json(report.to_json()) == report
    assert str(report).splitlines() == [
        "1 of 2 labels leaks within any number of layers",
        "  the label of position 3, token 2 (id 12), is in the input of position 2: layer 1: 2 -> 1, layer 2: 1 -> 3",
        "4 positions, 2 labels, depth 2, density 0.188",
        "dead positions: [0]",
        "unsupervised data tokens: [1]",
    ]
    with pytest.raises(af.LeakFound, match=r"layer 1: 2 -> 1, layer 2: 1 -> 3$") as caught:
        report.raise_if_leaks()
    assert caught.value.witness == (2, 1, 3)


def test_layers_bound_the_leak():
    assert tasks.check(leaky(), layers=1).ok
    assert not tasks.check(leaky(), layers=2).ok
    assert str(tasks.check(leaky(), layers=1)).startswith("no label leaks within 1 layer\n")
    tasks.check(leaky(), layers=1).raise_if_leaks()


def test_a_position_that_holds_its_own_label():
    token = Token(5, 0)
    report = tasks.check(Task([token], [Label(0, token)], af.masks.from_edges([], 1)))
    assert report.leaks[0].witness == (0,)
    assert report.leaks[0].route == "position 0 holds it before layer 1"


def test_averaged_tokens_leak_what_they_average():
    """Butterfly whose centre averages the token to predict as well."""
    ids = [5, 6, 7]
    task = tasks.butterfly(ids)[1]
    assert tasks.check(task).ok
    average = Token(ids, 1, (0, 1, 2))
    report = tasks.check(Task([task.inputs[0], average, task.inputs[2]], task.labels, task.mask))
    assert [(leak.position, leak.carrier) for leak in report.leaks] == [(1, 1)]


def test_a_target_from_outside_of_the_data_cannot_leak():
    tokens = [Token(i, i) for i in range(2)]
    report = tasks.check(Task(tokens, [Label(0, Token(0, 0, ()))], af.masks.full(2)))
    assert (report.ok, report.unsupervised) == (True, (0, 1))


def test_equal_token_ids_at_other_places_are_no_leak():
    """Predicting the second 7 from the first is what a language model does."""
    assert tasks.check(tasks.merge(tasks.causal_lm([7, 7, 7, 7])).task).ok


def test_the_dead_block_of_block_diffusion():
    """The training mask of BD3-LM: its last clean block is read by no prediction (order.md)."""
    ids = [5, 6, 7, 8, 9, 4]
    clean = [Token(id, i) for i, id in enumerate(ids)]
    inputs = [Token(0, i, ()) for i in range(6)] + clean
    labels = [Label(i, clean[i]) for i in range(6)]
    report = tasks.check(Task(inputs, labels, af.masks.block_diffusion(3, 2)))
    assert (report.ok, report.dead, report.unsupervised) == (True, (10, 11), ())


def test_full_attention_leaks_every_label_of_a_language_model():
    merged = tasks.merge(tasks.causal_lm(range(600))).task
    report = tasks.check(Task(merged.inputs, merged.labels, af.masks.full(599)))
    assert len(report.leaks) == 598  # the last target is no input
    assert "\n  ... and 590 more\n" in str(report)
    with pytest.raises(af.LeakFound, match=r"\(598 leaks in all\)"):
        report.raise_if_leaks()


def test_thousands_of_positions():
    merged = tasks.merge(tasks.block_two_stream(range(2048), 16, mask_token=0)).task
    report = tasks.check(merged)
    assert (report.ok, report.dead, report.num_positions) == (True, (), 4064)
    sparse = merged.flow.sparsify(window=64)
    again = tasks.check(Task(merged.inputs, merged.labels, sparse.mask))
    assert (again.ok, again.dead, again.depth) == (True, (), sparse.depth)


def test_tasks_without_labels_or_positions():
    report = tasks.check(Task([Token(5, 0)], [], af.masks.causal(1)))
    assert (report.ok, report.dead, report.unsupervised) == (True, (0,), (0,))
    empty = tasks.check(Task([], [], af.masks.causal(0)))
    assert (empty.ok, empty.dead, empty.density) == (True, (), 0.0)
    assert "no label leaks" in str(empty)
