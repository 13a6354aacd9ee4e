"""`attnflow bias train MODEL`: give a model a bias and train it on text."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from attnflow.cli import _models
from attnflow.cli._output import BadUsage, JsonFlag, console, print_result, say, working


class Kind(StrEnum):
    """Kinds of bias, as `attnflow.bias` has a config for each."""

    guidance = "guidance"
    bilinear = "bilinear"
    dot = "dot"
    key = "key"
    cumulative = "cumulative"
    lowrank = "lowrank"
    dense = "dense"
    alibi = "alibi"
    relative = "relative"


class Part(StrEnum):
    """What is trained."""

    guidance = "guidance"
    everything = "all"


def bias_train(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="smollm2-135m, a folder, a GGUF file or a hub id; a causal model.")
    ],
    data: Annotated[
        str,
        typer.Option(
            "--data", metavar="DATA", help="A text file, a .jsonl file, a folder, shakespeare, or a data set."
        ),
    ],
    kind: Annotated[
        Kind, typer.Option("--kind", help="Guidance is the paper's; alibi takes the place of RoPE in every layer.")
    ] = Kind.guidance,
    train: Annotated[Part, typer.Option("--train", help="Only the bias, or the model as well.")] = Part.guidance,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Optimiser steps.")] = 1000,
    length: Annotated[int, typer.Option("--length", metavar="N", min=2, help="Tokens of a packed row.")] = 512,
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Rows of a step.")] = 8,
    rate: Annotated[
        float | None,
        typer.Option("--rate", metavar="X", help="Peak learning rate (default: 1e-3; 2e-5 with --train all)."),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            "--every",
            metavar="N",
            min=1,
            help="Steps between evaluations, and between checkpoints (default: a tenth of all, at least 50; a "
            "twentieth, at least 10).",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="For the results.")] = Path(
        "attnflow-bias"
    ),
    json_output: JsonFlag = False,
) -> None:
    """Train a bias on text.

    Attaches a bias (every other layer; alibi: every layer, without RoPE), trains it (AdamW, cosine, warm-up; packed
    rows), and writes it to a folder with the curve as JSON, CSV and figure. A tenth of the text is held out. If it is
    interrupted, the same command goes on from the last checkpoint.
    """
    peak = rate if rate is not None else (1e-3 if train is Part.guidance else 2e-5)
    _models.require(model)
    with working("looking at the text") as spinner:
        from attnflow import bias
        from attnflow.bias.documents import read_documents
        from attnflow.bias.kinds import KINDS
        from attnflow.bias.run import check_folder, last_checkpoint, run_settings

        part = train.value
        config = KINDS[kind.value]()
        spacing: dict[str, Any] = {}
        if every is not None:
            spacing = {"log_every": _log_every(every), "save_every": every, "evaluate_every": every}
        try:  # what is wrong is said before the model is loaded
            settings = bias.TrainingConfig(steps=steps, batch_size=batch, learning_rate=peak, **spacing)
            check_folder(output, run_settings(settings, [config], part, length))
            documents = read_documents(data)
        except (ValueError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
            raise BadUsage(str(error)) from error
        import torch

        from attnflow.bias.hf.training import mixed_precision

        spinner.stage(f"loading {model}")
        loaded = _models.load(model)
        if train is Part.everything:
            loaded.model.float()  # in half precision, small updates of the weights would be lost
        torch.manual_seed(settings.seed)

        def progress(step: int, total: int, what: str) -> None:
            if sys.stderr.isatty():
                spinner(step, total, what)
            else:  # every logged step
                print(f"step {step:,} of {total:,}: {what}", file=sys.stderr, flush=True)

        try:
            handle = bias.attach(loaded, config, train=part)
            spinner.stage("evaluating the model as it is")
            more: dict[str, Any] = {**mixed_precision(loaded.model), "log_level": "error"}
            done = bias.train(loaded, documents, output, settings, length=length, progress=progress, **more)
        except ValueError as error:
            raise BadUsage(str(error)) from error
        except KeyboardInterrupt as error:
            step = last_checkpoint(output)
            where = "from the start: no checkpoint was due yet" if step is None else f"from step {step:,}"
            print(f"attnflow: interrupted; the same command goes on {where}", file=sys.stderr)
            raise typer.Exit(130) from error
    if json_output:
        print_result(done)
        return
    screen = console()
    say(screen, str(handle), "bold")
    say(screen, str(done))
    say(screen, f"written: {output} (af.bias.load(model, {str(output)!r}))")


def _log_every(every: int) -> int:
    """The largest number of steps up to 10 that divides `every`."""
    return next(number for number in range(min(10, every), 0, -1) if every % number == 0)
