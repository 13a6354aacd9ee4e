"""`trainer`: a `Trainer` for a model with a bias, which resumes exactly, and stops where a number is none."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from attnflow._core.files import seal, unseal
from attnflow.bias.checkpoints import about, newest, rotate, step_of
from attnflow.bias.hf.base import described, fingerprint
from attnflow.bias.hf.capture import strength
from attnflow.bias.hf.diverged import Diverged, nonfinite, origin
from attnflow.bias.hf.saving import restore, save
from attnflow.bias.kind import layer_biases
from attnflow.bias.packing import Drawn, Packed
from attnflow.bias.run import TrainingConfig
from attnflow.models.loaded import Loaded, split

Probe = Callable[[nn.Module], Mapping[str, float]]
Rows = Dataset[dict[str, Tensor]]

_LOG: Final = logging.getLogger("attnflow.bias")
_HALF: Final = (torch.bfloat16, torch.float16)
_PROBED: Final = 2  # rows on which |B| is measured


def trainer(
    model: nn.Module | Loaded,
    rows: Rows | Sequence[Sequence[int]],
    config: TrainingConfig,
    folder: str | Path,
    *,
    length: int = 512,
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
        rows: for training: documents as token ids, which are laid end to end and cut into rows in which they stay
            apart (`attnflow.bias.packing.Packed`); or a data set of the model's inputs.
        config: how.
        folder: for checkpoints.
        length: tokens of a row cut from documents.
        held_out: rows for evaluation; its loss is in the log as `eval_loss`.
        probes: more numbers for the log.
        callbacks: of `Trainer`.
        arguments: more of `TrainingArguments`; they win, as in `report_to="tensorboard"`.

    Raises:
        ValueError: documents of less than one row, several GPUs in one process, or FSDP on a half-precision model.
    """
    model, _ = split(model)
    if isinstance(rows, Sequence) and not any(isinstance(row, Mapping) for row in rows[:1]):
        rows = Packed(rows, length)
    rows = cast(Rows, rows)
    more: dict[str, Any] = {} if held_out is not None else {"eval_strategy": "no"}
    options = _arguments(config, folder, {**more, **arguments})
    biases = [bias for _, bias in layer_biases(model)]
    half = [p for bias in biases for p in bias.parameters() if p.dtype in _HALF]
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
    return BiasTrainer(
        model=model,
        args=options,
        train_dataset=Drawn(rows, draws, config.seed),
        eval_dataset=held_out,
        probes=[*([_strength_on(rows)] if biases else []), *probes],
        callbacks=list(callbacks),
    )


def _strength_on(rows: Rows) -> Probe:
    """|B| of each layer on the first rows of a data set, as `bias/layer_<n>`."""
    few = [rows[index] for index in range(min(_PROBED, len(rows)))]  # pyright: ignore[reportArgumentType]
    inputs = {name: torch.stack([row[name] for row in few]) for name in few[0]}

    def probe(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        layers = strength(model, {name: tensor.to(device) for name, tensor in inputs.items()})
        return {f"bias/layer_{layer}": value for layer, value in layers.items()}

    return probe


def _arguments(config: TrainingConfig, folder: str | Path, more: Mapping[str, Any]) -> TrainingArguments:
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
        "logging_nan_inf_filter": False,  # which logs 0.0 for NaN; `BiasTrainer` stops there
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

    A checkpoint is complete once it says so, as the last thing that is written, with the sizes and checksums of its
    files. Training resumes from the newest complete one; one that is not, or that belongs to another base model, is
    refused. A loss, gradient or weight that is NaN or infinite ends the run at once (`Diverged`, with step and layer),
    and is never saved.

    Args:
        probes: functions of the model whose numbers join each entry of the log that has a loss.
    """

    def __init__(self, *args: Any, probes: Sequence[Probe] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.probes = tuple(probes)
        self.notes: dict[str, Any] = {}  # carried from checkpoint to checkpoint
        self._random: tuple[Tensor, list[Tensor]] | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`, from the newest complete checkpoint if `resume_from_checkpoint` is true.

        Raises:
            ValueError: no complete checkpoint, or one of another base model.
            Diverged: a loss, gradient or weight is NaN or infinite.
        """
        path = self._checkpoint(resume_from_checkpoint)
        self._forget_evaluation()
        output = super().train(None if path is None else str(path), *args, **kwargs)
        self._check_weights()
        return output

    def _forget_evaluation(self) -> None:
        """Let several processes train as one after an evaluation.

        That prepares the model without DistributedDataParallel and marks it as prepared, and accelerate then leaves it
        as it is: each process would train a model of its own, and say nothing.
        """
        model = cast(nn.Module, self.model)
        own = self.args.world_size > 1 and not (self.is_fsdp_enabled or self.is_deepspeed_enabled)
        if own and self.model_wrapped is model and vars(model).pop("_is_accelerate_prepared", False):
            self.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # the forward pass, too, is as it was

    def newest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint of this run's folder: of all processes, what the first one sees."""
        path = newest(Path(str(self.args.output_dir))) if self.is_world_process_zero() else None
        if self.args.world_size > 1:
            from accelerate.utils import broadcast_object_list

            path = broadcast_object_list([path])[0]
        return path

    def _checkpoint(self, asked: str | bool | None) -> Path | None:
        if asked is None or asked is False:
            return None
        path = self.newest_checkpoint() if asked is True else Path(asked)
        if path is None:
            raise ValueError(f"no complete checkpoint in {self.args.output_dir} to resume from; train from the start")
        said = about(path)
        if said.get("base", {}).get("sha256") != self.base["sha256"]:
            raise ValueError(
                f"{path} belongs to another base model: it was trained on {described(said.get('base'))}, and this is "
                f"{described(self.base)}; load that one, or choose another folder"
            )
        if said.get("processes") != self.args.world_size:
            _LOG.warning(
                "%s was written by %s processes and is resumed by %s: the run is not the one that it would have been",
                path, said.get("processes"), self.args.world_size,
            )  # fmt: skip
        self.notes = dict(said.get("notes", {}))
        return path

    @cached_property
    def base(self) -> dict[str, str]:
        """The fingerprint of the weights that are not trained, and so not in a checkpoint."""
        return fingerprint(cast(nn.Module, self.model), frozen=True)

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

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """As `Trainer.training_step`; raises `Diverged` if the loss, or at the end of a step a gradient, is none.

        Cost: what the `Trainer`'s own look at each loss costs, which is switched off, and the norm of the gradients.
        """
        self._random = _random_state()
        loss = super().training_step(model, dict(inputs), *args, **kwargs)
        if not bool(torch.isfinite(loss)):
            raise self._diverged(f"the loss is {float(loss)}", inputs, int(self.state.global_step) + 1)
        if self.accelerator.sync_gradients and not self._scaled():
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            if not bool(torch.isfinite(norm)):
                what = f"the norm of the gradients is {float(norm)}"
                raise self._diverged(what, inputs, int(self.state.global_step) + 1)
        return loss

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.prediction_step`; raises `Diverged` if the loss is none."""
        outcome = super().prediction_step(model, inputs, *args, **kwargs)
        if outcome[0] is not None and not bool(torch.isfinite(outcome[0]).all()):
            self._random = None
            what = f"the held-out loss is {float(outcome[0].mean())}"
            raise self._diverged(what, inputs, int(self.state.global_step))
        return outcome

    def _scaled(self) -> bool:
        """Whether gradients are scaled for float16, where infinite ones are usual, and their step is left out."""
        scaler = self.accelerator.scaler
        return scaler is not None and scaler.get_scale() > 1.0

    def _check_weights(self) -> None:
        """Raise `Diverged` if a trained weight, or the state of the optimiser for it, is none."""
        model = cast(nn.Module, self.model)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        names, state = nonfinite(trained), cast(Any, self.optimizer).state if self.optimizer is not None else {}
        for name, parameter in () if names else trained:
            moments = state.get(parameter, {})
            names += [name for key in nonfinite(moments.items()) if key]
        if names:
            what = f"{names[0]}, or what the optimiser keeps for it, is NaN or infinite after the update"
            raise self._stopped(what, names[0].rpartition(".")[0], int(self.state.global_step))

    def _diverged(self, what: str, inputs: Mapping[str, Any], step: int) -> Diverged:
        model = cast(nn.Module, self.accelerator.unwrap_model(self.model))

        def again() -> None:
            prepared = self._prepare_inputs(dict(inputs))
            with _random_as(self._random), torch.no_grad(), self.compute_loss_context_manager():
                self.compute_loss(model, prepared)

        alone = not (self.is_fsdp_enabled or self.is_deepspeed_enabled)  # else a pass needs the other processes
        where, layer = origin(model, inputs.get("labels"), again if alone else None)
        return self._stopped(f"{what}, {where}", layer, step)

    def _stopped(self, what: str, layer: str, step: int) -> Diverged:
        last = newest(Path(str(self.args.output_dir)), contents=False)
        left = "no checkpoint was written" if last is None else f"the last checkpoint is of step {step_of(last)}"
        return Diverged(
            f"training stopped at step {step}: {what}. Nothing of it is saved; {left}. Try a lower learning_rate or "
            "max_grad_norm, or look at the text of that step",
            step,
            layer,
        )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._check_weights()
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:  # what a kill has left of it
            unseal(folder)
            shutil.rmtree(folder, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        limit, self.args.save_total_limit = self.args.save_total_limit, None  # none goes before this one is complete
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        said = {
            "step": int(self.state.global_step),
            "resumable": not self.args.save_only_model,
            "base": self.base,
            "processes": self.args.world_size,
            "notes": self.notes,
        }
        self.accelerator.wait_for_everyone()  # every process has written its part
        if self.args.should_save:
            seal(folder, said)
            rotate(folder.parent, limit, self.state.best_model_checkpoint)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is not None or not bias_alone(self.model):
            super()._save(output_dir, state_dict)
        elif self.args.should_save:
            save(cast(nn.Module, self.model), str(output_dir or self.args.output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not restore(cast(nn.Module, self.model), Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not restore(cast(nn.Module, self.model), Path(str(self.state.best_model_checkpoint))):
            super()._load_best_model()


def bias_alone(model: Any) -> bool:
    """Whether nothing but the bias is trained."""
    ours = {id(p) for _, bias in layer_biases(model) for p in bias.parameters()}
    return bool(ours) and all(id(p) in ours for p in model.parameters() if p.requires_grad)


def _random_state() -> tuple[Tensor, list[Tensor]]:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


@contextmanager
def _random_as(state: tuple[Tensor, list[Tensor]] | None) -> Generator[None]:
    """Dropout as it was at the start of a step; afterwards as it is now."""
    if state is None:
        yield
        return
    now = _random_state()
    try:
        torch.set_rng_state(state[0])
        if state[1]:
            torch.cuda.set_rng_state_all(state[1])
        yield
    finally:
        torch.set_rng_state(now[0])
        if now[1]:
            torch.cuda.set_rng_state_all(now[1])
