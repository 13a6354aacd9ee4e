"""`attnflow bias show`: show what a learned bias does on one text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from attnflow.cli._arguments import FIGURES, FigureOption, load
from attnflow.cli._output import BadUsage, JsonFlag, console, output_path, print_result, say, working, write

app = typer.Typer(help="Learned attention biases: show.", rich_markup_mode=None)

_PROMPT: Final = "Q: John has 5 apples. He buys 6 more. A: 5 + 6 ="  # of the paper's figures


@app.command("show")
def bias_show(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The base model, or the folder of a saved bias.")],
    bias: Annotated[
        Path | None, typer.Option("--bias", metavar="DIR", help="The folder of a saved bias (af.bias.save).")
    ] = None,
    text: Annotated[str | None, typer.Option("--text", help="The text to read (default: the paper's sum).")] = None,
    generate: Annotated[
        int | None, typer.Option("--generate", metavar="N", min=1, help="Generate N tokens and show those steps.")
    ] = None,
    layer: Annotated[int | None, typer.Option("--layer", metavar="N", min=0, help="One layer (default: all).")] = None,
    query: Annotated[
        int | None, typer.Option("--query", metavar="N", help="Position of the query (default: -1, the last).")
    ] = None,
    head: Annotated[
        int | None, typer.Option("--head", metavar="N", min=0, help="Show one head (default: the mean of all).")
    ] = None,
    output: FigureOption = None,
    json_output: JsonFlag = False,
) -> None:
    """Show what a learned bias does on one text.

    Runs the model with and without its bias. For each layer it shows the keys that the bias draws a query to (+) or
    turns it away from (-). The bias is centred over each row, because softmax sees nothing else of it.
    """
    target = None if output is None else output_path(output, FIGURES, "a bias as a figure")
    with working(f"loading {model}") as spinner:
        from attnflow import bias as biases
        from attnflow.bias.hf.saving import read

        folder = Path(model) if bias is None else bias
        try:
            saved = read(folder)
        except FileNotFoundError as error:
            hint = "" if bias is not None else f"; {model} has no bias: give its folder with --bias DIR"
            raise BadUsage(f"{error}{hint}") from error
        name = saved.base_name if bias is None else model
        if not name:
            raise BadUsage(f"{folder} does not name its base model; give it: attnflow bias show MODEL --bias {folder}")
        spinner.stage(f"loading {name}")
        loaded = load(name)
        biases.load(loaded, folder)
        spinner.stage("running the model with and without its bias")
        captured = biases.capture(
            loaded,
            _PROMPT if text is None else text,
            layers=None if layer is None else [layer],
            queries=None if query is None or query < 0 else [query],
            heads=None if head is None else [head],
            generate=generate,
        )
        bias_map = replace(captured, model=name)
        view = bias_map.at(-1 if query is None else query, head)
        if target is not None:
            spinner.stage(f"writing {output}")
            write(bias_map, target, layer=layer, query=query, head=head)
    if json_output:
        print_result(view)
        return
    screen = console()
    say(screen, f"{name} with the bias {folder}", "bold")
    say(screen, str(view))
    if output is not None:
        say(screen, f"written: {output}")
