"""What merging gives families of masked autoencoders, which the hasse paper leaves open (sec. 5): docs/maths.md."""

import numpy as np
import pytest
import torch

import attnflow as af
from attnflow import tasks
from attnflow.tasks import Label, Task, Token
from tests.models import tiny

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
N = len(IDS)
MASK = 0


def autoencoder(visible, hidden, number, alone=False, steps=None):
    """Visible patches read one another, in turn if they have steps; [MASK]s read them, and one another if not alone."""
    places = [*visible, *hidden]
    step = np.array([0 if steps is None else steps[place] for place in visible] + [N] * len(hidden))
    allow = step[:, None] >= step[None, :]
    if alone:
        allow[len(visible) :, len(visible) :] = np.eye(len(hidden))
    inputs = [Token(IDS[i], i) for i in visible] + [Token(MASK, i, ()) for i in hidden]
    labels = [Label(len(visible) + at, Token(IDS[i], i), task=number) for at, i in enumerate(hidden)]
    assert len(inputs) == len(places)
    return Task(inputs, labels, af.masks.from_dense(torch.from_numpy(allow)))


def without(visible):
    return [place for place in range(N) if place not in visible]


@pytest.mark.parametrize("count", [2, 3, 9])
def test_an_encoder_that_sees_the_visible_patches_shares_nothing(count):
    """Its class is the multiset of visible patches, so tasks with other patches have other nodes throughout."""
    generator = np.random.default_rng(count)
    seen = {tuple(sorted(generator.permutation(N)[:3].tolist())) for _ in range(2 * count)}
    family = [autoencoder(visible, without(visible), number) for number, visible in enumerate(sorted(seen)[:count])]
    assert len(family) == count
    merged = tasks.merge(family)
    assert (merged.task.size, len(merged.nodes), merged.is_minimal) == (count * N, 2 * count, True)
    assert merged.task.mask.nnz == sum(task.mask.nnz for task in family)  # one block for each task
    assert tasks.check(merged.task).ok


def test_one_visible_set_serves_every_target():
    """Targets that are decoded alone share the encoder: the patches once, however many tasks."""
    visible = (0, 3, 6)
    family = [autoencoder(visible, [place], number, alone=True) for number, place in enumerate(without(visible))]
    merged = tasks.merge(family)
    assert sum(task.size for task in family) == 4 * (N - 3)
    assert (merged.task.size, len(merged.nodes), merged.is_minimal) == (N, 1 + N - 3, True)
    assert merged.task.mask == tasks.merge([autoencoder(visible, without(visible), 0, alone=True)]).task.mask


def test_visible_sets_that_grow_share_an_ordered_encoder():
    """Patches that come in chunks and read those that came before: block two-stream attention in that order."""
    chunks = [(5, 2), (0, 7), (3, 4), (1, 6)]
    steps = {place: number for number, chunk in enumerate(chunks) for place in chunk}
    family = [autoencoder(sorted(sum(chunks[:t], ())), chunks[t], t - 1, steps=steps) for t in range(1, len(chunks))]
    merged = tasks.merge(family)
    closed = af.masks.block_two_stream(len(chunks), 2)
    assert (merged.task.size, len(merged.nodes), merged.is_minimal) == (2 * (N - 2), 2 * (len(chunks) - 1), True)
    assert merged.task.mask.nnz == closed.nnz
    assert tasks.check(merged.task).ok
    assert tasks.verify(family, merged, tiny("Llama", vocab_size=16), tolerance=1e-12).ok
