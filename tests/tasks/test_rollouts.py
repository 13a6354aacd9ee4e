from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

import attnflow as af
from attnflow import tasks
from attnflow.models.passes.evaluation import precision
from attnflow.tasks import Collator, Label, Task, Token
from tests.tasks.test_collator import logits, model

DOUBLE = torch.float64
PROMPTS = [[1, 2, 3], [1, 2, 3], [1, 2, 7], [4]]
RESPONSES = [[5, 6, 7], [5, 8], [5, 8], [9]]
ADVANTAGES = [1.5, -0.5, [0.25, -2.0], 1.0]


@pytest.fixture
def learner() -> Iterator[LlamaForCausalLM]:
    """In float64 throughout: also what the model's code would convert to float32."""
    made = model().double()
    with precision(made, DOUBLE):
        yield made


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal but for rounding in float64."""
    difference = (one - other).detach().abs().max()
    return bool(difference < 1e-12 * other.detach().abs().max())


def alone(learner: LlamaForCausalLM, prompt: list[int], response: list[int]) -> torch.Tensor:
    """The log-probability of each token of a response, stock: one sequence, shifted by one."""
    logits = learner(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0]
    scores = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
    return scores[torch.arange(len(response)), response]


def gradients(learner: LlamaForCausalLM, loss: torch.Tensor) -> torch.Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(learner.parameters()))])


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    token = st.integers(1, 3)
    count = draw(st.integers(1, 5))
    prompts = [draw(st.lists(token, min_size=1, max_size=4)) for _ in range(count)]
    responses = [draw(st.lists(token, max_size=4)) for _ in range(count)]
    return prompts, responses if any(responses) else [[1]] * count


@given(groups())
@settings(max_examples=300)
def test_any_group_is_its_tree_depth_first(group):
    """One position for each distinct beginning that is read; what reads it stands right behind it, in one stretch."""
    prompts, responses = group
    family = tasks.rollouts(prompts, responses)
    merged = tasks.merge(family)
    beginnings = {
        tuple((prompt + response)[: i + 1])
        for prompt, response in zip(prompts, responses, strict=True)
        for i in range(len(prompt) + len(response) - 1)
        if response
    }
    assert merged.task.size == len(beginnings)
    assert merged.is_minimal
    assert merged.embeds(family).ok
    allow = merged.task.mask.dense().numpy()
    for position in range(merged.task.size):
        readers = np.flatnonzero(allow[:, position])
        assert readers.tolist() == list(range(position, position + len(readers)))
    assert len(merged.task.labels) == sum(map(len, responses))
    assert tasks.check(merged).ok


def test_signed_weights_are_the_policy_gradient(learner):
    """Advantages as weights: the summed loss is - sum of advantage x log-probability, and so are its gradients."""
    sample = {"prompts": PROMPTS, "responses": RESPONSES, "weights": ADVANTAGES}
    batch = Collator(tasks.rollouts, dtype=DOUBLE)([sample])
    merged = tasks.loss(logits(learner, batch), batch, reduction="sum")
    terms = [alone(learner, p, r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    stock = -sum((torch.tensor(a, dtype=DOUBLE) * t).sum() for a, t in zip(ADVANTAGES, terms, strict=True))
    assert close(merged, stock)
    assert close(gradients(learner, merged), gradients(learner, stock))


def test_prompts_numbered_apart_are_told():
    """The same prompt with data numbers of its own in each rollout: nothing is shared, and the merged task says so."""

    def rollout(number: int, first: int) -> Task:
        data = [Token(id, i, (first + i if i < 3 else 100 * number + i,)) for i, id in enumerate([1, 2, 3, number, 9])]
        return Task(data[:-1], [Label(i - 1, data[i], number) for i in (3, 4)], af.masks.causal(4))

    apart, shared = (tasks.merge([rollout(i, 10 * i * alone) for i in (1, 2)]) for alone in (True, False))
    assert (apart.task.size, shared.task.size) == (8, 5)
    assert "no position is shared: two tokens are one input only if ids, position and provenance agree" in str(apart)
    assert "no position is shared" not in str(shared)
    assert tasks.merge(tasks.rollouts([1, 2, 3], [[1, 9], [2, 9]])).task.size == 5


def test_empty_responses_train_nothing():
    family = tasks.rollouts([1, 2], [[], [3, 4], []], weights=[5.0, 1.0, 2.0])
    assert [task.size for task in family] == [0, 3, 0]
    assert [len(task.labels) for task in family] == [0, 2, 0]
    merged = tasks.merge(family)
    assert merged.task.size == 3
    assert [(e.task, e.weight) for e in merged.task.labels] == [(1, 1.0)] * 2


def test_tensors_and_arrays_are_welcome():
    plain = tasks.rollouts([1, 2], [[3, 4], [3, 5]], weights=[1.0, [2.0, 3.0]])
    made = tasks.rollouts(
        torch.tensor([1, 2]),
        [np.array([3, 4]), torch.tensor([3, 5])],
        weights=[torch.tensor(1.0), torch.tensor([2.0, 3.0], requires_grad=True)],
    )
    assert made == plain
    assert tasks.rollouts(torch.tensor([[1, 2], [1, 2]]), torch.tensor([[3, 4], [3, 5]])) == tasks.rollouts(
        [1, 2], [[3, 4], [3, 5]]
    )
