"""`attnflow mask list`: the catalogue."""

from __future__ import annotations

import textwrap
from dataclasses import asdict

from attnflow.cli._masks import EXAMPLES
from attnflow.cli._output import JsonFlag, console, print_json, say


def mask_list(json_output: JsonFlag = False) -> None:
    """List the masks of the catalogue.

    For each: its parameters and its relation; q is the query, k the key, both counted from 0.
    """
    from attnflow.masks.spec import named_masks

    if json_output:
        masks = [
            {
                "name": entry.name,
                "signature": entry.signature,
                "relation": entry.summary,
                "parameters": [asdict(parameter) for parameter in entry.parameters],
                "example": f"attnflow mask show {entry.name} {EXAMPLES[entry.name]}",
            }
            for entry in named_masks().values()
        ]
        print_json("attnflow.mask.list/1", {"masks": masks})
        return
    screen = console()
    for entry in named_masks().values():
        say(screen, entry.signature, "bold")
        say(screen, textwrap.fill(entry.summary, screen.width, initial_indent="    ", subsequent_indent="    "))
    say(screen, "\nShow one: attnflow mask show sliding_window --n 16 --set window=4")
    say(screen, "A mask of your own goes into a JSON file that takes the place of the name.")
