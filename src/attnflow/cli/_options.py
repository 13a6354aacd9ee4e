"""Arguments and options that several commands share, and what they mean."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from attnflow.cli._output import BadUsage

if TYPE_CHECKING:
    from attnflow.models import Loaded

_SAMPLE: Final = 4000  # characters of the sample text

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="smollm2-135m, minilm, a folder, a GGUF file or a hub id.")
]
TextOption = Annotated[str | None, typer.Option("--text", help="The text to read (default: Shakespeare).")]
OutputOption = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Also write a file.")]


def load(name: str, tokenizer: bool = True, without: str = "this command reads text and needs one") -> Loaded:
    """The model `name`: a short name, a folder, a GGUF file or a model of the hub.

    Args:
        name: which model.
        tokenizer: whether text is read.
        without: what to do if there is no tokenizer.

    Raises:
        BadUsage: there is no such model, or it is none that can be loaded.
    """
    from attnflow.masks.spec import named_masks
    from attnflow.models import load_model

    if not name.strip():
        raise BadUsage("name a model: smollm2-135m, minilm, a folder, a GGUF file or a model id of the hub")
    try:
        return load_model(name, tokenizer=tokenizer)
    except FileNotFoundError as error:
        is_mask = name in named_masks()
        hint = f"; {name} is a mask: see `attnflow report {name}` and `attnflow mask show {name}`" if is_mask else ""
        raise BadUsage(f"{error}{hint}") from error
    except ValueError as error:
        raise BadUsage(str(error).replace("pass tokenizer=False", without)) from error


def describe(name: str, loaded: Loaded) -> str:
    """What a loaded model is, in one line."""
    model = loaded.model
    parameters = sum(parameter.numel() for parameter in model.parameters())
    layers = getattr(model.config, "num_hidden_layers", None)
    return f"{name}: {type(model).__name__}, {parameters:,} parameters" + (f", {layers} layers" if layers else "")


def sample() -> str:
    """Real text, its line breaks and indents as single spaces."""
    from attnflow.models import sample_text

    return " ".join(sample_text(characters=_SAMPLE).split())


def integers(text: str, option: str) -> list[int]:
    """The integers of `5,6,7`."""
    try:
        return [int(item) for item in text.strip().removeprefix("[").removesuffix("]").split(",")]
    except ValueError:
        raise BadUsage(
            f"{option} must be integers with commas between them, such as {option} 0,2,5, got {text}"
        ) from None


def settings_from(texts: Iterable[str], option: str = "--set") -> dict[str, str]:
    """`["window=4", "causal=false"]` as a dict; every name once."""
    values: dict[str, str] = {}
    for text in texts:
        name, sign, value = (part.strip() for part in text.partition("="))
        if not sign or not name:
            raise BadUsage(f"{option} takes NAME=VALUE, such as {option} window=4, got {text!r}")
        if name in values:
            raise BadUsage(f"{option} {name}=... is given twice")
        values[name] = value
    return values
