import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnflow as af
from attnflow import tasks
from attnflow.tasks import Label, Task, Token
from attnflow.testing import closure


def random_relation(draw: st.DrawFn, n: int) -> torch.Tensor:
    bits = draw(st.lists(st.booleans(), min_size=n * n, max_size=n * n))
    return torch.tensor(bits, dtype=torch.bool).reshape(n, n)


@st.composite
def relations(draw: st.DrawFn, largest: int = 8) -> torch.Tensor:
    return random_relation(draw, draw(st.integers(0, largest)))


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


def test_tokens_and_labels_are_immutable():
    token = Token(7, 0)
    with pytest.raises(AttributeError):
        token.position = 3
    with pytest.raises(AttributeError):
        Label(0, token).weight = 2.0
    with pytest.raises(AttributeError):
        on(af.masks.causal(1)).inputs = ()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Token(-1, 0), ValueError, "id must be at least 0, got -1"),
        (lambda: Token(1.5, 0), TypeError, None),
        (lambda: Token("7", 0), TypeError, None),
        (lambda: Token(["7"], 0), TypeError, None),
        (lambda: Token(True, 0), TypeError, "bool"),
        (lambda: Token((), 0), ValueError, "empty sequence"),
        (lambda: Token(1, -1), ValueError, "position must be at least 0"),
        (lambda: Token(1, 0, (-2,)), ValueError, "provenance must be at least 0"),
        (lambda: Label(-1, Token(1, 0)), ValueError, "position of a label"),
        (lambda: Label(0, Token((1, 2), 0)), ValueError, "one vocabulary id of at most one data token"),
        (lambda: Label(0, Token(1, 0, (0, 1))), ValueError, "one vocabulary id of at most one data token"),
        (lambda: Label(0, Token(1, 0), weight=float("nan")), ValueError, "must be finite, got nan"),
        (lambda: Label(0, Token(1, 0), weight=float("inf")), ValueError, "finite"),
        (lambda: Label(0, Token(1, 0), advantage=float("nan")), ValueError, "advantage of a label must be finite"),
        (lambda: Label(0, Token(1, 0), old_logprob="x"), TypeError, None),
        (lambda: Label(0, Token(1, 0), task=-1), ValueError, "task of a label"),
    ],
)
def test_bad_tokens_and_labels(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("inputs", "labels", "mask", "message"),
    [
        (2, [], af.masks.full(2, 3), r"square, got shape \(2, 3\)"),
        (2, [], af.masks.causal(3), r"as long as the inputs \(2\), got shape \(3, 3\)"),
        (2, [2], af.masks.causal(2), "labels must lie within the 2 inputs, got position 2"),
        (0, [0], af.masks.causal(0), "within the 0 inputs"),
    ],
)
def test_bad_tasks(inputs, labels, mask, message):
    tokens = [Token(7, i) for i in range(3)]
    with pytest.raises(ValueError, match=message):
        Task(tokens[:inputs], [Label(p, tokens[0]) for p in labels], mask)


def test_an_empty_task_is_a_task():
    task = Task([], [], af.masks.causal(0))
    assert (task.size, task.is_dense, task.attends_itself, task.position_ids.tolist()) == (0, True, True, [])
    assert task.densified() == task
    assert Task.from_dict(task.to_dict()) == task


@given(relations())
def test_density_is_that_of_the_definition(allow):
    """A = allow | I is dense iff A = R (hasse, def. 3.2)."""
    task = on(af.masks.from_dense(allow))
    residual = allow.numpy() | np.eye(len(allow), dtype=bool)
    assert task.is_dense == np.array_equal(residual, closure(allow))
    assert task.attends_itself == bool(allow.diagonal().all())
    assert task.densified().mask == af.masks.from_dense(torch.from_numpy(closure(allow)))


@given(st.integers(1, 12), st.data())
def test_density_of_interval_rows(n, data):
    """The quick way, for rows of one interval each, also renumbered."""
    pairs = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for _ in range(n)]
    rows = [[(min(a, i), max(b, i + 1))] for i, (a, b) in enumerate(pairs)]
    order = data.draw(st.permutations(range(n)))
    mask = af.masks.from_intervals(rows).permute(order)
    dense = mask.dense()
    assert on(mask).is_dense == np.array_equal(dense.numpy(), closure(dense))


def test_a_task_is_hashable_and_survives_pickling():
    task = tasks.butterfly([5, 6, 7])[1]
    assert task.flow.depth == 1
    assert pickle.loads(pickle.dumps(task)) == task
    assert len({task, tasks.butterfly([5, 6, 7])[1]}) == 1
    assert repr(task) == "Task(3 inputs, 1 labels, butterfly_subtask(n=3, centre=1))"


@given(relations(5), st.data())
def test_json_round_trip(allow, data):
    n = len(allow)
    small = st.integers(0, 4)
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
    task = Task(tokens, labels, af.masks.from_dense(allow))
    assert Task.from_dict(json.loads(json.dumps(task.to_dict()))) == task


@pytest.mark.parametrize("family", [tasks.butterfly([5, 6, 7]), tasks.block_two_stream([5, 6, 7, 8], 2)])
def test_json_of_families(family):
    for task in (*family, tasks.merge(family).task):
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"masks": {}}, "unknown name 'masks': did you mean mask"),
        ({"version": 2}, "reads version 1, got version 2"),
        ({"inputs": 3}, "task: inputs: expected a list, got 3"),
        ({"inputs": [{"id": 3}]}, r"inputs\[0\]: token lacks position"),
        (
            {"inputs": [{"id": 3, "position": 0, "provenence": []}]},
            "unknown name 'provenence': did you mean provenance",
        ),
        ({"inputs": ["x"]}, r"inputs\[0\]: id: expected an integer, got the text 'x'"),
        ({"labels": [{"position": 0}]}, r"labels\[0\]: label lacks target"),
        ({"labels": [{"position": 0, "target": {"id": 1, "position": 1}, "weight": "1"}]}, "weight: expected a number"),
        ({"labels": [{"position": 9, "target": {"id": 1, "position": 1}}]}, "within the 1 inputs"),
        ({"mask": {"name": "from_dense"}}, "mask: unknown mask 'from_dense'; known: attention_sink, "),
        ({"mask": {"name": "causal", "parameters": {"m": 1}}}, "mask: causal.n.: unknown name 'm'"),
        ({"mask": {"dense": [[2]]}}, r"mask.dense\[0\]\[0\]: expected 0, 1, true or false, got 2"),
        ({"mask": {}}, "a mask has one of name, intervals, dense"),
        ({"mask": "causal"}, "mask: expected a JSON object, got the text 'causal'"),
        ({"mask": {"name": "causal", "parameters": {"n": 2}}}, "as long as the inputs"),
    ],
)
def test_bad_specs(change, message):
    spec = {"inputs": [5], "labels": [], "mask": {"name": "causal", "parameters": {"n": 1}}, **change}
    with pytest.raises(ValueError, match=message):
        Task.from_dict(spec)


def test_a_spec_without_a_mask():
    with pytest.raises(ValueError, match="task lacks mask"):
        Task.from_dict({"inputs": [], "labels": []})


def test_a_label_may_be_its_tuple():
    tokens = [Token(5, 0), Token(7, 1)]
    task = Task(tokens[:1], [(0, tokens[1], 3, 0.5)], af.masks.causal(1))
    assert task.labels == (Label(0, tokens[1], task=3, weight=0.5),)
