"""What decoding several tokens a pass costs in quality, and what lookahead accepts: tables of the guide to decoding.

    python -m benchmarks.decoding_quality blocks      # ten minutes on one core
    python -m benchmarks.decoding_quality lookahead   # two minutes, SmolLM2-135M

Seeds are set, and times are those of the processor.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnflow as af
from benchmarks import bench_practice

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


def lookahead(steps: int = 40, window: int = 32, new: int = 64) -> None:
    """Lookahead on SmolLM2 after a short fit on Hamlet: tokens a pass, drafts accepted, and blocks for comparison."""
    loaded, ids = bench_practice.text()
    prompt = ids[-bench_practice.PROMPT :]
    _timed("generate", bench_practice.greedy(new))
    ahead = af.tasks.lookahead(loaded, drafts=3)
    text = [ids[: -2 * bench_practice.PROMPT]]
    _timed("fit", lambda: f"last loss {ahead.fit(text, steps=steps, length=window, learning_rate=2e-3)[-1]:.2f} nats")
    for mode in ("quadratic", "linear"):
        for drafts in (1, 2, 3):
            options = {"max_new_tokens": new, "mode": mode, "drafts": drafts, "eos_token": -1}
            _timed(f"{mode}, {drafts}", partial(ahead.generate, prompt, **options))
        print(ahead.compare(prompt, max_new_tokens=new, mode=mode, eos_token=-1), flush=True)
    ahead.remove()
    for block, per_pass in ((4, None), (8, None), (8, 2)):
        write = partial(af.tasks.generate_blocks, loaded, prompt, block, max_new_tokens=new, per_pass=per_pass)
        _timed(f"blocks of {block}, {per_pass or block} a pass, time alone", partial(write, eos_token=-1))


def _timed(name: str, call: Callable[[], object]) -> None:
    start = time.process_time()
    result = call()
    said = "" if isinstance(result, torch.Tensor) else f"{result}, "
    print(f"{name}: {said}{time.process_time() - start:.1f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["blocks", "lookahead"])
    torch.set_num_threads(1)
    {"blocks": blocks, "lookahead": lookahead}[parser.parse_args().what]()
