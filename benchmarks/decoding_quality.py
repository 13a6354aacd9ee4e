"""What decoding several tokens a pass costs in quality: the table of the guide to decoding.

    python -m benchmarks.decoding_quality   # ten minutes on one core

Seeds are set.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnflow as af

LENGTH, BATCH, MASK = 64, 16, 129  # characters of a sample, samples of a step; the id of [MASK], after those of ASCII
HELD_OUT = 8000  # characters at the end of the text, of which the first 64 samples are scored


def small_model() -> LlamaForCausalLM:
    """A Llama of 0.8 million parameters over characters."""
    config = LlamaConfig(
        vocab_size=130, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, family: Callable[..., object], text: torch.Tensor, steps: int, rate: float) -> None:
    """Steps of AdamW on random samples of the text."""
    collate, optimizer = af.tasks.Collator(family), torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH,)).tolist()
        batch = collate([text[start : start + LENGTH].tolist() for start in starts])
        labels = batch.pop("labels")
        loss = af.tasks.loss(model(**batch), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def nats(model: LlamaForCausalLM, family: Callable[..., object], text: torch.Tensor, labels_a_sample: float) -> float:
    """Nats per predicted character of the first 64 samples of a text."""
    model.eval()
    collate, total = af.tasks.Collator(family), 0.0
    torch.manual_seed(5)  # of the places that a random family masks
    for first in range(0, 64 * LENGTH, 8 * LENGTH):
        batch = collate([text[start : start + LENGTH].tolist() for start in range(first, first + 8 * LENGTH, LENGTH)])
        labels = batch.pop("labels")
        total += float(af.tasks.loss(model(**batch), labels, reduction="sum"))
    model.train()
    return total / 64 / labels_a_sample


def blocks(steps: int = 600, more: int = 150) -> None:
    """A causal model of the characters of Hamlet, trained on in blocks: held-out nats per character."""
    torch.manual_seed(0)
    text = torch.tensor(list(af.models.sample_text("hamlet").encode()[:150_000])).clamp(max=127)
    learnt, held_out = text[:-HELD_OUT], text[-HELD_OUT:]
    causal = small_model()
    train(causal, af.tasks.causal_lm, learnt, steps, 2e-3)
    print(f"causal: {nats(causal, af.tasks.causal_lm, held_out, LENGTH - 1):.2f} nats", flush=True)
    families = [
        (f"blocks of {block}", partial(af.tasks.block_two_stream, block=block, mask_token=MASK), LENGTH - block)
        for block in (1, 2, 4, 8)
    ]
    diffusion = partial(af.tasks.block_diffusion, block=4, masked="random", mask_token=MASK)
    for name, family, labels in [*families, ("diffusion of 4, at most", diffusion, LENGTH / 4)]:
        model = copy.deepcopy(causal)
        train(model, family, learnt, more, 1e-3)
        print(f"{name}: {nats(model, family, held_out, labels):.2f} nats", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    blocks()
