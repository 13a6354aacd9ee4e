"""Declares the arguments of commands, and turns them into masks, models, texts, settings and numbers."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from attnflow.cli._early import mask_names
from attnflow.cli._output import BadUsage

if TYPE_CHECKING:
    from attnflow.masks import Mask
    from attnflow.models.subject import Loaded


def option(form: str, text: str) -> Any:
    """Declares an option by its form, such as "--output -o FILE" or "--count N>=1", and its help."""
    flags = [word for word in form.split() if word.startswith("-")]
    metavar, least, most = _bounded(form.removeprefix(" ".join(flags)).strip())
    return typer.Option(*flags, metavar=metavar, min=least, max=most, help=text)


def argument(form: str, text: str) -> Any:
    return typer.Argument(metavar=form, help=text)


def _bounded(form: str) -> tuple[str | None, int | None, int | None]:
    match = re.fullmatch(r"([^<>]*)(?:>=(\d+))?(?:<=(\d+))?", form)
    assert match is not None, form
    metavar, least, most = match.groups()
    return metavar or None, int(least) if least else None, int(most) if most else None


MaskLength = Annotated[int | None, option("--n N>=0", "Number of tokens of the mask (default: 16).")]
Settings = Annotated[list[str] | None, option("--set NAME=VALUE", "Set a parameter, as in window=4 (repeatable).")]
OutputOption = Annotated[Path | None, option("--output -o FILE", "Also write to FILE.")]
FigureOption = Annotated[Path | None, option("--output -o FILE", "Also write .svg, .png, .pdf, .html, .csv or .json.")]
Answer = Annotated[str | None, option("--answer TOKEN", "Explain this token (default: the most likely).")]
Against = Annotated[
    list[str] | None, option("--against TOKEN", "Compare with this token (repeatable; default: all tokens).")
]
Text = Annotated[str | None, argument("TEXT", 'The text to read; "-" reads stdin.')]
Ids = Annotated[str | None, option("--ids LIST", "Token ids in place of TEXT, such as 5,6,7.")]

FIGURES: Final = (".svg", ".png", ".pdf", ".html", ".csv", ".json")
_DEFAULT_N: Final = 16


def is_mask(name: str) -> bool:
    return name in mask_names()


def example(name: str) -> str:
    """What to type for a mask's parameters, such as `--n 8 --set window=4`."""
    from attnflow.masks.registry import named_masks

    settings = named_masks()[name].example
    return " ".join(f"--n {value}" if key == "n" else f"--set {key}={value}" for key, value in settings.items())


def is_file(name: str) -> bool:
    return name == "-" or name.endswith(".json")


def mask_argument(name: str, n: int | None, texts: Sequence[str], command: str = "mask show") -> Mask:
    """Returns a mask of the catalogue, or of a file with a mask or task; errors show an example of `command`."""
    settings = require_mask(name, n, texts)
    from attnflow._core.plain import read_json
    from attnflow.masks.registry import named_masks
    from attnflow.masks.spec import mask_from_dict

    if is_file(name):
        spec = read_json(name)
        return mask_from_dict(spec.get("mask", spec), name)
    entry, advice = named_masks()[name], f"for example: attnflow {command} {name} {example(name)}"
    has_length = any(parameter.name == "n" for parameter in entry.parameters)
    if n is not None and not has_length:
        raise BadUsage(f"{entry.signature} has no parameter n; {advice}")
    if n is not None and "n" in settings:
        raise BadUsage("n is given twice, by --n and by --set n=...: leave one out")
    values = entry.read({**({"n": str(_DEFAULT_N if n is None else n)} if has_length else {}), **settings})
    try:
        entry.require(values)
    except ValueError as error:
        raise BadUsage(f"{error}; {advice}") from None
    return entry.function(**values)


def require_mask(name: str, n: int | None = None, texts: Sequence[str] = ()) -> dict[str, str]:
    """Refuse a name that is no mask of the catalogue and no file, before any import; returns the parsed settings."""
    from attnflow._core.plain import close_to

    if is_file(name):
        if n is not None or texts:
            raise BadUsage(f"--n and --set apply only to masks of the catalogue; leave them out, {name} is a file")
        if name != "-" and not Path(name).expanduser().exists():
            raise BadUsage(f"cannot read {name}: no such file")
    elif not is_mask(name):
        raise BadUsage(f"unknown mask {name!r}{close_to(name, mask_names())} (`attnflow mask list` shows all)")
    return settings_from(texts)


def one_of(name: str, names: Sequence[str], what: str) -> None:
    """Refuse, before any import, a name that is not among those that a command takes."""
    from attnflow._core.plain import close_to

    if name not in names:
        hint = close_to(name, names) or f"; known: {', '.join(sorted(names))}"
        raise BadUsage(f"unknown {what} {name!r}{hint}")


def settings_from(texts: Iterable[str], option: str = "--set") -> dict[str, str]:
    """Parses `["window=4", "causal=false"]` to a dict, and refuses repeated names."""
    values: dict[str, str] = {}
    for text in texts:
        name, sign, value = (part.strip() for part in text.partition("="))
        if not sign or not name:
            example = "window=4" if option == "--set" else "num_attention_heads=12"
            raise BadUsage(f"{option} takes NAME=VALUE, such as {option} {example}, got {text!r}")
        if name in values:
            raise BadUsage(f"{option} {name}=... is given twice")
        values[name] = value
    return values


def integers(text: str, option: str) -> list[int]:
    try:
        return [int(item) for item in text.strip().removeprefix("[").removesuffix("]").split(",")]
    except ValueError:
        raise BadUsage(f"{option} must be integers separated by commas, such as {option} 0,2,5, got {text}") from None


def token(word: str, ids: str | None, option: str) -> str | int:
    """One token, as text, or by its number where the text is given as --ids."""
    numbers = [word] if ids is None else integers(word, option)
    if len(numbers) > 1:
        raise BadUsage(f"{option} takes one token, got {len(numbers)}: {word}")
    return numbers[0]


def text_or_ids(text: str | None, ids: str | None) -> str | list[int]:
    """Returns the TEXT, or the integers of --ids; one of them must be given."""
    if ids is not None and text is None:
        return integers(ids, "--ids")
    if text is None or ids is not None:
        raise BadUsage("give either a TEXT or --ids")
    if text == "-":
        text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise BadUsage("the text is empty: give at least one word")
    return text


def require(name: str) -> None:
    """Raises BadUsage, before any import, unless `name` is a short name, a file, a folder or a hub id."""
    from attnflow.models.loading.names import is_out_of_reach, resolve

    if not name.strip():
        raise BadUsage("the model's name is empty: give smollm2-135m, minilm, a folder, a GGUF file or a hub id")
    try:
        place = resolve(name)
    except FileNotFoundError as error:
        hint = f"; {name} is a mask: see `attnflow report {name}` and `attnflow mask show {name}`"
        raise BadUsage(f"{error}{hint if is_mask(name) else ''}") from error
    if isinstance(place, str) and is_out_of_reach(place):
        raise BadUsage(f"cannot load {name!r}: found neither here nor in the hub's cache, and HF_HUB_OFFLINE is set")


def require_model(name: str, with_settings: bool) -> None:
    """Reports a typo in `name` at once; it may be a mask or a model, and only masks take settings."""
    from attnflow._core.plain import close_to
    from attnflow.models.loading.names import MODELS

    if with_settings:
        raise BadUsage(f"--n and --set apply only to masks; {name!r} is not one{close_to(name, mask_names())}")
    try:
        require(name)
    except BadUsage as error:
        near = close_to(name, [*mask_names(), *MODELS]) if "/" not in name else ""
        message = f"found no mask, model, file or folder {name!r}{near}"
        raise BadUsage(message if near else f"{error}; `attnflow mask list` lists the masks") from error


def load(name: str, tokenizer: bool = True, without: str = "this command reads text and needs one") -> Loaded:
    """Loads a model; `without` is the advice when it lacks the `tokenizer` that text needs."""
    from attnflow.models import load_model

    require(name)
    try:
        return load_model(name, tokenizer=tokenizer)
    except FileNotFoundError as error:
        raise BadUsage(str(error)) from error
    except ValueError as error:
        advice = str(error).replace("pass tokenizer=False", without).replace(", or pass partial=True", "")
        raise BadUsage(advice) from error


def describe(name: str, loaded: Loaded) -> str:
    model = loaded.model
    parameters = sum(parameter.numel() for parameter in model.parameters())
    layers = getattr(model.config, "num_hidden_layers", None)
    return f"{name}: {type(model).__name__}, {parameters:,} parameters" + (f", {layers} layers" if layers else "")


def sample() -> str:
    from attnflow.models import sample_text

    return " ".join(sample_text(characters=4000).split())
