"""`train`: a bias from attached to saved, in one call that can be killed and called again."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, cast

import transformers
from torch.utils.data import Subset
from transformers import PreTrainedModel, TrainerCallback
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint

from attnflow._core.errors import MissingExtra
from attnflow._core.version import __version__
from attnflow.bias.hf.attach import describe, record_of
from attnflow.bias.hf.documents import split_documents, tokenize
from attnflow.bias.hf.hooks import CHILD
from attnflow.bias.hf.packing import Packed
from attnflow.bias.hf.saving import save_pretrained
from attnflow.bias.hf.summary import BiasSummary, summary
from attnflow.bias.hf.training import BiasTrainer, TrainingConfig, bias_alone, trainer

Tell = Callable[[int, Mapping[str, float]], None]

RESULTS: Final = "training.json"
_HELD_OUT_ROWS: Final = 64


@dataclass(frozen=True)
class Trained:
    """What came out of training.

    Attributes:
        folder: where everything lies: the bias (`af.bias.load`), training.json, curve.csv, curve.png, checkpoints, and
            `model/` if the base model was trained, too.
        summary: of the bias.
        before: held-out loss without training, in nats per token.
        after: the same at the end.
        log: entries of `Trainer`'s log.
    """

    folder: Path
    summary: BiasSummary
    before: float
    after: float
    log: tuple[Mapping[str, float], ...]

    def curve(self) -> list[dict[str, float | int]]:
        """One entry for each logged step, training and evaluation side by side."""
        found: dict[int, dict[str, float | int]] = {0: {"step": 0, "eval_loss": self.before}}
        for entry in self.log:
            kept = {k: v for k, v in entry.items() if k in _SHOWN or k.startswith("bias/")}
            if kept:
                found.setdefault(int(entry["step"]), {"step": int(entry["step"])}).update(kept)
        return [found[step] for step in sorted(found)]

    def to_dict(self) -> dict[str, object]:
        """As JSON holds it."""
        return {
            "held_out_before": self.before,
            "held_out_after": self.after,
            "bias_parameters": self.summary.parameters,
            "trained_parameters": self.summary.trainable,
            "curve": self.curve(),
        }

    def to_csv(self, path: Path) -> None:
        """The curve, one line for each logged step."""
        curve = self.curve()
        names = ["step", *dict.fromkeys(name for entry in curve for name in entry if name != "step")]
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(curve)

    def figure(self) -> Any:
        """Loss and |B| against steps.

        Raises:
            MissingExtra: matplotlib is not installed.
        """
        if find_spec("matplotlib") is None:
            raise MissingExtra("matplotlib", "report", "the figure")
        from matplotlib.figure import Figure

        drawn, curve = Figure(figsize=(9.0, 3.6), layout="constrained"), self.curve()
        left, right = cast(Sequence[Any], drawn.subplots(1, 2))
        for name, label, style in (("loss", "training", "-"), ("eval_loss", "held out", "o-")):
            points = [(entry["step"], entry[name]) for entry in curve if name in entry]
            left.plot(*zip(*points, strict=True), style, markersize=4, linewidth=1.3, label=label)
        left.set_ylabel("loss (nats per token)")
        left.legend(frameon=False)
        layers = self._layers()
        for name, shade in zip(layers, _shades(len(layers)), strict=True):
            points = [(entry["step"], entry[name]) for entry in curve if name in entry]
            right.plot(*zip(*points, strict=True), color=shade, linewidth=1.2)
        for place in sorted({0, len(layers) - 1} if layers else ()):
            name = layers[place].rpartition("_")[2]
            right.plot([], [], color=_shades(len(layers))[place], label=f"layer {name}")
        if layers:
            right.legend(frameon=False)
        right.set_ylabel("|B|, row-centred, by layer")
        for axes in (left, right):
            axes.set_xlabel("step")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.spines[["top", "right"]].set_visible(False)
        return drawn

    def _layers(self) -> list[str]:
        return list(dict.fromkeys(name for entry in self.log for name in entry if name.startswith("bias/")))


_SHOWN: Final = ("loss", "learning_rate", "eval_loss")


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    folder: str | Path,
    config: TrainingConfig = TrainingConfig(),  # noqa: B008 - frozen
    *,
    length: int = 512,
    tell: Tell | None = None,
    **arguments: Any,
) -> Trained:
    """Train the attached bias, or with `attach(..., train="all")` model and bias, on text, and save everything.

    A tenth of the documents is held out (of one document its last tenth), at most 64 rows of it are evaluated. Called
    again with the same folder, model and settings after it was killed, it goes on from the last checkpoint, and its
    losses are those of a run that was not.

    Args:
        model: a causal language model with a bias (`af.bias.attach`).
        tokenizer: its tokenizer.
        documents: text, such as `af.bias.read_documents("notes.txt")`.
        folder: for the results; see `Trained`.
        config: how to train.
        length: tokens of a row.
        tell: called as tell(step, entry) with each entry of the log.
        arguments: more of `TrainingArguments`, such as `bf16=True`.

    Raises:
        ValueError: no bias is attached, too little text, or a folder that holds a run with other settings or data,
            FSDP, several GPUs in one process.
    """
    record, place = record_of(model), Path(folder)
    training, held = split_documents(tokenize(documents, tokenizer))
    rows, held_rows = Packed(training, length), Packed(held, length)
    step = max(1, len(held_rows) // _HELD_OUT_ROWS)
    chosen = Subset(held_rows, list(range(0, len(held_rows), step))[:_HELD_OUT_ROWS])
    alone = bias_alone(model)
    settings = {
        "training": config.to_dict(),
        "bias": describe(record.biases),
        "train": "guidance" if alone else "all",
        "length": length,
        "model": str(getattr(model.config, "_name_or_path", "")),
        "data": hashlib.sha256(rows.tokens.numpy().tobytes()).hexdigest(),
    }
    more: dict[str, Any] = {"disable_tqdm": True, **arguments}
    made = trainer(
        model,
        rows,
        config,
        place / "checkpoints",
        held_out=chosen,
        callbacks=[_Telling(tell)],
        **more,
    )
    made.remove_callback(PrinterCallback)
    if made.args.fsdp:
        raise ValueError("FSDP shards what is saved here as a whole; use af.bias.trainer, and save its checkpoints")
    if made.is_world_process_zero():  # one of several processes writes the results
        _claim(place, settings)
    before = made.evaluate()["eval_loss"]
    made.train(resume_from_checkpoint=get_last_checkpoint(str(place / "checkpoints")))
    result = Trained(place, summary(model), before, _after(made), tuple(made.state.log_history))
    if made.is_world_process_zero():
        _save(model, tokenizer, result, settings, alone)
    made.accelerator.wait_for_everyone()
    return result


class _Telling(TrainerCallback):
    def __init__(self, tell: Tell | None) -> None:
        self.tell = tell

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by `Trainer` with each entry of the log."""
        if self.tell is not None:
            self.tell(int(state.global_step), kwargs["logs"])


def _after(made: BiasTrainer) -> float:
    last = [entry for entry in made.state.log_history if "eval_loss" in entry]
    if last and last[-1]["step"] == made.state.global_step:
        return float(last[-1]["eval_loss"])
    return float(made.evaluate()["eval_loss"])


def _claim(folder: Path, settings: Mapping[str, object]) -> None:
    """Note the settings; a folder with others is refused, so that a run never goes on as a different one."""
    path, ours = folder / RESULTS, json.loads(json.dumps(settings))
    if path.is_file():
        theirs = json.loads(path.read_text(encoding="utf-8")).get("settings", {})
        other = sorted(key for key in ours if theirs.get(key) != ours[key])
        if other:
            raise ValueError(f"{folder} holds a run with other settings ({', '.join(other)}): choose another folder")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"settings": ours}, indent=1) + "\n", encoding="utf-8")


def _save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, result: Trained, settings: object, alone: bool
) -> None:
    folder = result.folder
    save_pretrained(model, folder)
    if not alone:
        base = {name: tensor for name, tensor in model.state_dict().items() if f".{CHILD}." not in name}
        model.save_pretrained(folder / "model", state_dict=base)
        tokenizer.save_pretrained(folder / "model")
    versions = {"attnflow": __version__, "transformers": transformers.__version__}
    about = {"settings": settings, "versions": versions, **result.to_dict()}
    (folder / RESULTS).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    result.to_csv(folder / "curve.csv")
    if find_spec("matplotlib") is not None:
        result.figure().savefig(folder / "curve.png", dpi=150)


def _shades(count: int) -> list[str]:
    """From light to dark, one for each layer."""
    return [
        f"#{int(190 - 160 * k / max(1, count - 1)):02x}{int(205 - 120 * k / max(1, count - 1)):02x}d0"
        for k in range(count)
    ]
