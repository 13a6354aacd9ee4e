"""Loads `SCRIPT.py:NAME` for an audit: the script runs as under `python SCRIPT.py`, except its main part.

Under `torchrun` each rank loads it, and the ranks audit what it makes together.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import traceback
import types
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, cast

import torch
from torch import nn

from attnflow._core.errors import RankFailed
from attnflow._core.plain import close_to
from attnflow.audit.functions import is_function
from attnflow.models.passes.processes import on_every_rank, world
from attnflow.models.subject import Loaded, Subject

LENGTH: Final = 31  # tokens of an example
_VOCABULARY: Final = 50  # ids that any vocabulary has, where the size of it is not known


class Audited(NamedTuple):
    subject: nn.Module | Loaded | Callable[..., object]
    inputs: Any = None
    order: Any = None
    shard: Any = None  # of a step on several processes: the positions that this rank returns


@contextmanager
def blaming(target: str) -> Generator[None]:
    """Blame what a script raises on its line; ending the process, as `os._exit(0)`, would pass for a clean audit."""
    path = str(_parts(target)[0].resolve())
    process, leave, arguments = os.getpid(), os._exit, sys.argv

    def ended(code: int) -> NoReturn:
        if os.getpid() != process:  # a forked child ends so
            leave(code)
        raise SystemExit(f"os._exit({code})")

    try:
        os._exit, sys.argv = ended, [path]
        yield
    except (Exception, SystemExit) as error:
        cause, rank = cast(Exception, error), ""
        here = f"rank {os.environ.get('RANK')}: "
        if isinstance(error, RankFailed) and isinstance(error.__cause__, Exception) and str(error).startswith(here):
            cause, rank = error.__cause__, here
        lines = [frame.lineno for frame in traceback.extract_tb(cause.__traceback__) if frame.filename == path]
        lines += [error.lineno] if isinstance(error, SyntaxError) and error.filename == path else []
        if not lines:
            raise
        said = f"{type(cause).__name__}: {str(cause).strip() or 'no message'}".splitlines()[0]
        raise ValueError(f"{rank}{target} raised {said} (line {lines[-1]})") from error
    finally:
        os._exit, sys.argv = leave, arguments


def load(target: str) -> Audited:
    """Import the script, and return what the name means: a function without arguments makes it.

    Under torchrun every rank does so, and an error of one reaches all that have a process group.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched == 1:
        return _loaded(target)
    audited = error = None
    try:
        audited = _loaded(target)
    except ValueError as raised:
        error = raised
    if not world() and error is not None:
        raise ValueError(f"rank {os.environ.get('RANK')}: {error}") from error
    if not world():
        raise ValueError(
            f"{launched} processes run {target}, but have no process group: call "
            "torch.distributed.init_process_group() in the script, where it makes what is audited"
        )

    def here() -> Audited:
        if audited is None:
            raise cast(ValueError, error)
        return audited

    return on_every_rank(world(), "attnflow audit", lambda _: here())


def _loaded(target: str) -> Audited:
    file, name = _parts(target)
    path = file.resolve()
    if not path.is_file():
        raise ValueError(f"no script {str(file)!r}: name one as in train.py:score")
    sys.path.insert(0, str(path.parent))
    with blaming(target):
        title = path.stem if path.stem not in sys.modules else f"script_{path.stem}"
        spec = importlib.util.spec_from_file_location(title, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[title] = module  # dataclasses and pickles look for it there
        spec.loader.exec_module(module)
        if not name:
            raise ValueError(_contents(str(file), module))
        value: Any = module
        for part in name.split("."):
            if not hasattr(value, part):
                near = close_to(part, [each for each in dir(value) if not each.startswith("_")])
                raise ValueError(f"{file} has no {name!r}{near}")
            value = getattr(value, part)
        if isinstance(value, types.FunctionType) and not inspect.signature(value).parameters:
            value = value()
    parts: Any = value if type(value) is tuple and len(cast(Sequence[object], value)) in (2, 3, 4) else (value,)
    audited = Audited(*parts)
    if isinstance(audited.subject, nn.Module | Loaded) or is_function(audited.subject):
        return audited
    what = "a class" if isinstance(value, type) else f"a {type(value).__name__}"
    raise ValueError(
        f"{target} is {what}: name a function of token ids, a module, or a function that makes one, alone or as "
        "(module, inputs, order, shard)"
    )


def _parts(target: str) -> tuple[Path, str]:
    file, _, name = (f"{target}:" if target.endswith(".py") else target).rpartition(":")
    return Path(file), name


def _contents(file: str, module: types.ModuleType) -> str:
    shown = ((name, value) for name, value in vars(module).items() if not name.startswith("_"))
    here = module.__name__
    names = [n for n, v in shown if isinstance(v, nn.Module) or (is_function(v) and v.__module__ == here)]
    if not names:
        return f"{file} defines no function and no module that could be audited"
    return f"{file} defines {', '.join(names)}: name one, as in {file}:{names[0]}"


def example(audited: Audited, tokens: int | None = None, ids: Sequence[int] | None = None) -> Any:
    """The ids given, its own inputs, or random ids of a prime length, as one equal to a width could mislead."""
    if ids is not None:
        return torch.tensor([ids])
    if audited.inputs is not None:
        if tokens is not None:
            raise ValueError("the script gives its own inputs, which set the number of tokens")
        return audited.inputs
    table = Subject(audited.subject).embedding if isinstance(audited.subject, nn.Module) else None
    size = _VOCABULARY if table is None else table.num_embeddings
    return torch.randint(size, (2, tokens or LENGTH), generator=torch.Generator().manual_seed(0))
