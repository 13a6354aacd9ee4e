import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnflow.tasks.prefixes import Batch, Cost, labels_of_pads, plan

COSTS = [Cost(1.0, 0.0, 1.0), Cost(10.0, 1.0, 1.0), Cost(0.0, 1.0, 0.0)]


@st.composite
def batches(draw):
    rows, length = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    table = st.lists(st.lists(st.integers(0, 1), min_size=length, max_size=length), min_size=rows, max_size=rows)
    ids, real = (np.array(draw(table), np.int64) for _ in range(2))
    labels = np.array(draw(table)) * 2 + np.array(draw(table)) - 100 * np.array(draw(table))
    labels[labels < 0] = -100
    before = np.zeros_like(real)
    before[:, 1:] = real[:, :-1]
    labels[before == 0] = -100
    start = draw(st.integers(0, 3))
    positions = np.broadcast_to(np.arange(start, start + length), ids.shape)
    return Batch(ids, real.astype(bool), positions, labels if draw(st.booleans()) else None, draw(st.booleans()))


@given(batches(), st.sampled_from(COSTS), st.booleans(), st.none() | st.integers(1, 8))
def test_every_token_sees_what_it_saw_in_its_row(batch, cost, one_row, window):
    chosen = plan(batch, cost, one_row)
    if not batch.real.any():
        assert chosen is None
        return
    rows, width = chosen.shape
    allowed = chosen.allowed(window)
    assert (chosen.place >= 0).tolist() == batch.real.tolist()
    assert chosen.tokens == batch.real.sum()
    assert not one_row or rows == 1
    if rows == 1:
        assert np.array_equal(chosen.mask(window).dense().numpy(), allowed[0])
    for row, column in zip(*np.nonzero(batch.real), strict=True):
        place = int(chosen.place[row, column])
        at, slot = divmod(place, width)
        assert chosen.ids.flat[place] == batch.ids[row, column]
        assert chosen.positions.flat[place] == batch.positions[row, column]
        seen = [k for k in range(column + 1) if batch.real[row, k] and (window is None or column - k < window)]
        assert sorted(chosen.place[row, seen] % width) == np.flatnonzero(allowed[at, slot]).tolist()


@given(batches(), st.sampled_from(COSTS), st.booleans())
def test_every_label_stands_once_after_a_slot_of_its_token(batch, cost, one_row):
    chosen = plan(batch, cost, one_row)
    if chosen is None or batch.labels is None:
        assert chosen is None or (chosen.labels is None and chosen.label_place is None)
        return
    _, width = chosen.shape
    allowed, used = chosen.allowed(), []
    for row, column in zip(*np.nonzero(batch.labels[:, 1:] != -100), strict=True):
        at, slot = divmod(int(chosen.label_place[row, column]), width - 1)
        used.append((at, slot))
        assert chosen.labels[at, slot + 1] == batch.labels[row, column + 1]
        assert chosen.ids[at, slot] == batch.ids[row, column]
        assert chosen.positions[at, slot] == batch.positions[row, column]
        node = int(chosen.place[row, column]) % width
        assert allowed[at, slot, slot]
        assert set(np.flatnonzero(allowed[at, slot])) - {slot} == set(np.flatnonzero(allowed[at, node])) - {node}
    assert len(set(used)) == len(used) == (chosen.labels != -100).sum() == (chosen.label_place >= 0).sum()


def test_a_label_that_a_pad_predicts():
    real = np.array([[False, True, True]])
    assert labels_of_pads(real, np.array([[-100, 5, 6]]))
    assert not labels_of_pads(real, np.array([[-100, -100, 6]]))


def test_ids_that_do_not_fit():
    ids = np.array([[2**62, -(2**62)]])
    with pytest.raises(ValueError, match="more than 64 bits"):
        Batch(ids, ids == ids, np.array([[0, 1]])).keys()
