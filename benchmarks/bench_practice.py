"""What merged tasks cost and give in practice: decoding against greedy `generate`, merging at scale.

Each function of cases is one topic. `--only decoding` chooses the cases whose name contains the word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

import attnflow as af
from attnflow.models.subject import Loaded
from benchmarks.harness import OURS, Case, main

MODEL = "smollm2-135m"
PROMPT = 64  # tokens


@cache
def text() -> tuple[Loaded, list[int]]:
    """The model, and the tokens of a play."""
    loaded = af.load_model(MODEL)
    assert loaded.tokenizer is not None
    return loaded, loaded.tokenizer(af.models.sample_text("hamlet"))["input_ids"]


def greedy(new: int) -> Callable[[], object]:
    """`generate` of transformers."""
    (model, _), ids = text()
    prompt = torch.tensor([ids[-PROMPT:]])
    options = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
    return lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


class _Noted:
    """A call to time, with what is known of it."""

    def __init__(self, call: Callable[[], object], note: str) -> None:
        self._call, self.note = call, note

    def __call__(self) -> object:
        return self._call()


def blocks(new: int, block: int, per_pass: int | None) -> Callable[[], object]:
    """Blocks with weights that were not trained for them: time alone, which does not depend on the weights."""
    loaded, ids = text()
    options = {"max_new_tokens": new, "per_pass": per_pass, "mask_token": 0, "eos_token": -1}
    written = af.tasks.generate_blocks(loaded, ids[-PROMPT:], block, **options)
    note = f"{written}; time alone: weights not trained for blocks"
    return _Noted(lambda: af.tasks.generate_blocks(loaded, ids[-PROMPT:], block, **options), note)


def decoding(device: str, new: int = 64) -> list[Case]:
    """Decoding against greedy."""
    if device != "cpu":
        return []
    here, what = "benchmarks.bench_practice", "decoding, SmolLM2-135M"
    providers: list[tuple[str, str, tuple[object, ...]]] = [
        ("attnflow, blocks of 4", "blocks", (4, None)),
        ("attnflow, blocks of 8", "blocks", (8, None)),
        ("attnflow, blocks of 8, 4 passes", "blocks", (8, 2)),
        ("transformers generate", "greedy", ()),
    ]
    return [Case(what, name, new, here, function, (new, *rest), repeats=3) for name, function, rest in providers]


def sharing(device: str, group: int = 8, prompt: int = 512, completion: int = 64, questions: int = 6) -> list[Case]:
    """Shared prefixes: steps of trl with gradient checkpointing, and lm-eval's hellaswag with five shots."""
    if device != "cpu":
        return []
    here, task, shots = "benchmarks.shared_prefixes", "hellaswag, 5 shots", 5
    steps = [
        (f"grpo step, {group} x ({prompt} + {completion})", "grpo_step", group, group),
        (f"grpo step with generation, {group} x ({prompt} + {completion})", "grpo_whole", group, group),
        (f"dpo step, {group // 2} x ({prompt} + 2 x {completion})", "dpo_step", group // 2, group),
        (f"sft step, {group} x ({prompt} + {completion})", "sft_step", group, group),
    ]
    half = prompt // 2, completion // 2  # one row of all sequences is dense in all their pairs
    packed = [
        (f"{kind} step, one row of {group} x ({half[0]} + {half[1]})", call, name)
        for kind, call, free in (
            ("grpo", "grpo_step", "trl's loss on one row"),
            ("sft", "sft_step", "trl, padding-free"),
        )
        for name in (OURS, free, "trl")
    ]
    return [
        *[
            Case(what, name, rows * (prompt + completion), here, call, (name == OURS, size, prompt, completion), 3)
            for what, call, size, rows in steps
            for name in (OURS, "trl")
        ],
        *[
            Case(what, name, group * sum(half), here, call, (name == OURS, group, *half, name != "trl"), 3)
            for what, call, name in packed
        ],
        Case(task, OURS, questions, here, "hellaswag", (True, questions, shots), repeats=3),
        Case(task, "lm-eval HFLM", questions, here, "hellaswag", (False, questions, shots), repeats=3),
    ]


def merging(device: str, levels: int = 7, length: int = 516, n: int = 8192) -> list[Case]:
    """Merging at scale."""
    if device != "cpu":
        return []
    here = "benchmarks.merging"
    tree, causal = f"merge at scale, tree of {1 << (levels - 1)} rollouts", "merge at scale, causal_lm"
    positions = ((1 << levels) - 1) * length - (1 << (levels - 1))
    return [
        Case(tree, OURS, positions, here, "merge_tree", (levels, length, False), repeats=5),
        Case(tree, "attnflow, from objects", positions, here, "merge_tree", (levels, length, True), repeats=3),
        Case(tree, "masks.tree alone", positions, here, "tree_alone", (levels, length), repeats=3),
        Case(causal, OURS, n, here, "merge_causal", (n,), repeats=5),
    ]


def batches(device: str, sizes: tuple[int, ...] = (2048, 8192)) -> list[Case]:
    """A batch of eight different masks: FlexAttention against dense masks."""
    if device != "cpu":
        return []
    here, made, run = "benchmarks.batched_masks", "batch of 8 masks, to a kernel's form", "batch of 8 masks, attention"
    providers = [
        (made, OURS, "build", "attnflow"),
        (made, "torch create_block_mask", "build", "torch create_block_mask"),
        (made, "dense bool", "build", "dense"),
        (run, OURS, "attend", "flex"),
        (run, "sdpa, dense bool", "attend", "sdpa, dense"),
    ]
    return [Case(what, name, n, here, call, (way, n), repeats=3) for n in sizes for what, name, call, way in providers]


def cases(device: str) -> list[Case]:
    """All topics."""
    return [*batches(device), *decoding(device), *sharing(device), *merging(device)]


if __name__ == "__main__":
    main(cases, ["torch", "transformers"], time_limit=900.0)
