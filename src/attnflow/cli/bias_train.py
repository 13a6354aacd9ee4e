"""`attnflow bias train MODEL`: give a model a bias and train it on text."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attnflow.cli._output import JsonFlag, console, print_json, say, working


class Kind(StrEnum):
    """Kinds of bias, as `BiasConfig` has them."""

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
    kind: Annotated[Kind, typer.Option("--kind", help="Guidance is the paper's.")] = Kind.guidance,
    train: Annotated[Part, typer.Option("--train", help="Only the bias, or the model as well.")] = Part.guidance,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Optimiser steps.")] = 1000,
    length: Annotated[int, typer.Option("--length", metavar="N", min=2, help="Tokens of a packed row.")] = 512,
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Rows of a step.")] = 8,
    rate: Annotated[
        float | None,
        typer.Option("--rate", metavar="X", help="Peak learning rate (default: 1e-3; 2e-5 with --train all)."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of initialisation and order.")] = 0,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="For the results.")] = Path(
        "attnflow-bias"
    ),
    json_output: JsonFlag = False,
) -> None:
    """Train a bias on text.

    Attaches a bias to every other layer, trains it (AdamW, cosine, warm-up; packed rows), and writes it to a folder
    with the curve as JSON, CSV and figure. A tenth of the text is held out. If it is interrupted, the same command goes
    on from the last checkpoint.
    """
    from attnflow.cli import _training

    peak = rate if rate is not None else (1e-3 if train is Part.guidance else 2e-5)
    with working(f"loading {model}") as spinner:
        config, settings = _training.configs(kind.value, steps, batch, peak, seed)
        done = _training.run(model, data, config, train.value, settings, length, output, spinner)
    if json_output:
        print_json("attnflow.bias.train/1", {"model": model, "data": data, "written": str(output), **done.to_dict()})
        return
    screen = console()
    say(screen, str(done.summary), "bold")
    say(screen, f"held-out loss {done.before:.4f} -> {done.after:.4f} nats per token, in {steps:,} steps")
    say(screen, f"written: {output} (af.bias.load(model, {str(output)!r}))")
