import numpy as np
import pytest
import torch

import attnflow as af
from attnflow import tasks
from attnflow.tasks import Label, Token

IDS = [11, 12, 13, 14, 15, 16]
DATA = [Token(id, i) for i, id in enumerate(IDS)]


def blank(i: int, id: int = 0) -> Token:
    return Token(id, i, ())


def test_causal():
    family = tasks.causal_lm(IDS)
    assert len(family) == 5
    for k, task in enumerate(family):
        assert task.inputs == tuple(DATA[: k + 1])
        assert task.labels == (Label(k, DATA[k + 1], task=k),)
        assert task.mask == af.masks.causal(k + 1)


def test_multi_token():
    family = tasks.multi_token_prediction(IDS, 3)
    predicted = [[label.data_index for label in task.labels] for task in family]
    assert predicted == [[1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5], [5]]
    assert tasks.multi_token_prediction(IDS, 1) == tasks.causal_lm(IDS)
    merged = tasks.merge(family).task
    assert merged.mask == af.masks.causal(5)
    heads = [[e.data_index - e.position - 1 for e in merged.labels if e.position == p] for p in range(5)]
    assert heads == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1], [0]]


@pytest.mark.parametrize("predict_first", [False, True])
def test_block_generation(predict_first):
    family = tasks.block_two_stream(IDS, 2, predict_first, mask_token=99)
    for number, k in enumerate(range(0 if predict_first else 1, 3)):
        task = family[number]
        assert task.inputs == (*DATA[: 2 * k], blank(2 * k, 99), blank(2 * k + 1, 99))
        assert task.labels == tuple(Label(i, DATA[i], task=number) for i in (2 * k, 2 * k + 1))
        assert task.mask == af.masks.block_causal(2 * k + 2, 2)
    assert len(family) == 2 + predict_first


def test_butterfly():
    family = tasks.butterfly(IDS)
    for k, task in enumerate(family):
        around = [i for i in (k - 1, k + 1) if 0 <= i < 6]
        average = Token([IDS[i] for i in around], k, around)
        assert task.inputs == (*DATA[:k], average, *DATA[k + 1 :])
        assert task.labels == (Label(k, DATA[k], task=k),)
        i, j = np.meshgrid(np.arange(6), np.arange(6), indexing="ij")
        allow = ((j <= i) & (i <= k)) | ((k <= i) & (i <= j))
        assert task.mask == af.masks.from_dense(torch.from_numpy(allow))


def test_masked_lm():
    (task,) = tasks.masked_lm(IDS, [4, 1], mask_token=99)
    assert task.inputs == (DATA[0], blank(1, 99), DATA[2], DATA[3], blank(4, 99), DATA[5])
    assert task.labels == (Label(1, DATA[1]), Label(4, DATA[4]))
    assert task.mask == af.masks.full(6)


def test_permutation_lm():
    order = [3, 0, 5, 1, 4, 2]
    family = tasks.permutation_lm(IDS, order, mask_token=0)
    for t, task in enumerate(family):
        seen = sorted(order[: t + 1])
        assert [token.position for token in task.inputs] == seen
        assert [token for token in task.inputs if not token.provenance] == [blank(order[t])]
        assert task.labels == (Label(seen.index(order[t]), DATA[order[t]], task=t),)
        steps = [order.index(place) for place in seen]
        expected = torch.tensor([[steps[k] <= steps[q] for k in range(t + 1)] for q in range(t + 1)])
        assert task.mask == af.masks.from_dense(expected)


def test_block_diffusion():
    family = tasks.block_diffusion(IDS, 2, masked=[1, 4, 5], mask_token=0)
    assert [task.size for task in family] == [2, 6]  # block 1 has nothing to predict
    assert family[0].inputs == (DATA[0], blank(1))
    assert family[1].inputs == (*DATA[:4], blank(4), blank(5))
    assert family[1].labels == (Label(4, DATA[4], task=1), Label(5, DATA[5], task=1))
    assert tasks.block_diffusion(IDS, 2, mask_token=0) == tasks.block_two_stream(
        IDS, 2, predict_first=True, mask_token=0
    )


@pytest.mark.parametrize("tokens", [np.array(IDS), torch.tensor(IDS), tuple(IDS)])
def test_token_ids_of_any_kind(tokens):
    assert tasks.causal_lm(tokens) == tasks.causal_lm(IDS)
    assert tasks.butterfly(tokens) == tasks.butterfly(IDS)


def test_butterfly_of_blocks():
    family = tasks.butterfly(IDS, block=2, mask_token=99)
    for number, k in enumerate((0, 2, 4)):
        task = family[number]
        assert task.inputs == (*DATA[:k], blank(k, 99), blank(k + 1, 99), *DATA[k + 2 :])
        assert task.labels == tuple(Label(i, DATA[i], task=number) for i in (k, k + 1))
        i, j = np.meshgrid(np.arange(6), np.arange(6), indexing="ij")
        centre = (i >= k) & (i < k + 2)
        allowed = ((i < k) & (j <= i)) | ((i >= k + 2) & (j >= i)) | centre
        assert np.array_equal(task.mask.dense().numpy(), allowed)
    merged = tasks.merge(family)
    assert merged.task.size == 2 * (6 - 2) + 6
    assert tasks.check(merged).ok
    assert tasks.check(merged).unsupervised == ()


def test_partly_masked_spans_keep_what_is_seen():
    first, last = tasks.butterfly(IDS[:4], block=2, masked=[1, 2, 3], mask_token=99)
    assert first.inputs == (DATA[0], blank(1, 99), DATA[2], DATA[3])
    assert [label.data_index for label in (*first.labels, *last.labels)] == [1, 2, 3]


@pytest.mark.parametrize("name", ["block_diffusion", "butterfly"])
def test_drawn_places_weigh_one_over_their_number(name):
    family = getattr(tasks, name)
    counts = []
    for _ in range(300):
        for task in family(range(12), block=4, masked="random", mask_token=99):
            places = [label.position for label in task.labels]
            assert {label.weight for label in task.labels} == {1 / len(places)}
            assert all(label.data_index == label.position for label in task.labels)
            counts.append(len(places))
    share = np.bincount(counts, minlength=5)[1:] / len(counts)
    assert len(counts) == 900
    assert np.abs(share - 1 / 4).max() < 4 * np.sqrt(3 / 16 / 900)  # four standard deviations of a share of 1/4
    assert tasks.check(tasks.merge(family(range(12), block=4, masked="random", mask_token=99))).ok
