"""Batches of row intervals on their way: worker processes, `accelerate`, a training that is resumed."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

import attnflow as af
from tests.models import tiny
from tests.tasks.training import arguments

FAMILY = partial(af.tasks.block_two_stream, block=2, mask_token=31)
SAMPLES = [[(7 * i + j) % 31 for j in range(n)] for i, n in enumerate([4, 8, 6, 8, 2 + 2, 6, 8, 4])]


def collate():
    return af.tasks.Collator(FAMILY, masks="intervals", pad_to_multiple_of=16, min_width=2)


def same(batch, other):
    return batch.keys() == other.keys() and all(torch.equal(batch[name], other[name]) for name in batch)


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.slow
def test_worker_processes_give_the_same_batches(start):
    expected = [collate()(SAMPLES[i : i + 2]) for i in range(0, 8, 2)]
    loader = DataLoader(
        SAMPLES, 2, collate_fn=collate(), num_workers=1, multiprocessing_context=start, worker_init_fn=_leave_threads
    )
    assert all(map(same, list(loader), expected))


def _leave_threads(_: int) -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_accelerate_prepares_them(dispatch, split):
    expected = [collate()(SAMPLES[i : i + 2]) for i in range(0, 8, 2)]
    options = DataLoaderConfiguration(dispatch_batches=dispatch, split_batches=split)
    loader = Accelerator(cpu=True, dataloader_config=options).prepare(DataLoader(SAMPLES, 2, collate_fn=collate()))
    assert all(map(same, list(loader), expected))


def test_a_batch_is_plain_tensors_with_the_sequences_in_front():
    batch = collate()(SAMPLES[:3])
    assert {type(value) for value in batch.values()} == {torch.Tensor}
    assert {len(value) for value in batch.values()} == {3}
    assert all(value.is_contiguous() for value in batch.values())  # what processes send one another
    assert same(copy.deepcopy(batch), batch)


class Stream(IterableDataset):
    """Samples that are made one at a time, always in the same order."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            yield {"input_ids": torch.randint(0, 31, (8,), generator=generator).tolist()}


def trained(folder, steps, resume=False):
    """Parameters after training on a stream up to a step, from the start or from the last checkpoint."""
    torch.manual_seed(0)
    model = tiny("Llama", torch.float32)
    batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    options = arguments(folder, max_steps=steps, save_strategy="steps", save_steps=2, **batches)
    more = {"data_collator": collate(), "compute_loss_func": af.tasks.loss}
    with af.masks.attach(model, "batch"):
        Trainer(model, options, train_dataset=Stream(), **more).train(resume_from_checkpoint=resume)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_a_training_on_a_stream_goes_on_where_it_stopped_bit_for_bit(tmp_path):
    expected = trained(tmp_path / "whole", 4)
    halfway = trained(tmp_path / "stopped", 2)
    resumed = trained(tmp_path / "stopped", 4, resume=True)
    assert all(torch.equal(resumed[name], parameter) for name, parameter in expected.items())
    assert not any(torch.equal(halfway[name], parameter) for name, parameter in expected.items())
