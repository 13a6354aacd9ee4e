from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

import attnflow as af
from attnflow import tasks
from attnflow.tasks import Label, Task, Token
from tests.models import tiny
from tests.models.table import AUDITED

IDS = [3, 1, 4, 1, 5, 9, 2, 6]  # with a token that stands twice
FAMILIES = {
    "causal": tasks.causal_lm(IDS),
    "block two-stream": tasks.block_two_stream(IDS, 2, mask_token=0),
    "block two-stream with the first block": tasks.block_two_stream(IDS, 4, predict_first=True, mask_token=15),
    "butterfly": tasks.butterfly(IDS),
    "permutation": tasks.permutation_lm(IDS, [3, 1, 7, 0, 5, 2, 6, 4], mask_token=0),
    "multi-token": tasks.multi_token_prediction(IDS, 3),
    "masked": tasks.masked_lm(IDS, [1, 4], mask_token=0),
    "block diffusion": tasks.block_diffusion(IDS, 2, masked=[1, 3, 6, 7], mask_token=0),
    "spans": tasks.butterfly(IDS, block=2, masked=[1, 2, 4, 6, 7], mask_token=15),
    "mixed": (*tasks.butterfly(IDS[:5]), *tasks.causal_lm(IDS), *tasks.masked_lm(IDS, [2], mask_token=0)),
}


def llama(**options: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return tiny("Llama", num_hidden_layers=4, vocab_size=16, **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_llama_in_double_precision(name):
    family = FAMILIES[name]
    merged = tasks.merge(family)
    result = tasks.verify(family, merged, llama(), tolerance=1e-12)
    assert result.output_difference < 1e-12
    assert result.gradient_difference < 1e-12
    assert result.loss_difference < 1e-12
    assert result.ok
    assert [each.task for each in result.tasks] == list(range(len(family)))
    assert result.merged_loss == pytest.approx(sum(each.loss for each in result.tasks), rel=1e-12)


@pytest.mark.parametrize(
    "model",
    [
        lambda: llama(attn_implementation="eager"),
        lambda: tiny("GPT2"),
        lambda: AUDITED["Bert"].make(hidden_dropout_prob=0.5).double(),
        lambda: tiny("Mistral", sliding_window=3),
    ],
    ids=["llama eager", "gpt2", "bert with dropout", "mistral with a window"],
)
@pytest.mark.parametrize("name", ["block two-stream", "butterfly"])
def test_other_models(model, name):
    """Causal and bidirectional; the 4D mask replaces a model's own, also its sliding window."""
    family = FAMILIES[name]
    assert tasks.verify(family, tasks.merge(family), model(), tolerance=1e-12).ok


def test_the_printed_eq_58_fails():
    family = FAMILIES["butterfly"]
    merged = tasks.merge(family)
    printed = Task(merged.task.inputs, merged.task.labels, tasks.families.butterfly_as_printed(len(IDS)))
    result = tasks.verify(family, replace(merged, task=printed), llama())
    assert result.output_difference > 0.1
    assert result.gradient_difference > 0.1
    assert not replace(result, tolerance=1e-3).ok
    assert "largest relative difference of outputs" in str(result)
    wrong = [each.output_difference > 1e-2 for each in result.tasks]
    assert wrong == [True] * (len(IDS) - 1) + [False]  # n - 1 of n subtasks
    assert result.tasks[-1].output_difference < 1e-12


def test_the_reference_is_an_ordinary_forward_pass():
    """Not merely self-consistent: a causal family gives what the model gives on the plain sequence."""
    model = llama()
    family = tasks.causal_lm(IDS)
    result = tasks.verify(family, tasks.merge(family), model)
    logits = model(torch.tensor([IDS[:-1]])).logits[0]
    expected = F.cross_entropy(logits, torch.tensor(IDS[1:]), reduction="sum")
    assert result.merged_loss == pytest.approx(float(expected.detach()), rel=1e-5)  # HF's norms compute in float32


def test_lost_labels_show_in_the_gradients():
    family = FAMILIES["causal"]
    merged = tasks.merge(family)
    bare = replace(merged, task=Task(merged.task.inputs, [], merged.task.mask))
    result = tasks.verify(family, bare, llama())
    assert result.output_difference < 1e-12
    assert result.gradient_difference == pytest.approx(1.0)


def labels_changed(labels, change):
    """One label of many is another one, gone, of another weight, of another position, or there twice."""
    first, rest = labels[3], [*labels[:3], *labels[4:]]
    if change == "dropped":
        return rest
    if change == "wrong":
        return [replace(first, target=Token((first.target_id + 1) % 16, 0, ())), *rest]
    if change == "reweighted":
        return [replace(first, weight=first.weight * 1.001), *rest]
    if change == "of another subtask":
        return [replace(first, task=first.task + 1), *rest]
    return [first, first, *rest]


@pytest.mark.parametrize("change", ["dropped", "wrong", "reweighted", "of another subtask", "doubled"])
@pytest.mark.parametrize("double", [True, False])
def test_changed_labels_are_not_ok_without_gradients(change, double):
    family = [task for _ in range(3) for task in tasks.block_two_stream(IDS, 2, mask_token=0)]
    merged = tasks.merge(family)
    model = llama() if double else llama().float()
    assert tasks.verify(family, merged, model, gradients=False).ok
    changed = Task(merged.task.inputs, labels_changed(merged.task.labels, change), merged.task.mask)
    result = tasks.verify(family, replace(merged, task=changed), model, gradients=False)
    assert not result.ok
    assert result.output_difference <= result.tolerance < result.loss_difference


def test_labels_of_a_subtask_that_has_none():
    with_labels, without = FAMILIES["butterfly"][:2]
    without = Task(without.inputs, [], without.mask)
    merged = tasks.merge([with_labels, without])
    more = [*merged.task.labels, replace(merged.task.labels[0], task=1)]
    changed = replace(merged, task=Task(merged.task.inputs, more, merged.task.mask))
    result = tasks.verify([with_labels, without], changed, llama(), gradients=False)
    assert result.loss_difference == float("inf")
    assert not result.ok


def test_single_precision_without_gradients():
    family = FAMILIES["butterfly"]
    result = tasks.verify(family, tasks.merge(family), llama().float(), gradients=False)
    assert result.gradient_difference is None
    assert 0 < result.output_difference < 1e-4
    assert result.tolerance == pytest.approx(3.45e-4, rel=0.01)
    assert replace(result, tolerance=1e-4).ok
    assert "gradients not compared" in str(result)


def test_the_model_is_left_as_it_was():
    model = llama()
    model.train()
    model.model.norm.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    family = FAMILIES["causal"]
    tasks.verify(family, tasks.merge(family), model)
    assert model.training
    assert not model.model.norm.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_nan_is_never_ok():
    model = llama()
    with torch.no_grad():
        model.lm_head.weight[3, 3] = float("nan")
    family = FAMILIES["causal"]
    assert not tasks.verify(family, tasks.merge(family), model, tolerance=1.0).ok


def test_subtasks_without_labels_are_passed_over():
    family = [Task([Token(3, 0)], [], af.masks.causal(1)), *tasks.causal_lm(IDS)]
    result = tasks.verify(family, tasks.merge(family), llama())
    assert [each.task for each in result.tasks] == list(range(1, len(family)))
    assert replace(result, tolerance=1e-12).ok


def test_labels_of_one_task_that_share_a_merged_position_add_up():
    inputs, mask = [Token(1, 0), Token(1, 0)], af.masks.from_edges([(0, 0), (1, 1)], 2)
    family = [Task(inputs, [Label(0, Token(3, 2, ())), Label(1, Token(4, 2, ()), weight=0.5)], mask)]
    merged = tasks.merge(family)
    assert merged.task.size == 1
    assert tasks.verify(family, merged, llama(), tolerance=1e-12).ok
