"""Modular models train: with Trainer, from a checkpoint on, with gradient checkpointing, under LoRA and accelerate."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from attnflow.knowledge import ModularForCausalLM
from tests.models import modular, tokens

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft")  # about their own names

TEXT = torch.tensor([3 + (i * i + 3 * i) % 11 for i in range(8 * 12)]).view(8, 12)  # a rule that a model can find
DATA = [{"input_ids": row, "labels": row} for row in TEXT]


@pytest.mark.parametrize("form", [{}, {"entries_per_token": 4}, {"gated": True, "threshold": "coordinate"}], ids=str)
def test_trainer_lowers_the_loss(form, tmp_path):
    model = modular(torch.float32, disturbed=False, initializer_range=0.1, **form).train()
    options = {"max_steps": 30, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": []}
    arguments = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, use_cpu=True, seed=3, **options)
    made = Trainer(model, arguments, train_dataset=DATA)
    made.train()
    curve = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert sum(curve[-5:]) < 0.6 * sum(curve[:5])


@pytest.mark.parametrize("entries_per_token", [None, 4])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant, entries_per_token):
    """Also for entries of the call that are computed from something: an encoder is trained through every block."""
    gradients = []
    for checkpointing in (False, True):
        model, ids = modular(entries_per_token=entries_per_token).train(), tokens().fill_(7)
        given = torch.randn(9, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        for entries in (None, given.square()):
            model(input_ids=ids, labels=ids, use_cache=False, entries=entries).loss.backward()
        gradients.append([given.grad, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


def test_lora_beside_a_trained_base(tmp_path):
    model, ids = modular(torch.float32, pad_token_id=None), tokens()
    expected = model(input_ids=ids).logits.detach()
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["knowledge"], task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    torch.testing.assert_close(adapted(input_ids=ids).logits, expected, rtol=0, atol=0)
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert sum("lora" in name for name in trained) == 8
    assert [name for name in trained if "lora" not in name] == [
        "base_model.model.model.knowledge.modules_to_save.default.entries"
    ]
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    for _ in range(3):
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = adapted(input_ids=ids).logits.detach()
    assert (moved - expected).abs().max() > 1e-2
    out = adapted.generate(input_ids=ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert out.shape == (2, 10)
    adapted.save_pretrained(tmp_path)
    again = get_peft_model(modular(torch.float32, pad_token_id=None), config)
    again.load_adapter(str(tmp_path), "default")
    torch.testing.assert_close(again(input_ids=ids).logits, moved, rtol=1e-5, atol=1e-5)
    merged = again.merge_and_unload()
    assert type(merged) is ModularForCausalLM
    torch.testing.assert_close(merged(input_ids=ids).logits, moved, rtol=1e-4, atol=1e-4)
