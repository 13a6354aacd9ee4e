"""How the tests of this room train: quietly, on the CPU, plain gradient descent, samples in their order."""

from __future__ import annotations

from pathlib import Path

from transformers import TrainingArguments


def arguments(folder: Path, **more: object) -> TrainingArguments:
    """Those of `Trainer`, with what a test changes."""
    options = {
        "learning_rate": 0.1, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential", "report_to": [], "save_strategy": "no", "disable_tqdm": True,
        "use_cpu": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**options, **more})
