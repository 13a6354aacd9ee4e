"""Give a model a learned bias on its attention and train the bias alone with transformers' Trainer.

Saves the bias without the model, goes on from a checkpoint, and stops at the first NaN.
"""

import copy
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import attnflow as af


class StopAtNaN(TrainerCallback):
    """Ends a run before the optimiser would take a gradient that is NaN or infinite into the weights."""

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                raise FloatingPointError(f"step {state.global_step + 1}: the gradient of {name} is not finite")


torch.manual_seed(0)
text = "shall i compare thee to a summers day thou art more lovely and more temperate "
letters = sorted(set(text))
rows = [torch.tensor([letters.index(letter) for letter in text[start:] + text[:start]]) for start in range(len(text))]
documents = [{"input_ids": row, "labels": row} for row in rows]

config = LlamaConfig(
    vocab_size=len(letters), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
)
base = LlamaForCausalLM(config)
bias = af.bias.GuidanceConfig(layers="every", hidden_dim=16)


def trainer_of(model: LlamaForCausalLM, folder: str) -> Trainer:
    """A Trainer that takes 40 steps and writes a checkpoint every 20."""
    options = TrainingArguments(
        folder,
        max_steps=40,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        logging_steps=10,
        logging_nan_inf_filter=False,  # which logs NaN as 0
        save_steps=20,
        dataloader_pin_memory=False,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, options, train_dataset=documents, callbacks=[StopAtNaN()])
    trainer.remove_callback(PrinterCallback)
    return trainer


with tempfile.TemporaryDirectory() as folder:
    model = copy.deepcopy(base)
    handle = af.bias.attach(model, bias, train="guidance")  # the base model is frozen
    print(handle)
    trainer = trainer_of(model, folder)
    trainer.train()
    for entry in trainer.state.log_history[:-1]:
        print(f"step {entry['step']}: loss {entry['loss']:.3f}")

    # A run that was killed goes on: the same model, the same bias, and the checkpoint that it left.
    again = copy.deepcopy(base)
    resumed = af.bias.attach(again, bias, train="guidance")
    trainer_of(again, folder).train(resume_from_checkpoint=f"{folder}/checkpoint-20")
    pairs = zip(handle.parameters(), resumed.parameters(), strict=True)
    print("ends with the same bias:", all(torch.equal(one, other) for one, other in pairs))

    af.bias.save(model, f"{folder}/my-bias")  # the bias alone
    loaded = copy.deepcopy(base)
    af.bias.load(loaded, f"{folder}/my-bias")
    tokens = rows[0][None]
    print("the same model:", torch.equal(loaded.eval()(tokens).logits, model.eval()(tokens).logits))

    with torch.no_grad():
        handle.parameters()[0].fill_(torch.nan)
    try:
        trainer_of(model, f"{folder}/diverged").train()
    except FloatingPointError as error:
        print("stopped at", error)
