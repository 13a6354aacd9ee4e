"""`attnflow audit MODEL`: test whether information flows against the order that a model declares."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer
from typer.core import TyperGroup

from attnflow._core.errors import AttnflowError
from attnflow.cli import batch
from attnflow.cli._arguments import argument, describe, integers, is_file, load, mask_argument, option, require, sample
from attnflow.cli._output import BadUsage, JsonFlag, console, output_path, print_json, print_result, say, working
from attnflow.cli._ranks import speaks

_MODEL: Final = "MODEL"  # the command's name stands for its argument in `attnflow audit --help`
_AUDITED: Final = "smollm2-135m, minilm, a folder, a GGUF file, a hub id, or SCRIPT.py:NAME (a function or module)."
_DATA: Final = (".jsonl", ".jsonl.gz", ".parquet")


class _ModelByDefault(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        by_name = args[:1] and args[0] in ("batch", "-h", "--help")
        data = next((word for word in args if word.endswith(_DATA)), None)
        if data is not None and not by_name:
            raise BadUsage(f"{data} holds rows of data: attnflow audit batch {data} --model NAME")
        return super().parse_args(ctx, args if by_name else [_MODEL, *args])

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        self.commands[_MODEL].format_help_text(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.commands[_MODEL].format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


app = typer.Typer(
    help="Audit a model for leaks; batch: check rows of training data.",
    rich_markup_mode=None,
    cls=_ModelByDefault,
    subcommand_metavar="MODEL | batch FILE",
)


@app.command(_MODEL)
def audit(
    model: Annotated[str, argument("MODEL", _AUDITED)],
    text: Annotated[str | None, option("--text", "The text to read (default: Shakespeare).")] = None,
    ids: Annotated[str | None, option("--ids 5,6,7", "Token ids in place of --text.")] = None,
    tokens: Annotated[int | None, option("--tokens N>=2", "The most tokens to read (default: 64).")] = None,
    order: Annotated[
        str | None, option("--order MASK", "causal, full or a JSON file (default: what the model declares).")
    ] = None,
    passes: Annotated[int, option("--passes N>=1", "Number of changes to try.")] = 32,
    cache: Annotated[bool, option("--cache", "Also audit decoding with the key-value cache.")] = False,
    float64: Annotated[bool, option("--float64", "Audit in float64, which finds weaker leaks.")] = False,
    save: Annotated[Path | None, option("--save FILE", "Also measure the order of 16 tokens and save it.")] = None,
    against: Annotated[
        Path | None, option("--against FILE", "Also measure the order and compare with a saved one.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Audit a model for leaks.

    Changes input tokens and watches the output of every module. An output that changes although the order
    forbids it is a leak; it is shown with the layer and module where it starts. Exits with 1 if there is a leak, if the
    order forbids nothing, or if the measured order differs from the saved one.

    SCRIPT.py:NAME is a function of token ids (a loss or an evaluation), a module, or a function without arguments that
    makes one, alone or as (module, inputs, order, shard). SCRIPT.py alone lists its names. The script is run as `python
    SCRIPT.py` would run it, except its main part. The function gets ids of shape [2, 31] below 50, or --ids; its value
    for a token must not depend on later tokens.
    """
    golden = _golden(against, save, [text, ids, tokens])
    scripted = ".py:" in model or model.endswith(".py")
    if scripted and (text is not None or save is not None or golden is not None):
        raise BadUsage("a script's function reads token ids: give --ids, and leave out --text, --save and --against")
    target = None if save is None else output_path(save, (".json",))
    if text is not None and ids is not None:
        raise BadUsage("give --text or --ids, not both")
    if not scripted:
        require(model)
    token_ids = None if ids is None else integers(ids, "--ids")
    declared = None
    if order not in (None, "causal", "full"):
        from attnflow._core.plain import close_to

        if not is_file(order):
            near = close_to(order, ("causal", "full"))
            raise BadUsage(f"unknown order {order!r}{near} (causal, full, or a JSON file with a mask)")
        declared = mask_argument(order, None, [])
    with working(f"loading {model}") as spinner:
        import torch

        from attnflow import masks
        from attnflow.audit import check, scripts
        from attnflow.audit.measurement import MeasuredOrder, record
        from attnflow.models.subject import Subject

        if scripted:
            script = scripts.load(model)
            audited, inputs, title = script.subject, scripts.example(script, tokens, token_ids), model
            shard = script.shard
            declared = script.order if order is None else declared
            size = _positions(inputs) if order in ("causal", "full") else 0
        else:
            audited = load(model, tokenizer=ids is None and golden is None, without="give token ids, as in --ids 5,6,7")
            if golden is None:
                limit = tokens or (64 if save is None else 16)  # measuring takes two passes for each token
                inputs = Subject.of(audited).sample(token_ids or (sample() if text is None else text), limit)
            else:
                saved = MeasuredOrder.from_dict(golden)
                saved.require(type(audited.model).__name__, sum(p.numel() for p in audited.model.parameters()))
                inputs = saved.arguments()
            title, size = describe(model, audited), sum(tensor.shape[1] for tensor in inputs.values())
            shard = None
        if order in ("causal", "full"):
            declared = masks.causal(size) if order == "causal" else masks.full(size)
        dtype = torch.float64 if float64 else None
        with scripts.blaming(model) if scripted else nullcontext(), _naming_flags():
            report = check(
                audited, inputs, declared, shard=shard, cache=cache, passes=passes, dtype=dtype, progress=spinner
            )
        measured = None if save is None and golden is None else record(cast(Any, audited), inputs, progress=spinner)
    if target is not None and measured is not None and speaks():
        measured.save(target)
    difference = None if golden is None or measured is None else measured.difference(MeasuredOrder.from_dict(golden))
    if not speaks():
        pass
    elif json_output and difference is not None:
        print_json("attnflow.audit.against/1", {"audit": report.to_dict(), "difference": difference.to_dict()})
    elif json_output:
        print_result(report)
    else:
        screen = console()
        say(screen, title, "bold")
        say(screen, _with_flags(report.text(screen.width) if screen.is_terminal else str(report)))
        if difference is not None:
            say(screen, f"{against}: {difference}")
        elif measured is not None:
            say(screen, f"{save}: {measured}")
    raise typer.Exit(0 if report.ok and (difference is None or difference.ok) else 1)


def _positions(inputs: object) -> int:
    for value in inputs.values() if isinstance(inputs, Mapping) else (inputs,):
        if len(shape := getattr(value, "shape", ())) > 1:
            return int(shape[1])
    raise BadUsage("--order needs the number of tokens: let the script return tensors, or the order itself")


# What the library says of its arguments, and the same of the flags.
_FLAGS: Final = {
    r"leave out cache=, both_sides= and mode='quick'": "leave out --cache",
    r"(?:audit it with|use) cache=False": "leave out --cache",
    r"Pass order=, e\.g\..*": "Pass --order causal, --order full, or a JSON file with a mask",
    r"(?:with )?\border=(?!')": "--order",
    r"\(dtype=\)": "(--float64)",
    r" \(both_sides=True makes it a finding\)": "",
}


def _with_flags(text: str) -> str:
    for name, flag in _FLAGS.items():
        text = re.sub(name, flag, text)
    return text


@contextmanager
def _naming_flags() -> Generator[None]:
    try:
        yield
    except (ValueError, TypeError, AttnflowError) as error:
        if error.args:
            error.args = (_with_flags(str(error)), *error.args[1:])
        raise


def _golden(against: Path | None, save: Path | None, given: list[object]) -> dict[str, object] | None:
    if against is None:
        return None
    if save is not None:
        raise BadUsage("give --save or --against, not both: --save writes the file that --against reads")
    if any(value is not None for value in given):
        raise BadUsage("--against reads the tokens of the saved order: leave out --text, --ids and --tokens")
    from attnflow._core.plain import read_json

    values = read_json(against)
    if values.get("attnflow") != "MeasuredOrder":
        raise BadUsage(f"{against} holds no measured order: write it with `attnflow audit MODEL --save {against}`")
    return values


app.command("batch")(batch.batch)
