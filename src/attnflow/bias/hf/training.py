"""Training a bias with `Trainer`: the settings that the paper leaves out, what is logged, exact resumption."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from attnflow.bias.hf.saving import fill, save
from attnflow.bias.hf.strength import strength
from attnflow.bias.layer import layer_biases
from attnflow.bias.packing import Drawn
from attnflow.bias.run import TrainingConfig
from attnflow.bias.saved import CONFIG, read
from attnflow.models.loaded import Loaded, split

Probe = Callable[[nn.Module], Mapping[str, float]]
Rows = Dataset[dict[str, Tensor]]

_HALF: Final = (torch.bfloat16, torch.float16)
_PROBED: Final = 2  # rows on which |B| is measured


def arguments_of(config: TrainingConfig, folder: str | Path, **more: Any) -> TrainingArguments:
    """A config for `Trainer`; `more` goes to `TrainingArguments` and wins, as in `report_to="tensorboard"`."""
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": config.steps,
        "per_device_train_batch_size": config.batch_size,
        "per_device_eval_batch_size": config.batch_size,
        "gradient_accumulation_steps": config.accumulation,
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": config.steps // 20 if config.warmup is None else config.warmup,
        "adam_beta1": config.betas[0],
        "adam_beta2": config.betas[1],
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.max_grad_norm,
        "logging_steps": config.log_every,
        "logging_first_step": True,
        "save_strategy": "steps" if config.save_every else "no",
        "save_steps": config.save_every or config.steps,
        "save_total_limit": 2,
        "eval_strategy": "steps" if config.evaluate_every else "no",
        "eval_steps": config.evaluate_every or config.steps,
        "seed": config.seed,
        "report_to": "none",
        "remove_unused_columns": False,
        "prediction_loss_only": True,
        "use_cpu": not torch.cuda.is_available(),
    }
    return TrainingArguments(**{**options, **more})


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
    options = arguments_of(config, folder, **{**more, **arguments})
    half = [p for _, bias in layer_biases(model) for p in bias.parameters() if p.dtype in _HALF]
    if half and options.fsdp:
        raise ValueError(
            "FSDP shards parameters of one type only, and a bias on a half-precision model trains in float32: load the "
            "model in float32 and pass bf16=True, which computes in bfloat16"
        )
    if options.n_gpu > 1:
        raise ValueError(
            f"Trainer would run {options.n_gpu} GPUs in one process by nn.DataParallel, where a bias does not run; "
            "start with `accelerate launch` or `torchrun`, or show one GPU by CUDA_VISIBLE_DEVICES"
        )
    for parameter in half:
        parameter.data = parameter.data.float()
    draws = config.steps * config.batch_size * config.accumulation * options.world_size
    strengths = [LogStrength(rows)] if next(layer_biases(model), None) is not None else []
    return BiasTrainer(
        model=model,
        args=options,
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
