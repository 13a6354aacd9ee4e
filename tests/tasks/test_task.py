import json
import pickle

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnflow as af
from attnflow import tasks
from attnflow.tasks import Label, Task, Token
from attnflow.testing import closure
from tests.strategies import square_masks


def on(mask: af.masks.Mask) -> Task:
    return Task([Token(7, i) for i in range(mask.num_queries)], [], mask)


def test_tokens_are_their_id_position_and_provenance():
    assert Token(7, 2).provenance == {2}
    assert Token(7, 2, ()).provenance == frozenset()
    assert Token(7, 2) == Token(np.int64(7), torch.tensor(2), [2])
    assert hash(Token(7, 2)) == hash(Token(7, 2, {2}))
    assert len({Token(7, 2), Token(7, 3), Token(7, 2, ()), Token(8, 2)}) == 4


def test_equal_ids_at_different_data_places_are_different_tokens():
    first, second = (merged.inputs[0] for merged in (tasks.causal_lm([7, 7])[0], tasks.causal_lm([7, 8])[0]))
    family = tasks.causal_lm([7, 7, 7])
    assert first == second
    assert len(set(family[1].inputs)) == 2
    assert [label.data_index for task in family for label in task.labels] == [1, 2]


def test_averaged_tokens():
    assert Token((9, 5), 1, (0, 2)).ids == (5, 9)
    assert Token([5, 9], 1, (2, 0)) == Token((9, 5), 1, (0, 2))
    assert Token((9,), 1).id == 9  # the mean of one
    assert Token((5, 5), 1).ids == (5, 5)
    assert Token(torch.tensor([5, 9]), 1).ids == (5, 9)
    assert Token(torch.tensor(5), 1).id == 5


def test_an_empty_task_is_a_task():
    task = Task([], [], af.masks.causal(0))
    assert (task.size, task.is_dense, task.attends_itself, task.position_ids.tolist()) == (0, True, True, [])
    assert task.densified() == task
    assert Task.from_dict(task.to_dict()) == task


@given(square_masks())
def test_density_is_that_of_the_definition(mask):
    """A = allow | I is dense iff A = R (hasse, def. 3.2)."""
    task, allow = on(mask), mask.dense()
    residual = allow.numpy() | np.eye(len(allow), dtype=bool)
    assert task.is_dense == np.array_equal(residual, closure(allow))
    assert task.attends_itself == bool(allow.diagonal().all())
    assert task.densified().mask == af.masks.from_dense(torch.from_numpy(closure(allow)))


def test_a_task_is_hashable_and_survives_pickling():
    task = tasks.butterfly([5, 6, 7])[1]
    assert task.flow.depth == 1
    assert pickle.loads(pickle.dumps(task)) == task
    assert len({task, tasks.butterfly([5, 6, 7])[1]}) == 1
    assert repr(task) == "Task(3 inputs, 1 labels, butterfly_subtask(n=3, centre=1))"


@given(square_masks(5), st.data())
def test_json_round_trip(mask, data):
    n, small = mask.num_queries, st.integers(0, 4)
    tokens = [
        Token(data.draw(st.lists(small, min_size=1, max_size=3)), data.draw(small), data.draw(st.sets(small)))
        for _ in range(n)
    ]
    labels = [
        Label(
            data.draw(st.integers(0, n - 1)), Token(data.draw(small), 0), data.draw(small), data.draw(st.floats(0, 9))
        )
        for _ in range(data.draw(small) if n else 0)
    ]
    task = Task(tokens, labels, mask)
    assert Task.from_dict(json.loads(json.dumps(task.to_dict()))) == task


def test_json_names_catalogue_masks_only_if_they_are_what_they_say():
    assert on(af.masks.causal(3)).to_dict()["mask"] == {"name": "causal", "parameters": {"n": 3}}
    assert on(af.masks.tree([-1, 0])).to_dict()["mask"] == {"name": "tree", "parameters": {"parents": [-1, 0]}}
    liar = af.masks.Mask(af.masks.full(2).intervals(), "causal", {"n": 2})
    assert on(liar).to_dict()["mask"] == {"intervals": [[[0, 2]], [[0, 2]]]}


def test_a_spec_as_a_person_writes_it():
    spec = {
        "inputs": [5, {"id": 7, "position": 1}, {"id": 0, "position": 1, "provenance": []}],
        "labels": [{"position": 2, "target": {"id": 7, "position": 1}}],
        "mask": {"dense": [[1, 0, 0], [1, 1, 0], [1, 0, 1]]},
    }
    task = Task.from_dict(spec)
    assert task.inputs == (Token(5, 0), Token(7, 1), Token(0, 1, ()))
    assert task.labels == (Label(2, Token(7, 1)),)
    assert task.mask.dense().int().tolist() == spec["mask"]["dense"]
    assert Task.from_dict({**spec, "mask": task.mask}) == task
