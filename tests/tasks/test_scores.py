"""Log-probabilities of a family in one pass, against each subtask alone and against stock models."""

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

import attnflow as af
from attnflow import tasks
from attnflow.models.evaluation import precision
from attnflow.tasks.embedding import run
from tests.models import tiny

IDS = [3, 7, 11, 5, 2, 9]


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Qwen2"])
def test_two_sided_scores_are_those_of_each_token_alone(name):
    torch.manual_seed(0)
    model = tiny(name)
    family = tasks.butterfly(IDS)
    with precision(model, torch.float64):
        scores = tasks.score(model, family).log_probs
        alone = [run(model, task).log_softmax(-1)[k, IDS[k]].detach() for k, task in enumerate(family)]
    assert torch.allclose(torch.tensor(scores, dtype=torch.float64), torch.stack(alone), rtol=1e-12, atol=0)
    assert tasks.score(model, tasks.merge(family)) == tasks.score(model, family)


def test_they_are_in_the_order_of_the_labels():
    torch.manual_seed(0)
    model = tiny("Llama")
    spans = tasks.butterfly(IDS, block=2, mask_token=49)
    scores = tasks.score(model, spans).log_probs
    for number, task in enumerate(spans):
        own = run(model, task).log_softmax(-1)
        for label, score in zip(task.labels, scores[2 * number : 2 * number + 2], strict=True):
            assert float(score) == pytest.approx(float(own[label.position, label.target_id].detach()), rel=1e-6)


def test_of_a_causal_family_they_are_the_models_own_likelihood():
    torch.manual_seed(0)
    model = tiny("GPT2")
    own = model(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)[range(5), IDS[1:]]
    assert torch.allclose(
        torch.tensor(tasks.score(model, tasks.causal_lm(IDS)).log_probs, dtype=own.dtype), own.detach(), rtol=1e-6
    )


def test_of_masked_tokens_they_are_berts():
    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    model = BertForMaskedLM(config).eval()
    shown = [49 if i in (1, 4) else token for i, token in enumerate(IDS)]
    own = model(torch.tensor([shown])).logits[0].log_softmax(-1)[[1, 4], [IDS[1], IDS[4]]]
    assert torch.allclose(
        torch.tensor(tasks.score(model, tasks.masked_lm(IDS, [1, 4], 49)).log_probs, dtype=own.dtype),
        own.detach(),
        rtol=1e-5,
    )


def test_bad_input():
    with pytest.raises(ValueError, match=r"vocabulary of 50, got 77|50 entries"):
        tasks.score(tiny("Llama"), tasks.causal_lm([3, 77]))
    with pytest.raises(af.UnsupportedArchitecture):
        tasks.score(tiny("Bloom"), tasks.causal_lm(IDS))
