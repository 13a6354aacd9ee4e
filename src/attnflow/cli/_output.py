"""What commands print and write: pure JSON or text on stdout, progress on stderr, files whole or not at all."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnflow._core.errors import MissingExtra
from attnflow._core.progress import Reporter

if TYPE_CHECKING:
    from rich.console import Console

    from attnflow._core.results import Result
    from attnflow.masks import Mask

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead of text.")]


class BadUsage(Exception):
    """What the user typed or handed over cannot be used; the message says what to do instead."""


def console(stderr: bool = False) -> Console:
    """A console that follows NO_COLOR, terminal width and redirection; made late, because rich takes time to load."""
    from rich.console import Console

    return Console(file=sys.stderr if stderr else sys.stdout, highlight=False, emoji=False)


def say(screen: Console, text: str, style: str = "") -> None:
    """Print `text` as it is: no markup, no narrow spaces, and lines left whole for the terminal or a pipe."""
    screen.print(text.replace("\u202f", ",").replace("\xa0", " "), style=style, markup=False, soft_wrap=True)


def print_result(result: Result) -> None:
    """What `--json` prints: the result as strict JSON, which its `from_json` reads again."""
    print(result.to_json().rstrip("\n"))


def show(result: Result, json_output: bool, text: str = "") -> None:
    """A result as JSON, or as a text, its own if there is none."""
    if json_output:
        print_result(result)
    else:
        say(console(), text or str(result))


def print_json(schema: str, payload: Mapping[str, object]) -> None:
    """One JSON object on stdout; `schema` names its layout, e.g. "attnflow.mask.list/1"."""
    print(json.dumps({"schema": schema, **payload}, indent=2, allow_nan=False))


def style(ok: bool) -> str:
    """How a verdict looks."""
    return "bold green" if ok else "bold red"


def working(title: str) -> Reporter:
    """Progress on stderr with its first title, for a `with` block."""
    reporter = Reporter()
    reporter.stage(title)
    return reporter


def output_path(path: Path, suffixes: Sequence[str], chart: str = "") -> Path:
    """`path` if a file of one of the `suffixes` can be written there; checked before the work, not after it.

    `chart` names what an `.svg` or `.png` would draw with matplotlib, as in "scores as a figure"; "" if it needs none.

    Raises:
        BadUsage: another suffix, no such folder, no permission, or something that is not a plain file.
        MissingExtra: a chart, and matplotlib is not installed.
    """
    if path.suffix.lower() not in suffixes:
        raise BadUsage(f"cannot write {path}: the name must end in {' or '.join(suffixes)}, got {path.suffix!r}")
    if chart and path.suffix.lower() in (".svg", ".png") and find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "report", chart)
    target = path.expanduser().resolve()
    folder = target.parent
    if not folder.is_dir():
        raise BadUsage(f"cannot write {path}: there is no folder {folder}")
    if target.exists() and not stat.S_ISREG(target.stat().st_mode):
        raise BadUsage(f"cannot write {path}: it exists and is not a plain file")
    if not os.access(folder, os.W_OK | os.X_OK) or (target.exists() and not os.access(target, os.W_OK)):
        raise BadUsage(f"cannot write {path}: no permission")
    return target


def write(subject: Mask | Result, path: Path, details: Mapping[str, str] | None = None, **options: Any) -> None:
    """The file that the suffix asks for, whole or not at all; `options` are of the picture, `details` of the page."""
    from attnflow._core.files import write_atomically
    from attnflow.report import figure, page
    from attnflow.report.svg import encode

    suffix = path.suffix.lower()
    if suffix in (".svg", ".png"):
        content = encode(figure(subject, **options), suffix)
    elif suffix == ".html":
        content = page(subject, details=details).html.encode()
    else:
        content = (subject.to_csv() if suffix == ".csv" else subject.to_json()).encode()  # pyright: ignore[reportAttributeAccessIssue]
    with write_atomically(path) as file:
        file.write(content)
