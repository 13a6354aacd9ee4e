"""What is trained, at each scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from experiments.hasse.arms import Arm, arms


@dataclass(frozen=True)
class Training:
    """What is trained. The defaults are the scale "tiny"."""

    text: str = "shakespeare"  # "shakespeare", or a data set of the hub, which is streamed
    # how many word pieces are learned from Shakespeare (259: the bytes), or the name of one of the hub
    tokenizer: int | str = 259
    rows: int = 0  # of a data set, for training; those of Shakespeare are what they are
    held_out: int = 64  # rows for the results
    written: int = 32  # held-out rows whose second half is written anew
    length: int = 64  # tokens of a row, a multiple of twice the largest block
    # width and inner (feed-forward) of the models
    sizes: Mapping[str, int] = field(default_factory=lambda: {"width": 64, "inner": 172})
    layers: tuple[int, ...] = (2, 4)  # of the models; the last number is that of the main arms
    blocks: tuple[int, ...] = (1, 2, 4, 8)  # tokens predicted at once
    depths: tuple[int, ...] = (2, 4, 8, 16, 62)  # of sparse causal masks
    # depths of sparse causal masks that learn rows whose second half is the first
    repeats: tuple[int, ...] = (2, 4, 16)
    seeds: tuple[int, ...] = (0, 1, 2)  # of initialisation and data
    rates: tuple[float, ...] = (1.5e-3, 3e-3)  # learning rates; with several, the first seed chooses for each arm
    # if not empty, only these arms are run, each at all of its rates with all seeds. An earlier study has chosen them.
    # Groups follow one another, and within a group seeds are run in turn.
    rerun: tuple[Mapping[str, tuple[float, ...]], ...] = ()
    steps: int = 800  # of the optimiser; "warm" arms are causal for the first half of them
    # steps; the rate is constant afterwards, so that every point of a curve is the end of a shorter run
    warmup: int = 50
    batch_size: int = 8  # rows of a forward pass
    parts: int = 1  # forward passes of a step
    decay: float = 0.01  # of matrices
    measure_every: int = 50  # steps
    save_every: int = 200  # steps
    # how they travel: "dense" for SDPA, or "intervals" for FlexAttention (SDPA on a CPU)
    masks: Literal["dense", "intervals"] = "dense"

    @property
    def arms(self) -> dict[str, Arm]:
        return arms(self.layers, self.blocks, self.depths, self.repeats)

    @property
    def planned(self) -> Mapping[str, tuple[float, ...]]:
        if not self.rerun:
            return dict.fromkeys(self.arms, self.rates)
        return {arm: rates for group in self.rerun for arm, rates in group.items()}


def tiny() -> Training:
    """One CPU core; the README says how long."""
    return Training()


def tiny_pairs() -> Training:
    """The arms of "tiny" that decide verdicts, with eight other seeds.

    The first group has what three seeds left open: blocks of 8 against their table, the sparse masks of block 1 and
    causal, and the two controls of depth. Block 1 has both rates, since dense and sparse had chosen different ones.
    """
    low, high = 1.5e-3, 3e-3
    decisive = {
        "warm 8": (low,),
        "block 1": (low, high),
        "sparse block 1": (low, high),
        "causal": (low,),
        "sparse causal": (low,),
        "depth 62 of 4 layers": (low,),
        "repeats": (low,),
        "repeats depth 4": (low,),
    }
    blocks = {f"{form}block {block}": (low,) for block in (8, 2, 4) for form in ("", "sparse ")}
    others = {"butterfly": (high,), "sparse butterfly": (low,), **blocks, "warm 4": (low,)}
    return Training(seeds=tuple(range(3, 11)), rerun=(decisive, others))


def small() -> Training:
    """One GPU: bytes of Shakespeare's works in rows of 256, 8 layers of width 256."""
    return Training(
        held_out=256,
        written=128,
        length=256,
        sizes={"width": 256, "inner": 688},
        layers=(4, 8),
        depths=(2, 4, 8, 16, 64),
        repeats=(2, 8, 64),
        rates=(1e-3, 2e-3),
        steps=500,
        batch_size=64,
        save_every=250,
    )


def paper() -> Training:
    """FineWeb-Edu, 2.6 billion tokens, 12 layers of width 768: the paper trains nothing, this is the field's size."""
    return Training(
        text="HuggingFaceFW/fineweb-edu:sample-10BT:train",
        tokenizer="HuggingFaceTB/SmolLM2-135M",
        rows=2_560_000,
        held_out=1024,
        written=256,
        length=1024,
        sizes={"width": 768, "inner": 2048},
        layers=(4, 12),
        depths=(4, 8, 12, 24, 128),
        repeats=(2, 12, 128),
        seeds=(0, 1, 2, 3, 4),
        rates=(6e-4,),
        steps=10_000,
        warmup=500,
        batch_size=16,
        parts=16,
        decay=0.1,
        measure_every=250,
        save_every=250,
        masks="intervals",
    )
