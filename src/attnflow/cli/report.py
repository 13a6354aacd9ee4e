"""`attnflow report MODEL_OR_MASK -o out.html`: everything about a mask, a task or a model on one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnflow._core.markup import plural
from attnflow.cli import _arguments as arguments
from attnflow.cli._arguments import MaskLength, Settings, is_file
from attnflow.cli._output import BadUsage, JsonFlag, console, output_path, print_json, say, style, working

if TYPE_CHECKING:
    from attnflow._core.progress import Reporter
    from attnflow.report.page import Page


def report(
    subject: Annotated[
        str, typer.Argument(metavar="MODEL_OR_MASK", help="A mask, a JSON file with a mask or a task, or a model.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The .html file to write.")],
    n: MaskLength = None,
    settings: Settings = None,
    text: Annotated[str | None, typer.Option("--text", help="The text that the model reads.")] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=2, help="The most tokens that the model reads.")
    ] = 64,
    json_output: JsonFlag = False,
) -> None:
    """Write a report as one self-contained HTML page.

    For a mask it shows the picture, Hasse diagram, depth, receptive fields and block sparsity; for a task also its
    leaks. For a model it shows the audit, its geometry, its bias, why a head looked at a token, what its feed-forward
    entries did for a text, and the masks that the model declares. Exits with 1 if the report contains a leak.
    """
    target = output_path(output, [".html"])
    is_mask = is_file(subject) or arguments.is_mask(subject)
    if is_mask and text is not None:
        raise BadUsage(f"--text applies only to models; {subject} is a mask")
    if not is_mask:
        arguments.require_model(subject, n is not None or bool(settings))
    with working(f"reading {subject}") as spinner:
        if is_mask:
            page = _of_mask(subject, n, settings or [], spinner)
        else:
            from attnflow.models.subject import Subject
            from attnflow.report import model_page

            loaded = arguments.load(subject)
            inputs = Subject.of(loaded).sample(arguments.sample() if text is None else text, tokens)
            about = {"Model": arguments.describe(subject, loaded)}
            page = model_page(loaded, inputs, title=subject, details=about, progress=spinner)
        page.save(target)
    size = target.stat().st_size
    if json_output:
        sections = [section.name for section in page.sections]
        about = {"subject": subject, "title": page.title, "ok": page.ok, "sections": sections, "bytes": size}
        print_json("attnflow.report/1", {**about, "written": str(output)})
    else:
        verdict = "" if page.ok else " It contains a leak."
        say(console(), f"{page.title}: {output} ({size / 1024:.0f} KiB).{verdict}", "" if page.ok else style(page.ok))
    raise typer.Exit(0 if page.ok else 1)


def _of_mask(subject: str, n: int | None, settings: Sequence[str], spinner: Reporter) -> Page:
    from attnflow._core.plain import read_json
    from attnflow.masks.spec import mask_from_dict
    from attnflow.report import page
    from attnflow.tasks import Task

    spec = read_json(subject) if is_file(subject) and n is None and not settings else {}
    if "inputs" in spec:
        task = Task.from_dict(spec, subject)
        spinner.stage(f"checking {plural(task.size, 'position')}")
        return page(task, title=subject)
    mask = mask_from_dict(spec.get("mask", spec), subject) if spec else arguments.mask_argument(subject, n, settings)
    spinner.stage(f"analysing {mask.name}")
    return page(mask)
