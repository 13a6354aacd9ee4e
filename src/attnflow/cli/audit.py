"""`attnflow audit MODEL`: does information flow against the order that a model declares?"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from attnflow.cli._arguments import integers, is_file, mask_argument
from attnflow.cli._models import describe, load, require, sample
from attnflow.cli._output import BadUsage, JsonFlag, console, print_result, say, working


def audit(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="smollm2-135m, minilm, a folder, a GGUF file or a hub id.")
    ],
    text: Annotated[str | None, typer.Option("--text", help="The text to read (default: Shakespeare).")] = None,
    ids: Annotated[str | None, typer.Option("--ids", metavar="5,6,7", help="Token ids in place of a text.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=2, help="Read at most so many tokens.")] = 64,
    order: Annotated[
        str | None,
        typer.Option("--order", metavar="MASK", help="causal, full or a JSON file (default: what the model declares)."),
    ] = None,
    mode: Annotated[
        Literal["perturb", "vjp"], typer.Option("--mode", help="Change inputs, or pull gradients back.")
    ] = "perturb",
    passes: Annotated[int, typer.Option("--passes", metavar="N", min=1, help="Inputs to change.")] = 32,
    cache: Annotated[bool, typer.Option("--cache", help="Also audit decoding with the cache.")] = False,
    double: Annotated[bool, typer.Option("--float64", help="Audit in float64, which sees weaker leaks.")] = False,
    json_output: JsonFlag = False,
) -> None:
    """Audit a model for leaks.

    Changes inputs and watches the output of every module: what moves although the order keeps it apart is a leak,
    shown with the layer and module where it starts. Exits with 1 if there is one, or if the order forbids nothing.
    """
    if text is not None and ids is not None:
        raise BadUsage("give --text or --ids, not both")
    require(model)
    token_ids = None if ids is None else integers(ids, "--ids")
    declared = None
    if order not in (None, "causal", "full"):
        from attnflow._core.plain import close_to

        if not is_file(order):
            near = close_to(order, ("causal", "full"))
            raise BadUsage(f"unknown order {order!r}{near} (causal, full, or a JSON file with a mask)")
        declared = mask_argument(order, None, [])
    if cache and mode == "vjp":
        raise BadUsage("--cache is audited by changing inputs: leave out --mode vjp")
    with working(f"loading {model}") as spinner:
        import torch

        from attnflow import masks
        from attnflow.audit import check
        from attnflow.audit.text import text_inputs

        loaded = load(model, tokenizer=ids is None, without="give token ids, as in --ids 5,6,7")
        inputs = text_inputs(loaded, token_ids or (sample() if text is None else text), tokens)
        size = sum(tensor.shape[1] for tensor in inputs.values())
        if order in ("causal", "full"):
            declared = masks.causal(size) if order == "causal" else masks.full(size)
        report = check(
            loaded,
            inputs,
            declared,
            mode,
            cache=cache,
            passes=passes,
            dtype=torch.float64 if double else None,
            progress=spinner,
        )
    if json_output:
        print_result(report)
    else:
        screen = console()
        say(screen, describe(model, loaded), "bold")
        screen.print(report) if screen.is_terminal else print(report)  # to a file with room for the names of modules
    raise typer.Exit(0 if report.ok else 1)
