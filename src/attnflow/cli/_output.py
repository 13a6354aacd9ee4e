"""Output of commands: pure JSON or text on stdout, progress on stderr, and files written whole or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
import textwrap
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from attnflow._core.errors import MissingExtra
from attnflow._core.markup import columns
from attnflow._core.progress import Reporter

if TYPE_CHECKING:
    from rich.console import Console

    from attnflow._core.results import Result
    from attnflow.masks import Mask

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead of text.")]


class BadUsage(Exception):
    """The user's input cannot be used; the message says what to do instead."""


def console() -> Console:
    """Returns a console that follows NO_COLOR, width and redirection; rich, slow to load, is imported here."""
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False, emoji=False)


def say(screen: Console, text: str, style: str = "") -> None:
    """Prints `text` without markup or narrow spaces; a terminal gets lines wrapped between words, a pipe whole ones."""
    plain = text.replace("\u202f", ",").replace("\xa0", " ")
    shown = wrapped(plain, screen.width) if screen.is_terminal else plain
    screen.print(shown, style=style, markup=False, soft_wrap=True)


def wrapped(text: str, width: int) -> str:
    """Wraps long lines between words. The rest of a table's row goes below its last column; other lines are indented.

    >>> print(wrapped("is      not one of the catalogue", 24))
    is      not one of the
            catalogue
    """
    lines: list[str] = []
    for _, group in groupby(text.split("\n"), key=lambda line: bool(line.strip())):
        block = list(group)
        start = _last_column(block, width) if max(map(columns, block)) > width else 0
        for line in block:
            if start > width * 0.6:  # too little room beside the other columns
                lines += [line[:start].rstrip(), *_broken(line[start:], width, " " * 6, " " * 6)]
            elif columns(line) <= width:
                lines.append(line)
            else:
                named = re.match(r"\S+( \S+){0,2}  +(?=\S)", line)  # a name of up to three words, and the gap after it
                margin = len(line) - len(line.lstrip())
                indent = start or (len(named[0]) if named and len(named[0]) <= width // 3 else margin + 2)
                cut = margin if indent == margin + 2 else indent
                lines += _broken(line[cut:], width, line[:cut], " " * indent)
    return "\n".join(lines)


def _last_column(block: Sequence[str], width: int) -> int:
    """Returns where a table's last column within the width begins; 0 for other text."""
    gaps = [match.end() for match in re.finditer(r"\S  +(?=\S)", block[0])] if len(block) > 1 else []
    return max(
        (at for at in gaps if at <= width and all(re.match(r"  (\S|$)", f"{line:<{at}}"[at - 2 :]) for line in block)),
        default=0,
    )


def _broken(text: str, width: int, first: str, other: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=other, break_long_words=False, break_on_hyphens=False
    )


def complain(message: str) -> None:
    width = shutil.get_terminal_size().columns
    print(wrapped(message, width) if sys.stderr.isatty() else message, file=sys.stderr)


def print_result(result: Result) -> None:
    print(result.to_json().rstrip("\n"))


def show(
    result: Result,
    json_output: bool,
    text: str = "",
    *,
    title: str = "",
    ok: bool | None = None,
    written: Path | None = None,
) -> None:
    """Prints a result as JSON, or as `text`, by default its own; `ok` colours the first line, the verdict."""
    if json_output:
        print_result(result)
        return
    screen, text = console(), text or str(result)
    verdict, *rest = [title, text] if title else text.split("\n", 1)
    say(screen, verdict, "bold" if title else "" if ok is None else style(ok))
    for lines in [*rest, *([] if written is None else [f"written: {written}"])]:
        say(screen, lines)


def print_json(schema: str, payload: Mapping[str, object]) -> None:
    """Prints one JSON object; `schema` names its layout, e.g. "attnflow.mask.list/1"."""
    print(json.dumps({"schema": schema, **payload}, indent=2, allow_nan=False))


def style(ok: bool) -> str:
    return "bold green" if ok else "bold red"


def working(title: str) -> Reporter:
    """Shows progress on stderr, for a `with` block, and only to a terminal."""
    reporter = Reporter(seconds=None)
    reporter.stage(title)
    return reporter


def output_path(path: Path, suffixes: Sequence[str], chart: str = "") -> Path:
    """Refuses, before the work, a file that cannot be written; `chart` is what a picture draws with matplotlib."""
    if path.suffix.lower() not in suffixes:
        raise BadUsage(f"cannot write {path}: the name must end in {' or '.join(suffixes)}, got {path.suffix!r}")
    if chart and path.suffix.lower() in (".svg", ".png", ".pdf") and find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "report", chart)
    loop = f"cannot write {path}: its symbolic links form a loop"
    try:
        target = path.expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise BadUsage(loop) from error
    if target.is_symlink():  # Python 3.13 does not raise, and stops at a link of the loop
        raise BadUsage(loop)
    folder = target.parent
    if not folder.is_dir():
        raise BadUsage(f"cannot write {path}: the folder {folder} does not exist; create it first")
    if target.exists() and not stat.S_ISREG(target.stat().st_mode):
        raise BadUsage(f"cannot write {path}: it exists and is not a plain file")
    if not os.access(folder, os.W_OK | os.X_OK) or (target.exists() and not os.access(target, os.W_OK)):
        raise BadUsage(f"cannot write {path}: you have no permission to")
    return target


def write(subject: Mask | Result, path: Path, **options: Any) -> None:
    from attnflow._core.files import write_atomically
    from attnflow.report import figure, page
    from attnflow.report.svg import encode

    suffix = path.suffix.lower()
    if suffix == ".html":
        page(subject).save(path)
    elif suffix in (".csv", ".json"):
        cast("Result", subject).save(path)
    else:
        with write_atomically(path) as file:
            file.write(encode(figure(subject, **options), suffix))
