"""Guidance-only training against its controls at equal parameters, as the runner takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from experiments.bias_comparison.compare import Comparison, setup, small, tiny
from experiments.bias_comparison.summary import summarise
from experiments.runner.experiment import Experiment, Judgement
from experiments.runner.files import read


def miniature(config: Comparison) -> Comparison:
    """Two steps of short rows, two rates."""
    training = replace(config.training, steps=2, batch_size=2, warmup=1, log_every=1, save_every=0, evaluate_every=0)
    return replace(
        config, dtype="float32", rates=(1e-3, 1e-2), seeds=(0,), length=16, rows_per_work=1, training=training
    )


def judge(results: Path) -> Sequence[Judgement]:
    """Guidance-only training: whether it gains, and more than a bias of the key alone."""
    arms = {one["arm"]: one for one in read(results / "results.json")["arms"]}

    def gain(name: str) -> list[float]:
        return list(arms[name]["gain_by_step"].values())[-1]

    own, key, lora = gain("guidance"), gain("key"), gain("lora")
    verdict = "confirmed" if own[1] > 0 else "refuted" if own[2] < 0 else "not confirmed"
    said = {name: f"{v[0]:.4f} [{v[1]:.4f}, {v[2]:.4f}]" for name, v in (("g", own), ("key", key), ("lora", lora))}
    return [
        Judgement(
            "D20",
            verdict,
            f"Of SmolLM2-135M, after {list(arms['guidance']['gain_by_step'])[-1]} steps: gain {said['g']} nats; a bias "
            f"of the key alone gains {said['key']}, LoRA of the same size {said['lora']}.",
        )
    ]


EXPERIMENT: Final = Experiment(
    name="bias_comparison",
    question="Does a learned bias train better than its controls at equal parameters?",
    recipes={"tiny": tiny, "small": small},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
    rule_before=False,
    packages=("torch", "transformers", "peft", "attnflow"),
)
