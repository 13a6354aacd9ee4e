"""`attnflow explain`: who told a model its answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from attnflow.cli._arguments import Against, Answer, Ids, Text, argument, load, option, require, text_or_ids, token
from attnflow.cli._output import JsonFlag, console, output_path, say, show, working, write

_MEASURED: Final = 5  # of the strongest edges, and of the strongest entries


def explain(
    model: Annotated[str, argument("MODEL", "A short name, a folder, a GGUF file or a hub id.")],
    text: Text = None,
    ids: Ids = None,
    answer: Answer = None,
    against: Against = None,
    position: Annotated[int | None, option("--position N", "The token that answers (default: the last).")] = None,
    output: Annotated[Path | None, option("--output -o FILE", "Also write .html, .svg, .csv or .json.")] = None,
    json_output: JsonFlag = False,
) -> None:
    """Explain one answer: who told it, and by which heads.

    An edge carries an exact part of the answer's logit from one token to another. Its effect is a first-order estimate
    of what the answer would lose without it. For the 5 strongest edges and entries the model runs again without each,
    and what that removed is shown. Exits with 1 if something flows through a pair that the model's order forbids.
    """
    target = None if output is None else output_path(output, [".html", ".svg", ".csv", ".json"])
    read = text_or_ids(text, ids)
    require(model)
    with working(f"loading {model}") as spinner:
        import attnflow

        loaded = load(model, tokenizer=ids is None, without="give token ids: --ids 5,6,7")

        spinner.stage("one forward and two backward passes")
        result = attnflow.explain.answer(
            loaded,
            read,
            None if answer is None else token(answer, ids, "--answer"),
            [token(word, ids, "--against") for word in against] if against else None,
            position,
            measure=_MEASURED,
            progress=spinner,
        )
        result = replace(result, model=model)
        if target is not None:
            spinner.stage(f"writing {output}")
            write(result, target)
    show(result, json_output, ok=None if result.ok else False)
    if output is not None and not json_output:
        say(console(), f"written: {output}")
    raise typer.Exit(0 if result.ok else 1)
