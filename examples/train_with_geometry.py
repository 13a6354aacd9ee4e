"""Train an encoder from a symmetric start, keep it symmetric by a penalty, and record both scores on the way."""

import torch
from transformers import BertConfig, BertForMaskedLM

import attnflow as af

torch.manual_seed(0)
text = "shall i compare thee to a summers day thou art more lovely and more temperate " * 4
letters = ["?", *sorted(set(text))]  # the first stands for a masked letter
tokens = torch.tensor([letters.index(letter) for letter in text])
samples = tokens.unfold(0, 24, 4)

config = BertConfig(
    vocab_size=len(letters), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
)


def train(strength: float) -> None:
    model = BertForMaskedLM(config)
    af.geometry.init_symmetric_(model)  # W_k = c W_q in every head, at the scale of the model's own initialisation
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with af.geometry.monitor(model, every=20, per_head=True) as monitor:
        for _ in range(60):
            masked = torch.rand(samples.shape) < 0.15
            labels = samples.masked_fill(~masked, -100)
            loss = model(input_ids=samples.masked_fill(masked, 0), labels=labels).loss
            optimizer.zero_grad()
            (loss + strength * af.geometry.penalty(model, "symmetric")).backward()
            optimizer.step()
            monitor.step()
    print(f"strength {strength}: loss {loss.item():.2f}; heads' symmetry {monitor.scores.summaries[-1].symmetry}")

    for step, values in monitor.history.items():
        layers = [f"{values[f'geometry/symmetry/layer_{layer}']:+.3f}" for layer in range(config.num_hidden_layers)]
        print(f"  step {step:>2}: symmetry of the layers {' '.join(layers)}")


for strength in (0.0, 0.01):
    train(strength)
