"""`attnflow doctor`: does this machine have what attnflow needs?"""

from __future__ import annotations

import textwrap
from typing import Final

import typer

from attnflow.cli._output import JsonFlag, console, print_result, say, style, working

_STYLES: Final = {"ok": "green", "absent": "dim", "note": "yellow", "broken": "bold red"}


def doctor(json_output: JsonFlag = False) -> None:
    """Check this machine for what attnflow needs.

    Shows versions, extras, real models and accelerators; exits with 1 if something needed is broken.
    """
    from attnflow.testing import examine

    with working("examining the environment"):
        environment = examine()
    if json_output:
        print_result(environment)
        raise typer.Exit(0 if environment.ok else 1)
    screen = console()
    margin = max(len(part.name) for part in environment.parts) + 2
    for part in environment.parts:
        line = f"{part.name:<{margin}}{part.status:<8}{part.state}"
        advice = f"{'':{max(2, margin + 30 - len(line))}}{part.advice}"
        if len(line + advice) > screen.width:
            indent = "\n" + " " * margin
            width = max(20, screen.width - margin)
            advice = indent + indent.join(
                textwrap.wrap(part.advice, width, break_long_words=False, break_on_hyphens=False)
            )
        say(screen, (line + advice).rstrip(), _STYLES[part.status])
    verdict = "everything needed works" if environment.ok else f"broken: {', '.join(environment.broken)}"
    say(screen, f"\n{verdict}", style(environment.ok))
    raise typer.Exit(0 if environment.ok else 1)
