"""The command tree, and the one place where failures become exit codes."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, cast

import typer

from attnflow._core.errors import AttnflowError
from attnflow._core.version import __version__
from attnflow.cli import audit, explain, geometry, knowledge, mask, single
from attnflow.cli._examples import EXAMPLES, example
from attnflow.cli._output import BadUsage, complain
from attnflow.cli._ranks import part, speaks

_PACKAGE: Final = Path(__file__).parents[1]
_HELP: Final = """Design, prove and inspect the directed information flow of Transformer attention.

Four questions about a query and a key: may information flow (mask, audit), how strongly (bias), in which geometry of
W_q and W_k (geometry), and from which stored knowledge (knowledge). `explain` answers all four for one answer of one
model."""
_EPILOG: Final = (
    "Exit codes: 0 for no finding, 1 for a finding (such as a leak), 2 for wrong usage or a failed command.\n\n"
    + example("")
)

app = typer.Typer(
    name="attnflow",
    help=_HELP,
    epilog=_EPILOG,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for function in (explain.explain, single.report, single.studio, single.doctor):
    app.command(function.__name__)(function)
_bias = typer.Typer(help="Learned attention biases: show.", rich_markup_mode=None)
_bias.command("show")(single.bias_show)

GROUPS: Final = {
    "mask": mask.app,
    "audit": audit.app,
    "bias": _bias,
    "geometry": geometry.app,
    "knowledge": knowledge.app,
}
for name, group in GROUPS.items():
    app.add_typer(group, name=name, epilog=example(name))
    for command in group.registered_commands:
        page = f"{name} {command.name}"
        command.epilog = example(page if page in EXAMPLES else name)
for command in app.registered_commands:
    command.epilog = example(str(command.name))


def _print_version(asked: bool) -> bool:
    if asked:
        typer.echo(f"attnflow {__version__}")
        raise typer.Exit
    return asked


# typer vendors click in some versions and depends on it in others; its public exceptions name the base either way.
_ClickException: Final = cast(
    type[Exception], next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")
)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Hold the options of `attnflow` itself; its help is `_HELP`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 (a finding) or 2 (bad usage, or it could not run).

    Args:
        arguments: the words after the program's name (default: those of this process).
    """
    code = _run(arguments)
    part(code)
    return code


def _run(arguments: Sequence[str] | None) -> int:
    # Before torch loads: threads that wait by spinning make a shared machine several times slower, and gain nothing.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows ?, and no traceback
    try:
        code = app(args=None if arguments is None else list(arguments), prog_name="attnflow", standalone_mode=False)
        sys.stdout.flush()
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    except (BrokenPipeError, SystemExit):  # `... | head` has read what it wanted; typer turns the former to the latter
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as a shell reports a program that SIGPIPE ended
    except Exception as error:  # a traceback would exit with 1, which means "a finding"
        if _is_interrupt(error):
            return _fail("interrupted", 130)
        return _fail(_message(error)) if speaks(error) else 2
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int = 2) -> int:
    complain(f"attnflow: {message}")
    return code


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C is what happened first: an import that it hits raises an ImportError or SystemError of its own."""
    return error is not None and (
        isinstance(error, KeyboardInterrupt) or _is_interrupt(error.__cause__) or _is_interrupt(error.__context__)
    )


def _message(error: Exception) -> str:
    """Returns the error's text if the package raised it about an argument; otherwise says that this is a defect."""
    if isinstance(error, _ClickException):
        context = getattr(error, "ctx", None)
        path = "attnflow" if context is None else context.command_path
        text = str(getattr(error, "format_message", error.__str__)()).replace("Value error, ", "")
        return f"{text}\nSee `{path} --help`."
    if isinstance(error, BadUsage | AttnflowError):
        return str(error)
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}"
    if isinstance(error, OSError):
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror or error}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    on_purpose = Path(place.filename).is_relative_to(_PACKAGE) and (place.line or "").startswith("raise ")
    if on_purpose and isinstance(error, ValueError | TypeError):
        return str(error)
    if os.environ.get("ATTNFLOW_TRACEBACK"):
        traceback.print_exception(error)
    return (
        f"unexpected {type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno}). "
        "This is a defect of attnflow: set ATTNFLOW_TRACEBACK=1 for the traceback, and please report it."
    )
