"""`train`: a bias trained on text, in one call that can be killed and called again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import nn
from torch.utils.data import Subset
from transformers import PreTrainedModel, TrainerCallback
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback

from attnflow._core.digests import add_tensor
from attnflow._core.files import write_atomically, write_folder
from attnflow._core.progress import Progress
from attnflow._core.version import __version__
from attnflow.bias.checkpoints import about
from attnflow.bias.documents import read_documents, split_documents, tokenize
from attnflow.bias.hf.attach import BiasHandle, handle
from attnflow.bias.hf.base import fingerprint
from attnflow.bias.hf.layers import CHILD
from attnflow.bias.hf.saving import save
from attnflow.bias.hf.trainer import BiasTrainer, bias_alone, trainer
from attnflow.bias.packing import Packed
from attnflow.bias.run import CHECKPOINTS, SETTINGS, TrainingConfig, check_folder, run_settings
from attnflow.bias.trained import Trained
from attnflow.models.loaded import Loaded, split

_SHOWN: Final = ("loss", "learning_rate", "eval_loss")
_NO_MATTER: Final = ("disable_tqdm", "log_level", "report_to", "run_name", "dataloader_num_workers", "save_total_limit")
_begun: WeakKeyDictionary[nn.Module, tuple[Path, dict[str, str]]] = WeakKeyDictionary()  # run and base of a model


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
    settings after it was killed, it goes on from the newest complete checkpoint, and its losses are those of a run that
    was not. The weights of the base model belong to the run, by a digest, and so do the text and the settings.

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
            run with other settings or data or of another base model (the message says which), FSDP, several GPUs in
            one process, a model that an interrupted run has trained and that no checkpoint can take back.
        FileNotFoundError: no such text.
        AttnflowError: a loss, a gradient or a weight became NaN or infinite: at which step, and in which layer. Nothing
            of it is saved, and the checkpoints before it are as they were.
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
    own_settings = run_settings(config, attached.configs, "guidance" if bias_alone(model) else "all", length)
    check_folder(place, own_settings)
    texts = read_documents(documents) if isinstance(documents, str) else documents
    training, held = split_documents(tokenize(texts, tokenizer))
    rows = Packed(training, length)
    try:
        held_rows = Packed(held, length)
    except ValueError as error:
        raise ValueError(f"too little text is held out, a tenth of all: {error}") from error
    # A model that this process has trained in this folder before is no longer the base, and goes on from a checkpoint.
    begun = _begun.get(model, (None, {}))
    base = begun[1] if begun[0] == place.resolve() else fingerprint(model)
    settings = {
        **own_settings,
        "base": base,
        "data": _digest(rows, held_rows),
        "arguments": {name: _plain(value) for name, value in sorted(arguments.items()) if name not in _NO_MATTER},
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
    settings["processes"] = loop.args.world_size
    if loop.is_world_process_zero():  # one of several processes writes the results
        check_folder(place, settings)
        place.mkdir(parents=True, exist_ok=True)
        with write_atomically(place / SETTINGS) as file:
            file.write((json.dumps(settings, indent=1) + "\n").encode())
    loop.accelerator.wait_for_everyone()
    checkpoint = loop.newest_checkpoint()
    if checkpoint is None:
        if begun[0] == place.resolve():
            raise ValueError(
                f"this model has been trained in {place} before, and no checkpoint there has what it was then: load it "
                "and attach the bias again"
            )
        loop.notes["before"] = loop.evaluate()["eval_loss"]
    elif "before" not in about(checkpoint, contents=False)["notes"]:
        raise ValueError(f"{checkpoint} is not of a run of af.bias.train; choose another folder")
    _begun[model] = place.resolve(), base
    if settings["train"] == "guidance":
        loop.base = base  # all of it is frozen: read once
    loop.train(None if checkpoint is None else str(checkpoint))
    result = _result(loop, attached, place, loop.notes["before"], settings)
    if loop.is_world_process_zero():
        save(model, place)
        if settings["train"] == "all":
            weights = {name: tensor for name, tensor in model.state_dict().items() if f".{CHILD}." not in name}
            with write_folder(place / "model") as new:
                cast(PreTrainedModel, model).save_pretrained(new, state_dict=weights)
                tokenizer.save_pretrained(new)
        for name in ("training.json", "curve.csv", *(["curve.png"] if find_spec("matplotlib") is not None else [])):
            result.save(place / name)
    loop.accelerator.wait_for_everyone()
    return result


def _digest(*parts: Packed) -> str:
    """Of rows as they are trained on and held out: their tokens, and where documents begin."""
    total = hashlib.sha256()
    for rows in parts:
        for tensor in (rows.tokens, rows.positions):
            add_tensor(total, f"{tuple(tensor.shape)}", tensor)
    return total.hexdigest()


def _plain(value: object) -> object:
    """As JSON holds it, if it can."""
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        return str(value)


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


def mixed_precision(model: Any) -> dict[str, bool]:
    """Of `TrainingArguments`: weights in float32 compute in bfloat16 on a GPU that has it."""
    return {"bf16": torch.cuda.is_available() and torch.cuda.is_bf16_supported() and model.dtype == torch.float32}
