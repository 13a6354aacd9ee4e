"""Train every subtask of Butterfly attention in one forward pass per sample, with labels proved not to leak."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnflow as af

torch.manual_seed(0)
text = "shall i compare thee to a summers day thou art more lovely and more temperate "
letters = sorted(set(text))
tokens = torch.tensor([letters.index(letter) for letter in text])
samples = [tokens[start : start + 12].tolist() for start in range(0, len(tokens) - 12, 4)]

# A family is a list of tasks; merged, one sequence and one mask train them all.
family = af.tasks.butterfly(samples[0])
merged = af.tasks.merge(family)
print(merged)
report = af.tasks.check(merged)
report.raise_if_leaks()
print(report)

config = LlamaConfig(
    vocab_size=len(letters), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
)
model = LlamaForCausalLM(config)
print(af.tasks.verify(family, merged, model.double()))  # the merged task against every subtask alone

model.float()
af.tasks.average_embeddings(model)  # butterfly replaces a token by the mean of its neighbours
collate = af.tasks.Collator(af.tasks.butterfly)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(30):
    batch = collate(samples)
    labels = batch.pop("labels")
    loss = af.tasks.loss(model(**batch), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.3f}")
