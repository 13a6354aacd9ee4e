"""`attnflow studio`: see and design the flow of information on a live page, served by this machine."""

from __future__ import annotations

import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import typer

from attnflow.cli._arguments import MaskLength, Settings, is_file, is_mask, load, mask_argument, require_model, sample
from attnflow.cli._output import BadUsage, JsonFlag, console, print_json, say, working

_TOKENS: Final = 32  # of the short text for which a model's masks are computed


def studio(
    subject: Annotated[
        str,
        typer.Argument(metavar="MASK|TASK.json|MODEL", help="A mask, a JSON file with a mask or a task, or a model."),
    ] = "causal",
    n: MaskLength = None,
    settings: Settings = None,
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="Local port; 0 takes a free one.")
    ] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the address without opening a browser.")] = False,
    bias: Annotated[
        str | None, typer.Option("--bias", metavar="DIR", help="Also show a saved bias of the MODEL.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Open the studio, a page for designing masks and reading models.

    The page opens with the mask or task you name. For a model it opens with the masks of its layers for a short text;
    there you can audit the model and see its geometry, its bias and what its feed-forward layers do. Only this machine
    can open the page, at an address with a secret token, until Ctrl-C or half an hour without use. Everything is
    computed here; nothing is fetched from a network.
    """
    from attnflow.studio import serve

    drawn = is_file(subject) or is_mask(subject)
    if bias is not None:
        if drawn:
            raise BadUsage(f"--bias applies only to models; {subject} is a mask or a task")
        if not Path(bias).expanduser().is_dir():
            raise BadUsage(f"--bias takes the folder of a saved bias; the folder {bias} does not exist")
    design = _design(subject, n, settings or [])
    model = None if drawn else {"model": subject, "bias": bias}

    def opened(address: str) -> None:
        if json_output:
            print_json("attnflow.studio/1", {"address": address})
        else:
            say(console(), f"The studio is at {address}\nCtrl-C ends it.")
        if not no_open:
            webbrowser.open(address)

    serve(design, port, opened, model=model)


def _design(subject: str, n: int | None, settings: list[str]) -> Mapping[str, object]:
    """Returns the initial design as plain data; mistakes are reported before the studio opens."""
    from attnflow._core.plain import read_json
    from attnflow.report.live.operations import design_of

    if is_file(subject):
        if n is not None or settings:
            raise BadUsage(f"--n and --set apply only to masks of the catalogue; leave them out, {subject} is a file")
        return design_of(read_json(subject), subject).to_dict()
    if is_mask(subject):
        return design_of(mask_argument(subject, n, settings, "studio").to_dict(), subject).to_dict()
    return _of_model(subject, n is not None or bool(settings))


def _of_model(name: str, with_settings: bool) -> Mapping[str, object]:
    from attnflow.audit.declared import declared_order
    from attnflow.models.subject import Subject
    from attnflow.report.live.design import design_for

    require_model(name, with_settings)
    with working(f"reading {name}") as spinner:
        loaded = load(name)
        inputs = Subject.of(loaded).sample(sample(), _TOKENS)
        spinner.stage("reading its masks")
        flow = declared_order(loaded, inputs)
        texts = Subject.of(loaded).texts(inputs["input_ids"][0].tolist())
    return design_for(flow, texts).to_dict()
