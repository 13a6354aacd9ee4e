"""Plant a leak in a model that no mask shows, and let the audit find where it enters."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import attnflow as af

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
model = LlamaForCausalLM(config).eval()
tokens = torch.randint(0, 64, (1, 24))
print("as it came:", "clean" if af.audit.check(model, tokens).ok else "leaks")


class NormOverTheSequence(nn.Module):
    """A normalisation whose statistics are taken over all positions, the future included."""

    def forward(self, hidden):
        return hidden / hidden.pow(2).mean(dim=(-1, -2), keepdim=True).add(1e-6).sqrt()


model.model.layers[1].post_attention_layernorm = NormOverTheSequence()
report = af.audit.check(model, tokens)
first = report.violations[0]
print(f"after the change: {len(report.violations)} violations")
print(f"the first is in layer {first.layer}, module {first.module}: position {first.source} moves {first.target}")
