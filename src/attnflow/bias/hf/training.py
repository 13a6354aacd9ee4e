"""Training a bias with `Trainer`: the settings that the paper leaves out, what is logged, exact resumption."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from attnflow._core.checks import integer
from attnflow.bias.hf.packing import Drawn
from attnflow.bias.hf.saving import fill, save
from attnflow.bias.hf.strength import strength
from attnflow.bias.layer import layer_biases
from attnflow.bias.saved import CONFIG, read
from attnflow.models.loaded import Loaded, split

Probe = Callable[[nn.Module], Mapping[str, float]]
Rows = Dataset[dict[str, Tensor]]

_HALF: Final = (torch.bfloat16, torch.float16)
_PROBED: Final = 2  # rows on which |B| is measured


@dataclass(frozen=True)
class TrainingConfig:
    """How to train. The paper names AdamW, a cosine, 1000 warm-up steps of 50,000, 1024 rows of 2048 tokens (daa, sec.
    4.3); rates, betas, decay and clipping it does not. All defaults are ours, for small models on small machines.

    Attributes:
        steps: optimiser steps.
        batch_size: rows of each process and backward pass.
        accumulation: backward passes of a step.
        learning_rate: peak; for a bias alone. Continued pretraining of a whole model wants far less, such as 2e-5.
        warmup: steps over which the rate rises from 0, by default a twentieth of all; then a cosine takes it to 0.
        betas: of AdamW.
        weight_decay: of matrices; biases, norms and gains have none.
        max_grad_norm: gradients are clipped to it.
        log_every: steps between two entries of the log: loss, rate, and |B| of each layer. By default a tenth of the
            steps, at most 10.
        save_every: steps between two checkpoints, a multiple of `log_every`; 0 for none. By default a twentieth of the
            steps, at least 10.
        evaluate_every: steps between two evaluations of the held-out rows; 0 for at the end only. By default a tenth of
            the steps, at least 50: an evaluation costs as much as a few steps.
        held_out_rows: of `train`: rows of held-out text that are evaluated, at most.
        seed: of the order of rows and of dropout.

    Raises:
        ValueError, TypeError: a setting out of range.
    """

    steps: int = 1000
    batch_size: int = 8
    accumulation: int = 1
    learning_rate: float = 1e-3
    warmup: int | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    log_every: int | None = None
    save_every: int | None = None
    evaluate_every: int | None = None
    held_out_rows: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulation", "held_out_rows"):
            integer(name, getattr(self, name), minimum=1)
        integer("seed", self.seed)
        if self.warmup is not None:
            integer("warmup", self.warmup, maximum=self.steps)
        log = max(1, min(10, self.steps // 10)) if self.log_every is None else integer("log_every", self.log_every, 1)
        defaults = {
            "log_every": log,
            "save_every": max(10, self.steps // 20),
            "evaluate_every": max(50, self.steps // 10),
        }
        for name, default in defaults.items():
            value = getattr(self, name)
            value = -(-default // log) * log if value is None else integer(name, value)
            object.__setattr__(self, name, value)  # what "by default" means is in the settings of a run
        if cast(int, self.save_every) % log:
            # The log averages the loss since its last entry, which a checkpoint between two entries would cut in two.
            raise ValueError(f"save_every must be a multiple of log_every = {log}, got {self.save_every}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if not (self.weight_decay >= 0 and self.max_grad_norm > 0):  # NaN fails both
            raise ValueError("weight_decay must be at least 0 and max_grad_norm positive")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be in [0, 1), got {self.betas}")

    def arguments(self, folder: str | Path, **more: Any) -> TrainingArguments:
        """The same for `Trainer`; `more` goes to `TrainingArguments` and wins, as in `report_to="tensorboard"`."""
        said: dict[str, Any] = {
            "output_dir": str(folder),
            "max_steps": self.steps,
            "per_device_train_batch_size": self.batch_size,
            "per_device_eval_batch_size": self.batch_size,
            "gradient_accumulation_steps": self.accumulation,
            "learning_rate": self.learning_rate,
            "lr_scheduler_type": "cosine",
            "warmup_steps": self.steps // 20 if self.warmup is None else self.warmup,
            "adam_beta1": self.betas[0],
            "adam_beta2": self.betas[1],
            "weight_decay": self.weight_decay,
            "max_grad_norm": self.max_grad_norm,
            "logging_steps": self.log_every,
            "logging_first_step": True,
            "save_strategy": "steps" if self.save_every else "no",
            "save_steps": self.save_every or self.steps,
            "save_total_limit": 2,
            "eval_strategy": "steps" if self.evaluate_every else "no",
            "eval_steps": self.evaluate_every or self.steps,
            "seed": self.seed,
            "report_to": "none",
            "remove_unused_columns": False,
            "prediction_loss_only": True,
            "use_cpu": not torch.cuda.is_available(),
        }
        return TrainingArguments(**{**said, **more})

    def to_dict(self) -> dict[str, object]:
        """As JSON holds it."""
        return {**dataclasses.asdict(self), "betas": list(self.betas)}


class BiasTrainer(Trainer):
    """`Trainer` for a model with a bias; everything that it does for other models, it does here.

    Beside that: rows come in an order drawn from (seed, step), so that a run that was killed and resumed
    (`trainer.train(resume_from_checkpoint=True)`) has the losses of one that was not; |B| of each layer is in the log
    as `bias/layer_<n>`; and where the bias alone is trained, checkpoints hold the bias alone.

    Args:
        probes: functions of the model whose numbers join each entry of the log that has a loss.
    """

    def __init__(self, *args: Any, probes: Sequence[Probe] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.probes = tuple(probes)

    def _get_train_sampler(self, train_dataset: object = None) -> Sampler[int]:
        """In order: `Drawn` has shuffled already."""
        return SequentialSampler(cast(Any, self.train_dataset if train_dataset is None else train_dataset))

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Matrices: neither biases, norms, nor gains, of which 0 or 1 is no better than another value."""
        return [name for name in super().get_decay_parameter_names(model) if not name.endswith(".gain")]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what the probes say to the entries of training steps."""
        if "loss" in logs:
            for probe in self.probes:
                logs.update(probe(cast(nn.Module, self.model)))
        super().log(logs, start_time)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is not None or not bias_alone(self.model):
            super()._save(output_dir, state_dict)
        elif self.args.should_save:
            save(cast(nn.Module, self.model), str(output_dir or self.args.output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        if (folder / CONFIG).is_file():
            fill(cast(nn.Module, self.model), read(folder).tensors(), folder)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = Path(str(self.state.best_model_checkpoint))
        if (best / CONFIG).is_file():
            fill(cast(nn.Module, self.model), read(best).tensors(), best)
        else:
            super()._load_best_model()


def trainer(
    model: nn.Module | Loaded,
    rows: Rows,
    config: TrainingConfig,
    folder: str | Path,
    *,
    held_out: Rows | None = None,
    probes: Sequence[Probe] = (),
    callbacks: Sequence[TrainerCallback] = (),
    **arguments: Any,
) -> BiasTrainer:
    """A `Trainer` for a model whose bias is attached, ready for `.train()` or `.train(resume_from_checkpoint=True)`.

    The parameters of a bias on a half-precision model become float32 (attention reads them so anyway): bfloat16 loses
    every update below 0.4 % of a weight.

    Args:
        model: a transformers model with a bias (`af.bias.attach`), wrapped by PEFT or not, or what `af.load_model`
            returned.
        rows: for training, such as `Packed`.
        config: how.
        folder: for checkpoints.
        held_out: rows for evaluation; its loss is in the log as `eval_loss`.
        probes: more numbers for the log.
        callbacks: of `Trainer`.
        arguments: more of `TrainingArguments`.

    Raises:
        ValueError: several GPUs in one process, or FSDP on a half-precision model.
    """
    model, _ = split(model)
    more: dict[str, Any] = {} if held_out is not None else {"eval_strategy": "no"}
    said = config.arguments(folder, **{**more, **arguments})
    half = [p for _, bias in layer_biases(model) for p in bias.parameters() if p.dtype in _HALF]
    if half and said.fsdp:
        raise ValueError(
            "FSDP shards parameters of one type only, and a bias on a half-precision model trains in float32: load the "
            "model in float32 and pass bf16=True, which computes in bfloat16"
        )
    if said.n_gpu > 1:
        raise ValueError(
            f"Trainer would run {said.n_gpu} GPUs in one process by nn.DataParallel, under which a bias does not run: "
            "start with `accelerate launch` or `torchrun`, or show one GPU by CUDA_VISIBLE_DEVICES"
        )
    for parameter in half:
        parameter.data = parameter.data.float()
    draws = config.steps * config.batch_size * config.accumulation * said.world_size
    strengths = [LogStrength(rows)] if next(layer_biases(model), None) is not None else []
    return BiasTrainer(
        model=model,
        args=said,
        train_dataset=Drawn(rows, draws, config.seed),
        eval_dataset=held_out,
        probes=[*strengths, *probes],
        callbacks=list(callbacks),
    )


class LogStrength:
    """A probe: |B| of each layer on the first rows of a data set, as `bias/layer_<n>`."""

    def __init__(self, rows: Rows, count: int = _PROBED) -> None:
        many = range(min(count, len(rows)))  # pyright: ignore[reportArgumentType]
        self.inputs = {name: torch.stack([rows[index][name] for index in many]) for name in rows[0] if name != "labels"}

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Measure."""
        device = next(model.parameters()).device
        layers = strength(model, {name: tensor.to(device) for name, tensor in self.inputs.items()}).layers
        return {f"bias/layer_{layer}": value for layer, value in layers.items()}


def mixed_precision(model: Any) -> dict[str, bool]:
    """Of `TrainingArguments`: weights in float32 compute in bfloat16 on a GPU that has it."""
    return {"bf16": torch.cuda.is_available() and torch.cuda.is_bf16_supported() and model.dtype == torch.float32}


def bias_alone(model: Any) -> bool:
    """Whether nothing but the bias is trained."""
    ours = {id(p) for _, bias in layer_biases(model) for p in bias.parameters()}
    return bool(ours) and all(id(p) in ours for p in model.parameters() if p.requires_grad)
