"""The settings of the study, at each scale."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Reading:
    """One experiment. The defaults are the scale "tiny".

    Attributes:
        model: as `af.load_model` takes it.
        encoder: of the stores.
        facts: made-up ones of the fit.
        reading_steps: of its first part.
        steps: of its second.
        sizes: facts in the stores that are asked about.
        group: facts of each kind in each group.
        tokens: of an answer, at most.
        choosing: questions of the fit's held-out ones by which thresholds are chosen, and the facts of their store.
        lora_sizes: facts that LoRA learns.
        lora_steps: on the facts as they are before the edits, for each size.
        lora_edit_steps: on the edits.
        lora_batch: questions of a step.
        lora_rate: peak learning rate.
        edited: inserted and corrected facts that are edited into the model's own entries, of each kind and group.
        moment_tokens: of Shakespeare's sonnets, for that.
        text_tokens: of Hamlet, for the loss on other text.
        timed: questions whose times are taken, one at a time.
        seeds: of the fit, the facts, and LoRA.
    """

    model: str = "smollm2-135m"
    encoder: str = "minilm"
    facts: int = 12_000
    reading_steps: int = 3000
    steps: int = 300
    sizes: tuple[int, ...] = (64, 256, 1024, 4096, 16384)
    group: int = 8
    tokens: int = 8
    choosing: tuple[int, int] = (64, 1024)
    lora_sizes: tuple[int, ...] = (64,)
    lora_steps: tuple[int, ...] = (60,)
    lora_edit_steps: int = 20
    lora_batch: int = 16
    lora_rate: float = 1e-3
    edited: int = 2
    moment_tokens: int = 4000
    text_tokens: int = 256
    timed: int = 5
    seeds: tuple[int, ...] = (0, 1, 2)


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
    """Few facts, two steps, two seeds, and an encoder as it is."""
    return replace(
        config, facts=20, reading_steps=2, steps=2, sizes=(8, 12), group=1, tokens=2, choosing=(3, 6), lora_sizes=(8,),
        lora_steps=(2,), lora_edit_steps=1, lora_batch=2, edited=1, moment_tokens=64, text_tokens=16, timed=1,
        seeds=config.seeds[:2],
    )  # fmt: skip
