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
    assert [[label.data_index for label in task.labels] for task in family] == [
        [1, 2, 3],
        [2, 3, 4],
        [3, 4, 5],
        [4, 5],
        [5],
    ]
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
    family = tasks.permutation_lm(IDS, order)
    for t, task in enumerate(family):
        seen = sorted(order[: t + 1])
        assert [token.position for token in task.inputs] == seen
        assert [token for token in task.inputs if not token.provenance] == [blank(order[t])]
        assert task.labels == (Label(seen.index(order[t]), DATA[order[t]], task=t),)
        steps = [order.index(place) for place in seen]
        expected = torch.tensor([[steps[k] <= steps[q] for k in range(t + 1)] for q in range(t + 1)])
        assert task.mask == af.masks.from_dense(expected)


def test_block_diffusion():
    family = tasks.block_diffusion(IDS, 2, masked=[1, 4, 5])
    assert [task.size for task in family] == [2, 6]  # block 1 has nothing to predict
    assert family[0].inputs == (DATA[0], blank(1))
    assert family[1].inputs == (*DATA[:4], blank(4), blank(5))
    assert family[1].labels == (Label(4, DATA[4], task=1), Label(5, DATA[5], task=1))
    assert tasks.block_diffusion(IDS, 2) == tasks.block_two_stream(IDS, 2, predict_first=True)


@pytest.mark.parametrize("tokens", [np.array(IDS), torch.tensor(IDS), tuple(IDS)])
def test_token_ids_of_any_kind(tokens):
    assert tasks.causal_lm(tokens) == tasks.causal_lm(IDS)
    assert tasks.butterfly(tokens) == tasks.butterfly(IDS)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tasks.causal_lm([]), "at least 2 tokens, got 0"),
        (lambda: tasks.causal_lm([5]), "at least 2 tokens, got 1"),
        (lambda: tasks.butterfly([5]), "at least 2 tokens, got 1"),
        (lambda: tasks.block_two_stream([], 2), "at least 1 tokens, got 0"),
        (lambda: tasks.block_two_stream([5, 6], 2), "at least 2 blocks, got 2 tokens in 1 block of 2"),
        (lambda: tasks.block_two_stream(IDS, 4), "multiple of block = 4, got 6; pad to 8"),
        (lambda: tasks.block_two_stream(IDS, 0), "block must be at least 1, got 0"),
        (lambda: tasks.block_diffusion(IDS, 4), "multiple of block = 4"),
        (lambda: tasks.block_diffusion(IDS, 2, masked=[]), "at least one place"),
        (lambda: tasks.masked_lm(IDS, []), "at least one place"),
        (lambda: tasks.masked_lm(IDS, [1, 1]), "each once"),
        (lambda: tasks.masked_lm(IDS, [6]), r"positions in \[0, 6\), got 6"),
        (lambda: tasks.masked_lm(IDS, [1], mask_token=-1), "mask_token must be at least 0, got -1"),
        (lambda: tasks.multi_token_prediction(IDS, 0), "horizon must be at least 1, got 0"),
        (lambda: tasks.permutation_lm(IDS, [0, 1]), r"permutation of range\(6\)"),
        (lambda: tasks.permutation_lm([], []), "at least 1 tokens"),
        (lambda: tasks.causal_lm(np.array([[1, 2], [3, 4]])), "one-dimensional"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("tokens", [[1.5, 2.5], "ab", 5])
def test_token_ids_must_be_integers(tokens):
    with pytest.raises((TypeError, ValueError)):
        tasks.causal_lm(tokens)
