"""What the name of a model means: something that a package ships, something on this machine, or a model of the hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from attnflow.models.packages import MODELS

_HUB_ID: Final = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_ONE_WORD: Final = re.compile(r"[\w-][\w.-]*")
_HUB: Final = "hub:"
# Architectures of this package, by `model_type`: what makes their classes known to transformers when a checkpoint names
# one. The top level fills it in, as rooms above this one define them.
REGISTRATIONS: Final[dict[str, Callable[[], object]]] = {}
_FILES: Final = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def resolve(name: str) -> Path | str:
    """A file or folder that exists, or the id of a model on the hub, which nobody has asked yet.

    First come the short names of `af.models.MODELS`, then what is on this machine. Of other names those go to the hub
    that look like its ids, "owner/name", and what is asked of it, "hub:gpt2": a typo never waits for a network.

    Raises:
        MissingPackage: the package of a short name is not installed; the message has the command.
        FileNotFoundError: none of these, with the short name that may be meant.
    """
    if name in MODELS:
        return MODELS[name].path()
    path = Path(name).expanduser()
    if name.strip() and path.exists():
        return path
    asked = name.removeprefix(_HUB)
    if asked != name and (_ONE_WORD.fullmatch(asked) or _HUB_ID.fullmatch(asked)):
        return asked
    if _HUB_ID.fullmatch(name) and not name.endswith(_FILES):
        return name
    close = get_close_matches(name.lower(), MODELS, 1)
    rest = f": did you mean {close[0]}?" if close else f"{short_names()}{_on_the_hub(name)}"
    raise FileNotFoundError(f"no file or folder {name!r}{rest}")


def is_out_of_reach(hub_id: str) -> bool:
    """Whether the hub must not be asked, and has left nothing of this model on this machine."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return False  # who loads it says what to install
    folder = f"models--{hub_id.replace('/', '--')}"
    return constants.HF_HUB_OFFLINE and not (Path(constants.HF_HUB_CACHE) / folder).exists()


def short_names() -> str:
    """The short names, as the end of a message."""
    return f"; short names are {', '.join(MODELS)}"


def _on_the_hub(name: str) -> str:
    if _ONE_WORD.fullmatch(name) is None or name.endswith(_FILES):
        return ""
    return f"; a model of the hub is owner/name, or {_HUB}{name}"
