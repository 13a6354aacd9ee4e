"""The settings of the study, at each scale."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Reading:
    """One experiment. The defaults are the scale "tiny"."""

    model: str = "smollm2-135m"  # as `af.load_model` takes it
    encoder: str = "minilm"  # of the stores
    facts: int = 12_000  # made-up ones of the fit
    reading_steps: int = 3000  # of its first part
    steps: int = 300  # of its second
    sizes: tuple[int, ...] = (64, 256, 1024, 4096, 16384)  # facts in the stores that are asked about
    group: int = 8  # facts of each kind in each group
    tokens: int = 8  # of an answer, at most
    # questions of the fit's held-out ones by which thresholds are chosen, and the facts of their store
    choosing: tuple[int, int] = (64, 1024)
    lora_sizes: tuple[int, ...] = (64,)  # facts that LoRA learns
    lora_steps: tuple[int, ...] = (60,)  # on the facts as they are before the edits, for each size
    lora_edit_steps: int = 20  # on the edits
    lora_batch: int = 16  # questions of a step
    lora_rate: float = 1e-3  # peak learning rate
    edited: int = 2  # inserted and corrected facts that are edited into the model's own entries, of each kind and group
    moment_tokens: int = 4000  # of Shakespeare's sonnets, for that
    text_tokens: int = 256  # of Hamlet, for the loss on other text
    timed: int = 5  # questions whose times are taken, one at a time
    seeds: tuple[int, ...] = (0, 1, 2)  # of the fit, the facts, and LoRA


def tiny() -> Reading:
    """Two CPU cores; the README says how long."""
    return Reading()


def small() -> Reading:
    """One GPU: a longer fit, more questions, LoRA on larger stores."""
    return Reading(
        facts=40_000, reading_steps=4000, steps=2000, group=20, lora_sizes=(64, 1024), lora_steps=(200, 2000),
        lora_edit_steps=100, edited=8, moment_tokens=8192, text_tokens=2048, timed=20,
    )  # fmt: skip


def paper() -> Reading:
    """The paper names no setting: as "small", with a model of 1.7 billion parameters and five seeds."""
    wider = replace(small(), model="HuggingFaceTB/SmolLM2-1.7B-Instruct", reading_steps=10_000, steps=10_000)
    return replace(
        wider, facts=200_000, lora_sizes=(64, 1024, 16384), lora_steps=(200, 2000, 20_000), seeds=tuple(range(5))
    )


def miniature(config: Reading) -> Reading:
    """Few facts, two steps, two seeds, and the same encoder."""
    return replace(
        config, facts=20, reading_steps=2, steps=2, sizes=(8, 12), group=1, tokens=2, choosing=(3, 6), lora_sizes=(8,),
        lora_steps=(2,), lora_edit_steps=1, lora_batch=2, edited=1, moment_tokens=64, text_tokens=16, timed=1,
        seeds=config.seeds[:2],
    )  # fmt: skip
