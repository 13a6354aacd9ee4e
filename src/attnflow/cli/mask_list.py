"""`attnflow mask list`: the catalogue."""

from __future__ import annotations

import textwrap
from dataclasses import asdict

from attnflow.cli._output import JsonFlag, console, print_json, say


def mask_list(json_output: JsonFlag = False) -> None:
    """List the masks of the catalogue.

    For each: its parameters and its relation; q is the query, k the key, both counted from 0.
    """
    from attnflow.cli._catalogue import EXAMPLES, entries

    known = entries()
    if json_output:
        masks = [
            {
                "name": name,
                "signature": entry.signature,
                "relation": entry.relation,
                "parameters": [asdict(p) for p in entry.parameters],
                "example": f"attnflow mask show {name} {EXAMPLES[name]}",
            }
            for name, entry in known.items()
        ]
        print_json("attnflow.mask.list/1", {"masks": masks})
        return
    screen = console()
    for entry in known.values():
        say(screen, entry.signature, "bold")
        say(screen, textwrap.fill(entry.relation, screen.width, initial_indent="    ", subsequent_indent="    "))
    say(screen, "\nShow one: attnflow mask show sliding_window --n 16 --set window=4")
    say(screen, "A mask of your own goes into a JSON file that takes the place of the name.")
