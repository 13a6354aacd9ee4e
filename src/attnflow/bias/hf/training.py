"""Training a bias: `train` in one call that can be killed and called again, `trainer` with `Trainer` in your own hands.

Both have the settings that the paper leaves out, |B| of each layer in the log, and exact resumption.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, cast

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler, SequentialSampler, Subset
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint

from attnflow._core.files import write_atomically
from attnflow._core.progress import Progress
from attnflow._core.version import __version__
from attnflow.bias.documents import read_documents, split_documents, tokenize
from attnflow.bias.hf.attach import BiasHandle, handle
from attnflow.bias.hf.capture import strength
from attnflow.bias.hf.layers import CHILD
from attnflow.bias.hf.saving import restore, save
from attnflow.bias.layer import layer_biases
from attnflow.bias.packing import Drawn, Packed
from attnflow.bias.run import CHECKPOINTS, SETTINGS, TrainingConfig, check_folder, run_settings
from attnflow.bias.trained import Trained
from attnflow.models.loaded import Loaded, split

Probe = Callable[[nn.Module], Mapping[str, float]]
Rows = Dataset[dict[str, Tensor]]

_HALF: Final = (torch.bfloat16, torch.float16)
_PROBED: Final = 2  # rows on which |B| is measured
_SHOWN: Final = ("loss", "learning_rate", "eval_loss")


def train(
    model: nn.Module | Loaded,
    documents: str | Sequence[str],
    folder: str | Path,
    config: TrainingConfig = TrainingConfig(),  # noqa: B008 - frozen
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    length: int = 512,
    progress: Progress | None = None,
    **arguments: Any,
) -> Trained:
    """Train the attached bias, or with `attach(..., train="all")` model and bias, on text, and save everything.

    A tenth of the documents is held out (of one document its last tenth), of which `config.held_out_rows` rows are
    evaluated before, after, and every `config.evaluate_every` steps. Called again with the same folder, model and
    settings after it was killed, it goes on from the last checkpoint, and its losses are those of a run that was not.

    Args:
        model: a causal language model with a bias (`af.bias.attach`), or what `af.load_model` returned.
        documents: texts; or where they are: a text file, a `.jsonl` file (one object with "text" per line), a folder
            (each `.txt` and `.md` file a document), "shakespeare", or a data set of the hub as `NAME`, `NAME:CONFIG` or
            `NAME:CONFIG:SPLIT`, of which the column "text" is read.
        folder: for the results; see `Trained`.
        config: how to train.
        tokenizer: of the model, unless `model` brings it.
        length: tokens of a row.
        progress: called as progress(step, steps, what), `what` being a line of text for people.
        arguments: more of `TrainingArguments`, such as `bf16=True`.

    Raises:
        ValueError: no bias is attached, no causal language model, no tokenizer, too little text, a folder that holds a
            run with other settings or data (the message says which), FSDP, several GPUs in one process.
        FileNotFoundError: no such text.
    """
    model, brought = split(model)
    tokenizer = tokenizer or brought
    attached, place = handle(model), Path(folder)
    if tokenizer is None:
        raise ValueError(
            "training on text needs the model's tokenizer: pass tokenizer=..., or what af.load_model returned in place "
            "of the model"
        )
    generates = getattr(model, "can_generate", None)
    if getattr(model.config, "is_encoder_decoder", False) or not (callable(generates) and generates()):
        raise ValueError(f"training needs a causal language model, got a {type(model).__name__}")
    own_settings = run_settings(config, attached.configs, "guidance" if _bias_alone(model) else "all", length)
    check_folder(place, own_settings)
    texts = read_documents(documents) if isinstance(documents, str) else documents
    training, held = split_documents(tokenize(texts, tokenizer))
    rows = Packed(training, length)
    try:
        held_rows = Packed(held, length)
    except ValueError as error:
        raise ValueError(f"too little text is held out, a tenth of all: {error}") from error
    settings = {
        **own_settings,
        "model": str(getattr(model.config, "_name_or_path", "")),
        "data": hashlib.sha256(rows.tokens.numpy().tobytes()).hexdigest(),
    }
    spacing = max(1, len(held_rows) // config.held_out_rows)
    more: dict[str, Any] = {"disable_tqdm": True, **arguments}
    loop = trainer(
        model,
        rows,
        config,
        place / CHECKPOINTS,
        held_out=Subset(held_rows, list(range(0, len(held_rows), spacing))[: config.held_out_rows]),
        callbacks=[_Progress(progress, config.steps)],
        **more,
    )
    loop.remove_callback(PrinterCallback)
    if loop.args.fsdp:
        raise ValueError("FSDP shards what is saved here as a whole; use af.bias.trainer, and save its checkpoints")
    if loop.is_world_process_zero():  # one of several processes writes the results
        check_folder(place, settings)
        place.mkdir(parents=True, exist_ok=True)
        with write_atomically(place / SETTINGS) as file:
            file.write((json.dumps(settings, indent=1) + "\n").encode())
    before = loop.evaluate()["eval_loss"]
    loop.train(resume_from_checkpoint=get_last_checkpoint(str(place / CHECKPOINTS)))
    result = _result(loop, attached, place, before, settings)
    if loop.is_world_process_zero():
        save(model, place)
        if settings["train"] == "all":
            base = {name: tensor for name, tensor in model.state_dict().items() if f".{CHILD}." not in name}
            cast(PreTrainedModel, model).save_pretrained(place / "model", state_dict=base)
            tokenizer.save_pretrained(place / "model")
        for name in ("training.json", "curve.csv", *(["curve.png"] if find_spec("matplotlib") is not None else [])):
            result.save(place / name)
    loop.accelerator.wait_for_everyone()
    return result


class _Progress(TrainerCallback):
    def __init__(self, progress: Progress | None, steps: int) -> None:
        self.progress, self.steps = progress, steps

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        parts = {"loss": "loss", "eval_loss": "held-out loss"}
        words = [f"{label} {kwargs['logs'][name]:.3f}" for name, label in parts.items() if name in kwargs["logs"]]
        if self.progress is not None and words:
            self.progress(int(state.global_step), self.steps, ", ".join(words))


def _result(loop: BiasTrainer, attached: BiasHandle, folder: Path, before: float, settings: dict[str, Any]) -> Trained:
    state = loop.state
    evaluated = [entry for entry in state.log_history if "eval_loss" in entry]
    if not evaluated or evaluated[-1]["step"] != state.global_step:
        evaluated = [loop.evaluate()]
    curve: dict[int, dict[str, float]] = {0: {"step": 0.0, "eval_loss": before}}
    for entry in state.log_history:
        numbers = {k: float(v) for k, v in entry.items() if k in _SHOWN or k.startswith("bias/")}
        if numbers:
            curve.setdefault(int(entry["step"]), {"step": float(entry["step"])}).update(numbers)
    return Trained(
        folder,
        int(state.global_step),
        before,
        float(evaluated[-1]["eval_loss"]),
        attached.num_parameters,
        attached.num_trained,
        tuple(curve[step] for step in sorted(curve)),
        settings,
        {"attnflow": __version__, "transformers": transformers.__version__},
    )


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
        if state_dict is not None or not _bias_alone(self.model):
            super()._save(output_dir, state_dict)
        elif self.args.should_save:
            save(cast(nn.Module, self.model), str(output_dir or self.args.output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not restore(cast(nn.Module, self.model), Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not restore(cast(nn.Module, self.model), Path(str(self.state.best_model_checkpoint))):
            super()._load_best_model()


def mixed_precision(model: Any) -> dict[str, bool]:
    """Of `TrainingArguments`: weights in float32 compute in bfloat16 on a GPU that has it."""
    return {"bf16": torch.cuda.is_available() and torch.cuda.is_bf16_supported() and model.dtype == torch.float32}


def _bias_alone(model: Any) -> bool:
    """Whether nothing but the bias is trained."""
    ours = {id(p) for _, bias in layer_biases(model) for p in bias.parameters()}
    return bool(ours) and all(id(p) in ours for p in model.parameters() if p.requires_grad)
