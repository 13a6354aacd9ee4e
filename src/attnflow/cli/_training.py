"""What `attnflow bias train` runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from attnflow.cli import _models
from attnflow.cli._output import BadUsage, Spinner

if TYPE_CHECKING:
    from attnflow.bias import BiasConfig
    from attnflow.bias.hf.train import Trained
    from attnflow.bias.hf.training import TrainingConfig

_MARKS = 10  # entries of the log and evaluations in a run


def configs(kind: str, steps: int, batch: int, rate: float, seed: int) -> tuple[BiasConfig, TrainingConfig]:
    """The bias and how to train it, with logs, evaluations and checkpoints at even distances.

    Raises:
        BadUsage: no such kind, or a number out of range.
    """
    from attnflow.bias import BiasConfig
    from attnflow.bias.hf.training import TrainingConfig

    every = max(1, min(10, steps // _MARKS))
    seldom = every * max(1, steps // _MARKS // every)
    try:
        return BiasConfig(cast(Any, kind)), TrainingConfig(
            steps=steps,
            batch_size=batch,
            learning_rate=rate,
            log_every=every,
            save_every=seldom,
            evaluate_every=seldom,
            seed=seed,
        )
    except ValueError as error:
        raise BadUsage(str(error)) from error


def run(
    name: str,
    data: str,
    bias: BiasConfig,
    train: str,
    settings: TrainingConfig,
    length: int,
    output: Path,
    spinner: Spinner,
) -> Trained:
    """Load, attach, train, save.

    Raises:
        BadUsage: a model, a text or a folder that cannot be used.
    """
    import torch

    from attnflow.bias import attach
    from attnflow.bias.hf.documents import read_documents
    from attnflow.bias.hf.train import train as fit
    from attnflow.models.loader import _quiet

    try:
        documents = read_documents(data)
    except (ValueError, FileNotFoundError) as error:
        raise BadUsage(str(error)) from error
    loaded = _models.load(name)
    generates = getattr(loaded.model, "can_generate", None)
    if getattr(loaded.model.config, "is_encoder_decoder", False) or not (callable(generates) and generates()):
        raise BadUsage(f"training needs a causal language model, got a {type(loaded.model).__name__}")
    model: Any = loaded.model
    if train == "all":
        model.float()  # in half precision, small updates of the weights would be lost
    torch.manual_seed(settings.seed)
    attach(model, bias, train=cast(Any, train))
    spinner("evaluating the model as it is")

    def tell(step: int, entry: Mapping[str, float]) -> None:
        if "loss" in entry:
            spinner(f"step {step:,} of {settings.steps:,}, loss {entry['loss']:.3f}")

    more = {**_precision(model), "log_level": "error"}
    try:
        with _quiet():
            return fit(model, loaded.tokenizer, documents, output, settings, length=length, tell=tell, **more)
    except ValueError as error:
        raise BadUsage(str(error)) from error


def _precision(model: Any) -> dict[str, Any]:
    """Float32 weights compute in bfloat16 on a GPU that has it."""
    import torch

    return {"bf16": torch.cuda.is_available() and torch.cuda.is_bf16_supported() and model.dtype == torch.float32}
