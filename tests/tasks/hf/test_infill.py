"""`infill` against the merged task, all logits, in float64."""

import pytest
import torch

from attnflow import tasks
from attnflow.models.evaluation import precision
from attnflow.tasks.embedding import run
from tests.models import tiny
from tests.tasks.hf.passes import recorded
from tests.tasks.hf.test_decoding import MASK, MODELS, same

TEXT = [3, 7, 11, 5, 2, 9, 4, 6, 8, 13, 12, 10]
BLOCK = 3


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return tiny(request.param)


def merged_logits(model, text, masked):
    task = tasks.merge(tasks.butterfly(text, block=BLOCK, masked=masked, mask_token=MASK)).task
    with torch.no_grad(), precision(model, torch.float64):
        logits = run(model, task)
    return {label.data_index: logits[label.position] for label in task.labels}


@pytest.mark.parametrize("first", [0, 3, 6, 9])  # the gap at the start, inside, and at the end
def test_one_pass_is_the_merged_task(model, first):
    left, right = TEXT[:first], TEXT[first + BLOCK :]
    with recorded(model) as passes, precision(model, torch.float64):
        result = tasks.infill(model, left, right, BLOCK, mask_token=MASK)
    assert (result.passes, len(result.tokens[0])) == (1, BLOCK)
    expected = merged_logits(model, TEXT, None)
    assert all(same(passes[0][0, row], expected[first + row]) for row in range(BLOCK))
    assert list(result.tokens[0]) == [int(expected[first + row].argmax()) for row in range(BLOCK)]


@pytest.mark.parametrize("first", [0, 6])
def test_refining_is_the_merged_task_of_what_was_seen(model, first):
    left, right = TEXT[:first], TEXT[first + BLOCK :]
    with recorded(model) as passes, precision(model, torch.float64):
        result = tasks.infill(model, left, right, BLOCK, mask_token=MASK, per_pass=1)
    text = [*left, *result.tokens[0], *right]
    hidden = set(range(first, first + BLOCK))
    assert len(passes) == result.passes == BLOCK
    for logits in passes:
        expected = merged_logits(model, text, sorted(hidden))
        assert all(same(logits[0, place - first], expected[place]) for place in hidden)
        surest = max(hidden, key=lambda place: float(expected[place].softmax(-1).max()))
        assert text[surest] == int(expected[surest].argmax())
        hidden.remove(surest)


@pytest.mark.parametrize("per_pass", [None, 2])
def test_a_batch_gives_each_gap_what_it_gives_alone(model, per_pass):
    left, right = [TEXT[:5], [], TEXT[:1]], [TEXT[7:], TEXT[:2], []]
    options = {"mask_token": MASK, "per_pass": per_pass}
    together = tasks.infill(model, left, right, 4, **options)
    alone = [tasks.infill(model, *sides, 4, **options) for sides in zip(left, right, strict=True)]
    assert together.tokens == tuple(each.tokens[0] for each in alone)


def test_verify_holds_for_spans(model):
    family = tasks.butterfly(TEXT, block=BLOCK, masked=[1, 2, 4, 6, 7, 8, 11], mask_token=MASK)
    assert tasks.verify(family, tasks.merge(family), model, tolerance=1e-11).ok
