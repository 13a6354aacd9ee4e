"""`generate_blocks` and `infill` against the merged task, all logits, in float64."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import attnflow as af
from attnflow import tasks
from attnflow.models.passes.evaluation import precision
from attnflow.models.subject import Subject
from attnflow.tasks.embedding import run
from tests.models import tiny

MODELS = ["Llama", "GPT2", "Qwen2", "Qwen3", "Gemma2"]
MASK = 49
TEXT = [3, 7, 11, 5, 2, 9, 4, 6, 8, 13, 12, 10]
BLOCK = 3  # of a gap in it


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """The logits of every pass of the model inside, in order; passes of 2 x 4 tokens that look at it left out."""
    logits: list[torch.Tensor] = []

    def keep(_: nn.Module, __: object, output: object) -> None:
        logits.append(output.logits.detach())

    handle = model.register_forward_hook(keep)
    try:
        yield logits
    finally:
        handle.remove()


@pytest.fixture(params=MODELS)
def model(request):
    return tiny(request.param)


def written(prompt, result):
    return [*prompt, *result.tokens[0]]


def merged_logits(model, family):
    """(labelled place in the text -> logits) of the merged task."""
    task = tasks.merge(family).task
    with torch.no_grad(), precision(model, torch.float64):
        logits = run(Subject(model), task)
    return {label.data_index: logits[label.position] for label in task.labels}


def same(one, other):
    return float((one - other).abs().max()) <= 1e-12 * max(float(other.abs().max()), 1.0)


def test_one_pass_per_block_is_the_merged_task(model):
    prompt, block = [3, 7, 11, 5], 4
    with recorded(model) as passes, precision(model, torch.float64):
        result = tasks.generate_blocks(model, prompt, block, max_new_tokens=12, mask_token=MASK, eos_token=-1)
    assert result.passes == len(passes) == 3
    assert result.tokens_per_pass == 4
    text = written(prompt, result)
    expected = merged_logits(model, tasks.block_two_stream(text, block, mask_token=MASK))
    for number, logits in enumerate(passes):
        for row in range(block):
            place = len(prompt) + number * block + row
            assert same(logits[0, row], expected[place])
            assert text[place] == int(expected[place].argmax())


def test_refined_blocks_are_the_merged_tasks_of_what_was_seen(model):
    prompt, block = [3, 7, 11, 5, 2, 9], 4  # ends within a block
    with recorded(model) as passes, precision(model, torch.float64):
        result = tasks.generate_blocks(
            model, prompt, block, max_new_tokens=10, mask_token=MASK, per_pass=1, eos_token=-1
        )
    text = written(prompt, result)
    assert len(passes) == result.passes == 2 + 4 + 4
    hidden = set(range(6, 8))
    first = 4
    for logits in passes:
        if not hidden:
            first += block
            hidden = set(range(first, first + block))
        expected = merged_logits(model, tasks.block_diffusion(text, block, sorted(hidden), mask_token=MASK))
        assert all(same(logits[0, place - first - block], expected[place]) for place in hidden)  # the last rows
        surest = max(hidden, key=lambda place: float(expected[place].softmax(-1).max()))
        assert text[surest] == int(expected[surest].argmax())
        hidden.remove(surest)
    assert not hidden


@pytest.mark.parametrize("per_pass", [None, 1, 2])
def test_a_batch_gives_each_prompt_what_it_gives_alone(model, per_pass):
    several = [[3, 7, 11], [5], [2, 9, 4, 6, 8, 13, 12, 3, 7]]
    options = {"max_new_tokens": 7, "mask_token": MASK, "per_pass": per_pass, "eos_token": -1}
    together = tasks.generate_blocks(model, several, 2, **options)
    alone = [tasks.generate_blocks(model, prompt, 2, **options) for prompt in several]
    assert together.tokens == tuple(each.tokens[0] for each in alone)
    assert together.passes >= max(each.passes for each in alone)


def test_without_a_prompt_the_first_block_is_its_own_task():
    model = tiny("Llama")
    with recorded(model) as passes, precision(model, torch.float64):
        result = tasks.generate_blocks(model, [], 3, max_new_tokens=6, mask_token=MASK, eos_token=-1)
    family = tasks.block_two_stream(result.tokens[0], 3, predict_first=True, mask_token=MASK)
    expected = merged_logits(model, family)
    assert all(same(passes[place // 3][0, place % 3], expected[place]) for place in range(6))


def test_it_stops_at_the_end_of_a_text_and_at_the_limit():
    model = tiny("Llama")
    free = tasks.generate_blocks(model, [3, 7], 2, max_new_tokens=9, mask_token=MASK, eos_token=-1)
    assert len(free.tokens[0]) == 9
    assert free.passes == 5
    end = free.tokens[0][4]
    place = free.tokens[0].index(end)
    stopped = tasks.generate_blocks(model, [3, 7], 2, max_new_tokens=9, mask_token=MASK, eos_token=[end, 48])
    assert stopped.tokens[0] == free.tokens[0][: place + 1]
    assert stopped.passes == place // 2 + 1
    model.generation_config.eos_token_id = end
    assert tasks.generate_blocks(model, [3, 7], 2, max_new_tokens=9, mask_token=MASK).tokens == stopped.tokens
    nothing = tasks.generate_blocks(model, [3, 7], 2, max_new_tokens=0, mask_token=0)
    assert (nothing.tokens, nothing.passes, nothing.tokens_per_pass) == (((),), 0, 0.0)


def test_a_threshold_fills_more_at_once():
    model = tiny("Llama")
    options = {"max_new_tokens": 8, "mask_token": MASK, "per_pass": 1, "eos_token": -1}
    least = tasks.generate_blocks(model, [3, 7], 4, threshold=1.0, **options)
    most = tasks.generate_blocks(model, [3, 7], 4, threshold=0.0, **options)
    once = tasks.generate_blocks(model, [3, 7], 4, **{**options, "per_pass": 4})
    assert least.passes == 2 + 4 + 4
    assert most == once
    assert most.passes == 3


def test_drawn_tokens_follow_the_distribution():
    model = tiny("Llama")
    with recorded(model) as passes:
        tasks.generate_blocks(model, [3, 7], 1, max_new_tokens=1, mask_token=MASK)
    chances = (passes[0][0, 0].double() / 0.3).softmax(-1)
    prompts = torch.tensor([[3, 7]]).repeat(4000, 1)
    options = {"max_new_tokens": 1, "mask_token": MASK, "temperature": 0.3, "seed": 1}
    drawn = tasks.generate_blocks(model, prompts, 1, **options)
    counts = torch.bincount(torch.tensor([tokens[0] for tokens in drawn.tokens]), minlength=50)
    likely = chances > 5 / 4000
    expected = 4000 * chances
    chi_square = float(((counts - expected) ** 2 / expected)[likely].sum())
    assert chi_square < 86  # 99.9 % of chi-square with 49 degrees of freedom
    assert tasks.generate_blocks(model, prompts, 1, **options) == drawn


def test_the_model_is_as_before():
    model = tiny("GPT2").train()
    state = torch.get_rng_state()
    tasks.generate_blocks(model, [3, 7], 2, max_new_tokens=4, mask_token=0)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_eager_and_sdpa_agree():
    model = tiny("Qwen2")
    options = {"max_new_tokens": 8, "mask_token": MASK, "per_pass": 2, "eos_token": -1}
    sdpa = tasks.generate_blocks(model, [[3, 7, 5], [4]], 4, **options)
    model.set_attn_implementation("eager")
    assert tasks.generate_blocks(model, [[3, 7, 5], [4]], 4, **options) == sdpa
    model.set_attn_implementation("flex_attention")
    with pytest.raises(af.UnsupportedArchitecture, match="takes no 4D additive mask"):
        tasks.generate_blocks(model, [3, 7, 5], 4, mask_token=0)


def gaps(text, masked):
    return tasks.butterfly(text, block=BLOCK, masked=masked, mask_token=MASK)


@pytest.mark.parametrize("first", [0, 3, 6, 9])  # the gap at the start, inside, and at the end
def test_one_pass_fills_a_gap_as_the_merged_task(model, first):
    left, right = TEXT[:first], TEXT[first + BLOCK :]
    with recorded(model) as passes, precision(model, torch.float64):
        result = tasks.infill(model, left, right, BLOCK, mask_token=MASK)
    assert (result.passes, len(result.tokens[0])) == (1, BLOCK)
    expected = merged_logits(model, gaps(TEXT, None))
    assert all(same(passes[0][0, row], expected[first + row]) for row in range(BLOCK))
    assert list(result.tokens[0]) == [int(expected[first + row].argmax()) for row in range(BLOCK)]


@pytest.mark.parametrize("first", [0, 6])
def test_a_refined_gap_is_the_merged_task_of_what_was_seen(model, first):
    left, right = TEXT[:first], TEXT[first + BLOCK :]
    with recorded(model) as passes, precision(model, torch.float64):
        result = tasks.infill(model, left, right, BLOCK, mask_token=MASK, per_pass=1)
    text = [*left, *result.tokens[0], *right]
    hidden = set(range(first, first + BLOCK))
    assert len(passes) == result.passes == BLOCK
    for logits in passes:
        expected = merged_logits(model, gaps(text, sorted(hidden)))
        assert all(same(logits[0, place - first - BLOCK], expected[place]) for place in hidden)
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
