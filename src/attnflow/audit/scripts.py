"""Loads `SCRIPT.py:NAME` for an audit: the script runs as under `python SCRIPT.py`, except its main part."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
import types
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from attnflow._core.plain import close_to
from attnflow.audit.functions import is_function
from attnflow.models.loaded import embedding_table

_VOCABULARY: Final = 50  # ids that any vocabulary has, where the size of it is not known


@contextmanager
def blaming(target: str) -> Generator[None]:
    """What the script raises becomes one sentence that names its line."""
    path = str(Path(target.rpartition(":")[0]).resolve())
    try:
        yield
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        lines += [error.lineno] if isinstance(error, SyntaxError) and error.filename == path else []
        if not lines:
            raise
        said = f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]
        raise ValueError(f"{target} raised {said} (line {lines[-1]})") from error


def load(target: str) -> nn.Module | Callable[..., object]:
    """Import the script, and return the module or function that the name means.

    A function without arguments is called, and makes what is audited. The script's folder is searched for what it
    imports, and its `__name__` is not "__main__".

    Raises:
        ValueError: the file or name does not exist, importing raises, or the name is neither a module nor a function.
    """
    file, _, name = target.rpartition(":")
    path = Path(file).resolve()
    if not path.is_file():
        raise ValueError(f"no script {file!r}: name one as in train.py:score")
    sys.path.insert(0, str(path.parent))
    with blaming(target):
        title = path.stem if path.stem not in sys.modules else f"script_{path.stem}"
        spec = importlib.util.spec_from_file_location(title, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[title] = module  # dataclasses and pickles look for it there
        spec.loader.exec_module(module)
        found: Any = module
        for part in name.split("."):
            if not hasattr(found, part):
                near = close_to(part, [each for each in dir(found) if not each.startswith("_")])
                raise ValueError(f"{file} has no {name!r}{near}")
            found = getattr(found, part)
        if isinstance(found, types.FunctionType) and not inspect.signature(found).parameters:
            found = found()
    if isinstance(found, nn.Module) or is_function(found):
        return found
    what = "a class" if isinstance(found, type) else f"a {type(found).__name__}"
    raise ValueError(f"{target} is {what}: name a function of token ids, a module, or a function that makes one")


def example(found: object, tokens: int, ids: Sequence[int] | None = None) -> Tensor:
    """Ids to call it with: [1, n] of those given, or two random sequences below the size of its vocabulary, else 50."""
    if ids is not None:
        return torch.tensor([ids])
    table = embedding_table(found) if isinstance(found, nn.Module) else None
    size = _VOCABULARY if table is None else table.num_embeddings
    return torch.randint(size, (2, tokens), generator=torch.Generator().manual_seed(0))
