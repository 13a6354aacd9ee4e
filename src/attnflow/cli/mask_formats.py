"""`attnflow mask export`, `debug`: masks for other kernels, and masks that people bring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from attnflow._core.markup import plural
from attnflow.cli._arguments import MaskLength, OutputOption, Settings, mask_argument
from attnflow.cli._output import BadUsage, JsonFlag, console, output_path, print_json, print_result, say, style, working

if TYPE_CHECKING:
    from attnflow.masks import Mask


def mask_export(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A mask of the catalogue, or a JSON file with a mask or a task.")
    ],
    to: Annotated[
        str,
        typer.Option("--to", metavar="FORMAT", help="flashmask, varlen, magi, flashinfer, te."),
    ],
    n: MaskLength = None,
    settings: Settings = None,
    output: OutputOption = None,
    json_output: JsonFlag = False,
) -> None:
    """Say a mask in the words of another kernel.

    What the format cannot say exits with 1 and names a pair (query, key). -o writes the same JSON as --json to a
    .json file, which every command takes in place of a mask's name.
    """
    from attnflow._core.parameters import find
    from attnflow.masks.export import FORMATS, NotExpressible

    make = find(to, FORMATS, "format")
    target = None if output is None else output_path(output, (".json",))
    mask = mask_argument(name, n, settings or [])
    try:
        with working(f"exporting {mask.name}"):
            form = make(mask)
            if target is not None:
                form.save(target)
    except NotExpressible as error:
        if json_output:
            refusal = {"format": error.format, "reason": str(error), "pair": error.pair, "allowed": error.allowed}
            print_json("attnflow.mask.export.refused/1", refusal)
        else:
            say(console(), str(error), style(ok=False))
        raise typer.Exit(1) from None
    if json_output:
        print_result(form)
        return
    screen = console()
    say(screen, str(form), "bold")
    for label, value in form.to_dict().items():
        if label not in ("attnflow", "version"):
            say(screen, f"{label:<16} {_short(value)}")
    if output is not None:
        say(screen, f"{'written':<16} {output}")


def mask_debug(
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help='A mask as .json, .npy, .pt or .safetensors; "-" reads JSON from stdin.'),
    ],
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="MASK", help="What it should be: a name of the catalogue, or a file."),
    ] = None,
    settings: Settings = None,
    masked_true: Annotated[
        bool,
        typer.Option("--masked-true", help="True, or 1, forbids, as in Transformer Engine; not in additive masks."),
    ] = False,
    json_output: JsonFlag = False,
) -> None:
    """Say what a mask is and what looks wrong with it.

    Tensors are [queries, keys], with one or two more axes before them; True or 1 allows, and of floats 0. JSON is what
    `mask export` writes, or a mask as the guide has it. Exits with 1 if something looks wrong: queries without keys,
    values that are no mask, a mask upside down, a few pairs that a well-known mask does not have. --set belongs to
    --against.
    """
    from attnflow.masks.diagnosis import diagnose, read_mask

    if settings and against is None:
        raise BadUsage("--set belongs to the mask of --against")
    with working(f"reading {file}"):
        mask, findings = read_mask(file, masked_true)
        other = None if against is None else _other(against, mask.num_queries, settings or [])
        diagnosis = diagnose(mask, Path(file).name, findings, other)
    if json_output:
        print_result(diagnosis)
    else:
        screen = console()
        verdict = "nothing looks wrong" if diagnosis.ok else _wrong(len(diagnosis.findings))
        say(screen, verdict, style(diagnosis.ok))
        for label, value in diagnosis.lines():
            say(screen, f"{label:<16}{value}")
    raise typer.Exit(0 if diagnosis.ok else 1)


def _other(against: str, num_queries: int, settings: list[str]) -> Mask:
    """The mask of `--against`, as long as the one that it is compared with, where it can be any length."""
    from attnflow.cli._arguments import is_file
    from attnflow.masks.spec import named_masks

    entry = None if is_file(against) else named_masks().get(against)
    sized = entry is not None and any(parameter.name == "n" for parameter in entry.parameters)
    has_n = any(text.split("=")[0].strip() == "n" for text in settings)
    return mask_argument(against, num_queries if sized and not has_n else None, settings)


def _wrong(count: int) -> str:
    return f"{plural(count, 'thing')} {'looks' if count == 1 else 'look'} wrong"


def _short(value: object, limit: int = 100) -> str:
    if isinstance(value, dict) and "values" in value:
        tensor = cast("dict[str, object]", value)
        value = f"{tensor['dtype']}{tensor['shape']} {tensor['values']}"
    text = str(value)
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."
