"""`attnflow audit MODEL`: does information flow against the order that a model declares?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnflow.cli._arguments import describe, integers, is_file, load, mask_argument, require, sample
from attnflow.cli._output import BadUsage, JsonFlag, console, output_path, print_json, print_result, say, working

if TYPE_CHECKING:
    from attnflow.audit import AuditReport
    from attnflow.masks import Mask


def audit(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="smollm2-135m, minilm, a folder, a GGUF file, a hub id, or SCRIPT.py:NAME of a function or module.",
        ),
    ],
    text: Annotated[str | None, typer.Option("--text", help="The text to read (default: Shakespeare).")] = None,
    ids: Annotated[str | None, typer.Option("--ids", metavar="5,6,7", help="Token ids in place of a text.")] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", min=2, help="Read at most so many tokens (default: 64).")
    ] = None,
    order: Annotated[
        str | None,
        typer.Option("--order", metavar="MASK", help="causal, full or a JSON file (default: what the model declares)."),
    ] = None,
    passes: Annotated[int, typer.Option("--passes", metavar="N", min=1, help="Inputs to change.")] = 32,
    cache: Annotated[bool, typer.Option("--cache", help="Also audit decoding with the cache.")] = False,
    double: Annotated[bool, typer.Option("--float64", help="Audit in float64, which sees weaker leaks.")] = False,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Also save the measured order (16 tokens).")
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--against", metavar="FILE", help="Also compare with a saved order.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Audit a model for leaks.

    Changes inputs and watches the output of every module: what moves although the order keeps it apart is a leak,
    shown with the layer and module where it starts. Exits with 1 if there is one, if the order forbids nothing, or if
    the measured order differs from a saved one.

    SCRIPT.py:NAME is a function of token ids (a loss, an evaluation), a module, or a function without arguments that
    makes one. The script is run, as python SCRIPT.py would run it. The function is called with ids [2, 32] below 50, or
    with --ids; what it returns for a token may depend on no later one.
    """
    golden = _golden(against, save, [text, ids, tokens])
    if ".py:" in model:
        if text is not None or save is not None or golden is not None:
            raise BadUsage(
                "a script's function takes token ids: give --ids, and leave out --text, --save and --against"
            )
        report = _of_script(model, ids, tokens, order, passes, cache, double)
        print_result(report) if json_output else print(f"{model}\n{report}")
        raise typer.Exit(0 if report.ok else 1)
    target = None if save is None else output_path(save, (".json",))
    if text is not None and ids is not None:
        raise BadUsage("give --text or --ids, not both")
    require(model)
    token_ids = None if ids is None else integers(ids, "--ids")
    declared = _mask(order)
    with working(f"loading {model}") as spinner:
        import torch

        from attnflow.audit import check
        from attnflow.audit.measurement import MeasuredOrder, record
        from attnflow.models.loaded import text_inputs

        loaded = load(model, tokenizer=ids is None and golden is None, without="give token ids, as in --ids 5,6,7")
        if golden is None:
            limit = tokens or (64 if save is None else 16)  # measuring takes two passes for each token
            inputs = text_inputs(loaded, token_ids or (sample() if text is None else text), limit)
        else:
            saved = MeasuredOrder.from_dict(golden)
            saved.require(type(loaded.model).__name__, sum(p.numel() for p in loaded.model.parameters()))
            inputs = saved.arguments()
        declared = declared or _named(order, sum(tensor.shape[1] for tensor in inputs.values()))
        dtype = torch.float64 if double else None
        report = check(loaded, inputs, declared, cache=cache, passes=passes, dtype=dtype, progress=spinner)
        measured = None if save is None and golden is None else record(loaded, inputs, progress=spinner)
    if target is not None and measured is not None:
        measured.save(target)
    difference = None if golden is None or measured is None else measured.difference(MeasuredOrder.from_dict(golden))
    if json_output and difference is not None:
        print_json("attnflow.audit.against/1", {"audit": report.to_dict(), "difference": difference.to_dict()})
    elif json_output:
        print_result(report)
    else:
        say(console(), describe(model, loaded), "bold")
        print(report)
        if difference is not None:
            print(f"{against}: {difference}")
        elif measured is not None:
            print(f"{save}: {measured}")
    raise typer.Exit(0 if report.ok and (difference is None or difference.ok) else 1)


def _mask(order: str | None) -> Mask | None:
    """Reads the mask of a file, before anything is loaded; None for an order by name."""
    if order in (None, "causal", "full"):
        return None
    from attnflow._core.plain import close_to

    if not is_file(order):
        near = close_to(order, ("causal", "full"))
        raise BadUsage(f"unknown order {order!r}{near} (causal, full, or a JSON file with a mask)")
    return mask_argument(order, None, [])


def _named(order: str | None, size: int) -> Mask | None:
    """Returns the order that a name stands for."""
    from attnflow import masks

    return {"causal": masks.causal, "full": masks.full}[order](size) if order in ("causal", "full") else None


def _of_script(
    target: str, ids: str | None, tokens: int | None, order: str | None, passes: int, cache: bool, double: bool
) -> AuditReport:
    """Audits what a name in a script means."""
    declared = _mask(order)
    given = None if ids is None else integers(ids, "--ids")[:tokens]
    with working(f"running {target}") as spinner:
        import torch

        from attnflow.audit import check
        from attnflow.audit.scripts import blaming, example, load

        found = load(target)
        with blaming(target):
            inputs = example(found, tokens or 32, given)
            declared = declared or _named(order, inputs.shape[1])
            dtype = torch.float64 if double else None
            return check(found, inputs, declared, cache=cache, passes=passes, dtype=dtype, progress=spinner)


def _golden(against: Path | None, save: Path | None, given: list[object]) -> dict[str, object] | None:
    """Reads the saved order from a file, before anything is loaded."""
    if against is None:
        return None
    if save is not None:
        raise BadUsage("give --save or --against, not both: --save writes the file that --against reads")
    if any(value is not None for value in given):
        raise BadUsage("--against asks the model what the saved order was asked: leave out --text, --ids and --tokens")
    from attnflow._core.plain import read_json

    values = read_json(against)
    if values.get("attnflow") != "MeasuredOrder":
        raise BadUsage(f"{against} holds no measured order: write one with attnflow audit MODEL --save {against}")
    return values
