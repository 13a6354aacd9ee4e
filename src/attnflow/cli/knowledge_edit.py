"""`attnflow knowledge edit`: a model with other answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnflow.cli import _models
from attnflow.cli._arguments import integers
from attnflow.cli._output import BadUsage, JsonFlag, console, print_result, say, working


def knowledge_edit(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A causal language model; it stays as it is.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the edited model goes.")],
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="What the answer continues.")] = None,
    answer: Annotated[str | None, typer.Option("--answer", metavar="TEXT", help="What it shall say.")] = None,
    subject: Annotated[
        str, typer.Option("--subject", metavar="TEXT", help="What the prompt is about, a part of it.")
    ] = "",
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="Facts, a .jsonl file with prompt, answer, subject.")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="FILE", help="Texts, one a line, at which nothing may change.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="LIST", help="Whose entries are changed, such as 7,9,11.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Edit what a model says.

    Changes the values of feed-forward entries by the least that makes the model give other answers, and writes an
    ordinary transformers model. Exits with 1 if an answer is not what it says.
    """
    if (file is None) == (prompt is None) or (prompt is None) != (answer is None):
        raise BadUsage("give --prompt and --answer, or --file with facts")
    for path in (file, keep):
        if path is not None and not path.is_file():
            raise BadUsage(f"there is no file {path}")
    _models.require(model)
    chosen = None if layers is None else integers(layers, "--layers")
    from attnflow.knowledge.facts import Fact, read_facts
    from attnflow.knowledge.hf.edit import save_edited

    facts = [Fact(str(prompt), str(answer), subject)] if file is None else read_facts(file)
    texts = [] if keep is None else [line for line in keep.read_text(encoding="utf-8").splitlines() if line.strip()]
    with working(f"loading {model}") as spinner:
        report = save_edited(_models.load(model), facts, output, layers=chosen, untouched=texts, progress=spinner)
    if json_output:
        print_result(report)
    else:
        say(console(), str(report))
    raise typer.Exit(0 if report.ok else 1)
