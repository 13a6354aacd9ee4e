"""Models that commands name, and the texts they read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnflow.cli._arguments import EXAMPLES
from attnflow.cli._output import BadUsage

if TYPE_CHECKING:
    from attnflow.models import Loaded

_SAMPLE: Final = 4000  # characters of the sample text


def require(name: str) -> None:
    """Raises BadUsage, before any import, unless `name` is a short name, a file, a folder or a hub id."""
    from attnflow.models.names import is_out_of_reach, resolve

    if not name.strip():
        raise BadUsage("name a model: smollm2-135m, minilm, a folder, a GGUF file or a model id of the hub")
    try:
        place = resolve(name)
    except FileNotFoundError as error:
        hint = f"; {name} is a mask: see `attnflow report {name}` and `attnflow mask show {name}`"
        raise BadUsage(f"{error}{hint if name in EXAMPLES else ''}") from error
    if isinstance(place, str) and is_out_of_reach(place):
        raise BadUsage(f"{name!r} is no local model; HF_HUB_OFFLINE is set, and it is not in the hub's local cache")


def require_model(name: str, with_settings: bool) -> None:
    """Reports a typo at once where `name` may be a mask (which alone has settings) or a model."""
    from attnflow._core.plain import close_to
    from attnflow.models.names import MODELS

    if with_settings:
        raise BadUsage(f"--n and --set belong to masks, and {name!r} is none{close_to(name, EXAMPLES)}")
    try:
        require(name)
    except BadUsage as error:
        near = close_to(name, [*EXAMPLES, *MODELS]) if "/" not in name else ""
        message = f"no mask, model, file or folder {name!r}{near}"
        raise BadUsage(message if near else f"{error}; masks are in `attnflow mask list`") from error


def load(name: str, tokenizer: bool = True, without: str = "this command reads text and needs one") -> Loaded:
    """Loads the model `name`: a short name, a folder, a GGUF file or a hub id.

    `tokenizer` tells whether text is read; `without` is the advice if there is no tokenizer. Raises BadUsage if there
    is no such model or it cannot be loaded.
    """
    from attnflow.models import load_model

    require(name)
    try:
        return load_model(name, tokenizer=tokenizer)
    except FileNotFoundError as error:
        raise BadUsage(str(error)) from error
    except ValueError as error:
        raise BadUsage(str(error).replace("pass tokenizer=False", without)) from error


def describe(name: str, loaded: Loaded) -> str:
    """Describes a loaded model in one line."""
    model = loaded.model
    parameters = sum(parameter.numel() for parameter in model.parameters())
    layers = getattr(model.config, "num_hidden_layers", None)
    return f"{name}: {type(model).__name__}, {parameters:,} parameters" + (f", {layers} layers" if layers else "")


def sample() -> str:
    """Returns real text, with line breaks and indents as single spaces."""
    from attnflow.models import sample_text

    return " ".join(sample_text(characters=_SAMPLE).split())
