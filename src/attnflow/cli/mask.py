"""`attnflow mask ...`: list and show masks, check and merge tasks, export a mask, diagnose one you were given."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from attnflow._core.markup import aligned, percent, plural
from attnflow.cli import _arguments as arguments
from attnflow.cli._arguments import MaskLength, OutputOption, Settings, argument, mask_argument, option
from attnflow.cli._early import family_names, format_names
from attnflow.cli._output import BadUsage, JsonFlag, console, output_path, print_json, say, show, style, working, write

if TYPE_CHECKING:
    from attnflow.masks import Mask

app = typer.Typer(help="Masks and tasks: list, show, check, merge, export, debug.", rich_markup_mode=None)

_SUFFIXES: Final = (".svg", ".png", ".pdf", ".html")


@app.command("list")
def mask_list(json_output: JsonFlag = False) -> None:
    """List the masks of the catalogue.

    Each has its parameters and its relation. q is the query and k the key, both counted from 0.
    """
    from attnflow.masks.registry import named_masks

    if json_output:
        masks = [
            {
                "name": entry.name,
                "signature": entry.signature,
                "relation": entry.summary,
                "parameters": [asdict(parameter) for parameter in entry.parameters],
                "example": f"attnflow mask show {entry.name} {arguments.example(entry.name)}",
            }
            for entry in named_masks().values()
        ]
        print_json("attnflow.mask.list/1", {"masks": masks})
        return
    screen = console()
    for entry in named_masks().values():
        say(screen, textwrap.fill(entry.signature, screen.width, subsequent_indent="    "), "bold")
        say(screen, textwrap.fill(entry.summary, screen.width, initial_indent="    ", subsequent_indent="    "))
    say(screen, "\nShow one: attnflow mask show sliding_window --n 16 --set window=4")
    say(screen, "For a mask of your own, give a JSON file in place of the name.")


@app.command("show")
def mask_show(
    name: Annotated[str, argument("NAME", "A mask of the catalogue, a JSON file with a mask or a task, or a model.")],
    n: MaskLength = None,
    settings: Settings = None,
    text: Annotated[
        str | None, option("--text", "Show the masks that the model NAME really uses for this text.")
    ] = None,
    ids: Annotated[str | None, option("--ids LIST", "Token ids in place of --text, such as 5,6,7.")] = None,
    block_size: Annotated[
        int | None, option("--block-size N>=1", "Block size to count (default: 128 and smaller).")
    ] = None,
    output: OutputOption = None,
    json_output: JsonFlag = False,
) -> None:
    """Show a mask as a picture and in numbers.

    In the picture each row is a query and each column a key. The numbers are the share of allowed pairs, the depth
    (layers until all information has flowed), the classes and the Hasse diagram of the order, and the block sparsity.
    -o writes .svg, .png, .pdf or .html.

    For a model and a --text it shows the masks under which the model attends to that text, read off its attention: each
    mask once, with its layers, and the tokens beside the rows.
    """
    target = _target(output)
    if text is not None or ids is not None:
        others = n is not None or bool(settings) or block_size is not None
        _of_model(name, text, ids, others, target, output, json_output)
        return
    _refuse_model(name)
    mask = mask_argument(name, n, settings or [])
    with working(f"analysing {mask.name}"):
        numbers = _numbers(mask, block_size)
        if target is not None:
            write(mask, target)
    if json_output:
        print_json("attnflow.mask.show/1", numbers)
    else:
        _say(mask, _lines(numbers), output)


@app.command("check")
def mask_check(
    spec: Annotated[str, argument("SPEC.json", 'A JSON file with inputs, labels and mask; "-" reads stdin.')],
    layers: Annotated[int | None, option("--layers N>=0", "Layers of the model (default: any number).")] = None,
    json_output: JsonFlag = False,
) -> None:
    """Prove that no label of a task leaks, or show the path of the leak.

    The path lists the positions that the label passes, layer by layer. Exits with 1 if a label leaks.
    """
    from attnflow._core.plain import read_json
    from attnflow.tasks import Task, check

    task = Task.from_dict(read_json(spec), spec)
    with working(f"checking {plural(task.size, 'position')}"):
        report = check(task, layers)
    show(report, json_output, ok=report.ok)
    raise typer.Exit(0 if report.ok else 1)


@app.command("merge")
def mask_merge(
    name: Annotated[str, argument("FAMILY", "causal_lm, block_two_stream, butterfly, ...")],
    tokens: Annotated[int, option("--tokens N>=1<=10000", "Number of tokens of the sample.")],
    settings: Settings = None,
    output: OutputOption = None,
    json_output: JsonFlag = False,
) -> None:
    """Merge a family of tasks into one mask and prove it.

    Derives the smallest sequence and mask that train every task of the family in one forward pass. Compares the mask
    with its closed form, and proves that no label leaks. Exits with 1 if either fails. -o writes .svg, .png, .pdf or
    .html.
    """
    target = _target(output)
    arguments.one_of(name, family_names(), "family")
    from attnflow._core.parameters import find
    from attnflow.tasks.derivation import derive, named_families

    family = find(name, named_families(), "family")
    with working(f"merging {name} of {tokens} tokens"):
        derivation = derive(family, tokens, family.read(arguments.settings_from(settings or [])))
        merged = derivation.merged
        mask = merged.task.mask
        if target is not None:
            write(mask, target)
    if json_output:
        facts = {name: getattr(derivation, name) for name in ("ok", "call", "closed_form", "equals_closed_form")}
        facts |= {"subtasks": len(merged.positions), "nodes": merged.num_nodes, "is_minimal": merged.is_minimal}
        facts |= {"check": derivation.report.to_dict(), "task": merged.task.to_dict()}
        print_json("attnflow.mask.merge/1", facts)
    else:
        say(console(), derivation.call, "bold")
        _say(mask, derivation.lines(), output)
    raise typer.Exit(0 if derivation.ok else 1)


@app.command("export")
def mask_export(
    name: Annotated[str, argument("NAME", "A mask of the catalogue, or a JSON file with a mask or a task.")],
    to: Annotated[str, option("--to FORMAT", "flashmask, varlen or magi.")],
    n: MaskLength = None,
    settings: Settings = None,
    json_output: JsonFlag = False,
) -> None:
    """Export a mask to another attention kernel.

    If the kernel's format cannot express the mask, the command names a pair (query, key) as the reason and exits with
    1. Save what --json prints as a .json file: every command takes that file in place of a mask's name.
    """
    arguments.one_of(to, format_names(), "format")
    arguments.require_mask(name, n, settings or [])
    from attnflow._core.parameters import find
    from attnflow.masks.export import FORMATS, NotExpressible

    make = find(to, FORMATS, "format")
    mask = mask_argument(name, n, settings or [])
    try:
        with working(f"exporting {mask.name}"):
            form = make(mask)
    except NotExpressible as error:
        if json_output:
            refusal = {"format": error.format, "reason": str(error), "pair": error.pair, "allowed": error.allowed}
            print_json("attnflow.mask.export.refused/1", refusal)
        else:
            say(console(), str(error), style(ok=False))
        raise typer.Exit(1) from None
    fields = {label: value for label, value in form.to_dict().items() if label not in ("attnflow", "version")}
    table = aligned([[label, _short(value)] for label, value in fields.items()], left=[0, 1])
    show(form, json_output, f"{form}\n{table}")


@app.command("debug")
def mask_debug(
    file: Annotated[str, argument("FILE", 'A mask as .json, .npy, .pt or .safetensors; "-" reads JSON from stdin.')],
    masked_true: Annotated[
        bool, option("--masked-true", "True or 1 forbids a pair, as in Transformer Engine (not additive masks).")
    ] = False,
    json_output: JsonFlag = False,
) -> None:
    """Diagnose a mask you were given.

    Finds the known mask that it equals and what looks wrong with it. A tensor is [queries, keys], with up to two more
    axes before them; True or 1 allows a pair, or 0.0 in an additive mask. JSON is a mask as the guide shows it, or what
    `mask export --json` printed. Exits with 1 if something looks wrong: queries without keys, an inverted mask, or a
    few pairs more or fewer than a well-known mask.
    """
    from attnflow.masks.diagnosis import diagnose, read_mask

    with working(f"reading {file}"):
        diagnosis = diagnose(read_mask(file, masked_true))
    show(diagnosis, json_output, ok=diagnosis.ok)
    raise typer.Exit(0 if diagnosis.ok else 1)


def _of_model(
    name: str, text: str | None, ids: str | None, others: bool, target: Path | None, written: Path | None, plain: bool
) -> None:
    if others or arguments.is_file(name) or arguments.is_mask(name):
        raise BadUsage("--text and --ids take a model, without --n, --set and --block-size")
    inputs = arguments.text_or_ids(text, ids)
    arguments.require_model(name, with_settings=False)
    with working(f"loading {name}") as spinner:
        from attnflow import masks

        loaded = arguments.load(name, ids is None, "give token ids, as in --ids 5,6,7")
        spinner.stage("one forward pass")
        found = replace(masks.from_model(loaded, inputs), model=name)
        if target is not None:
            write(found, target)
    show(found, plain, str(found), written=written)


def _refuse_model(name: str) -> None:
    """A model alone has no mask, only for a text."""
    if arguments.is_file(name) or arguments.is_mask(name):
        return
    try:
        arguments.require(name)
    except BadUsage:  # not a model either
        return
    raise BadUsage(f'{name} is a model; its masks are those for a text: attnflow mask show {name} --text "..."')


def _target(output: Path | None) -> Path | None:
    drawn = "" if output is None or output.suffix.lower() == ".svg" else "a mask as .png or .pdf"
    return None if output is None else output_path(output, _SUFFIXES, drawn)


def _short(value: object, limit: int = 100) -> str:
    if isinstance(value, dict) and "values" in value:
        tensor = cast("dict[str, object]", value)
        value = f"{tensor['dtype']}{tensor['shape']} {tensor['values']}"
    text = str(value)
    return text if len(text) <= limit else f"{text[: text.rfind(' ', 0, limit - 4)]} ..."


def _numbers(mask: Mask, block_size: int | None) -> dict[str, Any]:
    """Returns pairs, order (None with a reason in `no_order`) and block sparsity, as plain data."""
    from attnflow.report.mask import block_sizes, flow_of

    flow, no_order = flow_of(mask)
    order = flow and {
        "depth": flow.depth,
        "is_dense": flow.is_dense,
        "num_classes": len(flow.classes),
        "largest_class": max(map(len, flow.classes), default=0),
        "num_hasse_edges": len(flow.hasse.edges),
        "num_levels": max(flow.hasse.levels, default=-1) + 1,
    }
    sizes = block_sizes(mask) if block_size is None else [block_size]
    return {
        "name": mask.name,
        "parameters": dict(mask.parameters),
        "num_queries": mask.num_queries,
        "num_keys": mask.num_keys,
        "allowed_pairs": mask.nnz,
        "density": mask.density,
        "order": order,
        "no_order": no_order or None,
        "blocks": [asdict(mask.block_sparsity(size)) for size in sizes],
    }


def _lines(numbers: Mapping[str, Any]) -> list[tuple[str, str]]:
    total, order = numbers["num_queries"] * numbers["num_keys"], numbers["order"]
    lines = [("allowed pairs", f"{numbers['allowed_pairs']:,} of {total:,} ({percent(numbers['density'])})")]
    if order is None:
        lines.append(("order", f"none: {numbers['no_order']}"))
    else:
        largest = order["largest_class"]
        of = f", the largest with {largest:,} positions" if largest > 1 else ""
        lines += [
            ("depth", plural(order["depth"], "layer")),
            ("one layer suffices", "yes" if order["is_dense"] else "no"),
            ("classes", f"{order['num_classes']:,}{of}"),
            ("Hasse diagram", f"{plural(order['num_hasse_edges'], 'edge')}, {plural(order['num_levels'], 'level')}"),
        ]
    for block in numbers["blocks"]:
        full, partial, empty = block["full"], block["partial"], block["empty"]
        blocks = full + partial + empty
        share = f" ({percent(empty / blocks)} skipped)" if blocks else ""
        lines.append((f"blocks of {block['block']}", f"{full:,} full, {partial:,} partial, {empty:,} empty{share}"))
    return lines


def _say(mask: Mask, lines: Sequence[tuple[str, str]], written: Path | None) -> None:
    from attnflow.report.mask_picture import mask_text

    screen = console()
    say(screen, mask_text(mask, width=max(20, min(100, screen.width))) + "\n")
    lines = [*lines, *([] if written is None else [("written", str(written))])]
    width = max(14, *(len(label) for label, _ in lines)) + 2
    for label, value in lines:
        say(screen, f"{label:<{width}}{value}")
