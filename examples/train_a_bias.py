"""Give a model a learned bias on its attention, train the bias alone with Trainer, save it, put it on a second copy."""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback

import attnflow as af

torch.manual_seed(0)
text = "shall i compare thee to a summers day thou art more lovely and more temperate "
letters = sorted(set(text))
documents = [[letters.index(letter) for letter in text[start:] + text[:start]] for start in range(0, len(text), 7)]

config = LlamaConfig(
    vocab_size=len(letters), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
)
base = LlamaForCausalLM(config)
model = copy.deepcopy(base)
print(af.bias.attach(model, af.bias.GuidanceConfig(layers="every", hidden_dim=16), train="guidance"))

settings = af.bias.TrainingConfig(steps=40, batch_size=4, learning_rate=1e-2, log_every=10, save_every=0)
# Documents stay apart in a row.
trainer = af.bias.trainer(model, documents, settings, "checkpoints", length=39, disable_tqdm=True)
trainer.remove_callback(PrinterCallback)
trainer.train()
for entry in trainer.state.log_history[:-1]:
    sizes = ", ".join(f"{value:.3f}" for name, value in entry.items() if name.startswith("bias/"))
    print(f"step {entry['step']}: loss {entry['loss']:.3f}, |B| by layer {sizes}")

af.bias.save(model, "my-bias")  # the bias alone
af.bias.load(base, "my-bias")
tokens = torch.tensor([documents[0]])
print("the same model:", torch.equal(base(tokens).logits, model.eval()(tokens).logits))
