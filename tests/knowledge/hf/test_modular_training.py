"""Modular models train: with Trainer, from a checkpoint on, with gradient checkpointing, under LoRA and accelerate."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from attnflow.knowledge import ModularForCausalLM
from tests.knowledge.sources import indexed
from tests.models import modular, tokens

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft")  # about their own names

TEXT = torch.tensor([3 + (i * i + 3 * i) % 11 for i in range(8 * 12)]).view(8, 12)  # a rule that a model can find
DATA = [{"input_ids": row, "labels": row} for row in TEXT]


def trainer(folder, steps=40, callbacks=(), model=None, **form):
    model = model or modular(torch.float32, disturbed=False, initializer_range=0.1, **form).train()
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=5,
        save_strategy="steps",
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        seed=3,
        dataloader_pin_memory=False,
    )
    return Trainer(model, arguments, train_dataset=DATA, callbacks=list(callbacks))


def losses(made):
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 6


@pytest.mark.parametrize(
    "form",
    [{}, {"entries_per_token": 4}, {"gated": True, "threshold": "coordinate", "knowledge_activation": "silu"}],
    ids=str,
)
@pytest.mark.slow
def test_the_loss_falls_and_training_goes_on_from_a_checkpoint(form, tmp_path):
    whole = trainer(tmp_path / "whole", **form)
    whole.train()
    curve = losses(whole)
    assert sum(curve[-5:]) < 0.5 * sum(curve[:5])
    stopped = trainer(tmp_path / "parts", callbacks=[Stop()], **form)
    stopped.train()
    assert stopped.state.global_step == 6
    model = ModularForCausalLM.from_pretrained(tmp_path / "parts" / "checkpoint-5")
    resumed = trainer(tmp_path / "parts", model=model)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-5"))
    assert losses(resumed) == curve
    for name, value in resumed.model.named_parameters():
        assert torch.equal(value, whole.model.get_parameter(name)), name


@pytest.mark.parametrize("entries_per_token", [None, 4])
def test_every_parameter_is_trained(entries_per_token):
    model, ids = modular(entries_per_token=entries_per_token).train(), tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("entries_per_token", [None, 4])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant, entries_per_token):
    """Also for entries of the call that are computed from something: an encoder is trained through every block."""
    found = []
    for checkpointing in (False, True):
        model, ids = modular(entries_per_token=entries_per_token).train(), tokens().fill_(7)
        given = torch.randn(9, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        for entries in (None, given.square()):
            model(input_ids=ids, labels=ids, use_cache=False, entries=entries).loss.backward()
        found.append([given.grad, *(parameter.grad for parameter in model.parameters())])
    for plain, checkpointed in zip(*found, strict=True):
        torch.testing.assert_close(checkpointed, plain, rtol=1e-6, atol=1e-9)


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


def test_lora_on_the_readers_own_projections():
    """They are parameters with a dimension of heads, which LoRA takes by `target_parameters`."""
    model = modular(torch.float32, num_knowledge_heads=1)
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["reader.attention.value"])
    adapted, ids = get_peft_model(model, config), tokens()
    adapted(input_ids=ids, labels=ids).loss.backward()
    trained = {name for name, p in adapted.named_parameters() if p.grad is not None and "reader" in name}
    assert trained
    assert all("lora" in name for name in trained)


def test_autocast():
    model, ids = modular(torch.float32, entries_per_token=6), tokens()
    expected = model(input_ids=ids, labels=ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for training in (False, True):
            found = model.train(training)(input_ids=ids, labels=ids)
            assert abs(found.loss.item() - expected.loss.item()) < 0.2
            found.loss.backward()
        source = indexed(model.readers(), model.knowledge.entries)
        assert bool(model(input_ids=ids, entries=source).logits.isfinite().all())
    assert all(p.grad.dtype == torch.float32 and bool(p.grad.isfinite().all()) for p in model.parameters())
