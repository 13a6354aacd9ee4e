"""`attnflow doctor`: does this machine have what attnflow needs?"""

from __future__ import annotations

from dataclasses import asdict

import typer

from attnflow.cli._output import JsonFlag, console, print_json, say, working


def doctor(json_output: JsonFlag = False) -> None:
    """Check this machine for what attnflow needs.

    Shows versions, extras, real models and accelerators; exits with 1 if something needed is broken.
    """
    from attnflow.cli._environment import examine

    with working("examining the environment"):
        findings = examine()
    broken = [f.name for f in findings if f.status == "broken"]
    if json_output:
        print_json("attnflow.doctor/1", {"ok": not broken, "findings": [asdict(f) for f in findings]})
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False)
        for column in ("part", "status", "found", "for / advice"):
            table.add_column(column, overflow="fold", no_wrap=column in ("part", "status"))
        styles = {"ok": "green", "absent": "dim", "note": "yellow", "broken": "bold red"}
        for f in findings:
            table.add_row(f.name, Text(f.status, styles[f.status]), Text(f.found), Text(f.advice))
        screen = console()
        screen.print(table)
        verdict = f"broken: {', '.join(broken)}" if broken else "everything needed works"
        say(screen, f"\n{verdict}", "bold red" if broken else "bold green")
    raise typer.Exit(1 if broken else 0)
