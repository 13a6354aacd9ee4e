"""`attnflow knowledge fit` and `ask`: teach a model to read a store, and ask it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from attnflow.cli import _models
from attnflow.cli._arguments import integers
from attnflow.cli._output import BadUsage, JsonFlag, console, print_result, say, working
from attnflow.cli.knowledge import opened

_Model = Annotated[str, typer.Argument(metavar="MODEL", help="A causal language model; it stays as it is.")]
_Store = Annotated[str, typer.Argument(metavar="STORE", help="A store that `build --values` made.")]


def knowledge_fit(
    model: _Model,
    store: _Store,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the reader and its curve go.")],
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FILE", help="Facts to practise on (default: those of STORE).")
    ] = None,
    facts: Annotated[int, typer.Option("--facts", metavar="N", min=1, help="Made-up facts to practise on.")] = 12_000,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Steps of answering.")] = 300,
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="LIST", help="After which layers to read, such as 18,22,26.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of everything random.")] = 0,
    json_output: JsonFlag = False,
) -> None:
    """Teach a model to read a store.

    The reader is tied to the encoder, not to the entries: it reads other stores of the encoder, too. If it is
    interrupted, the same command goes on where it was.
    """
    _models.require(model)
    if data is not None and not data.is_file():
        raise BadUsage(f"there is no file {data} with facts")
    chosen = None if layers is None else integers(layers, "--layers")
    from attnflow.knowledge import fit_reader

    with working(f"loading {model}") as spinner, opened(store) as held, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # texts that are too long were reported when they were written
        loaded = _models.load(model)
        fitted = fit_reader(
            loaded, held, output, data, layers=chosen, facts=facts, steps=steps, seed=seed, progress=spinner
        )
    if json_output:
        print_result(fitted)
    else:
        say(console(), str(fitted))


def knowledge_ask(
    model: _Model,
    store: _Store,
    question: Annotated[str, typer.Argument(metavar="TEXT", help="The question.")],
    reader: Annotated[Path, typer.Option("--reader", metavar="DIR", help="The folder that `fit` wrote.")],
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Entries listed.")] = 3,
    json_output: JsonFlag = False,
) -> None:
    """Ask a model that reads a store.

    Prints the answer, or that it is not in the store, and the entries that are nearest to the question, of which the
    model read the first. Exits with 1 if none is near enough.
    """
    _models.require(model)
    if not question.strip():
        raise BadUsage("the question is empty")
    from attnflow.knowledge.hf.asking import ask

    folder = reader / "reader" if (reader / "reader").is_dir() else reader
    if not folder.is_dir():
        raise BadUsage(
            f"there is no reader in {reader}: `attnflow knowledge fit {model} {store} -o {reader}` makes one"
        )
    with working(f"loading {model}"), opened(store) as held:
        answer = ask(_models.load(model), held, question, folder, top=top)
    if json_output:
        print_result(answer)
    else:
        say(console(), str(answer))
    raise typer.Exit(1 if answer.answer is None else 0)
