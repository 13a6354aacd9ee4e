"""Checkpoints of a run, in one folder by step: which of them are complete, and which are kept."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any, Final

from attnflow._core.files import sealed, unseal

_LOG: Final = logging.getLogger("attnflow.bias")
_NAME: Final = re.compile(r"checkpoint-(\d+)")


def by_step(folder: Path) -> list[Path]:
    """All checkpoints of a folder, complete or not, the newest first."""
    steps = {path: _NAME.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ())}
    return sorted((path for path, match in steps.items() if match and path.is_dir()), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step of a checkpoint."""
    return int(path.name.rpartition("-")[2])


def about(path: Path, *, contents: bool = True) -> dict[str, Any]:
    """What a checkpoint that a run can go on from says of itself.

    Args:
        path: of the checkpoint.
        contents: compare the checksums of its files, too.

    Raises:
        ValueError: it is not complete, or holds the model alone; the message says which.
    """
    said = sealed(path, contents=contents)
    if not said.get("resumable"):
        raise ValueError(f"{path} holds the model alone (save_only_model=True), without the state of the optimiser")
    return said


def newest(folder: Path, *, contents: bool = True) -> Path | None:
    """The newest checkpoint that a run can go on from; those after it are named in the log, with the reason."""
    for path in by_step(folder):
        try:
            about(path, contents=contents)
        except ValueError as error:
            _LOG.warning("%s; an earlier one is looked for", error)
        else:
            return path
    return None


def rotate(folder: Path, limit: int | None, best: str | None) -> None:
    """Keep the newest `limit` complete checkpoints and the best one; what kills have left of others goes, too."""
    if not limit or limit < 0:
        return
    complete: list[Path] = []
    for path in by_step(folder):
        try:
            sealed(path, contents=False)
        except ValueError:
            continue
        complete.append(path)
    chosen = [path for path in complete if path == complete[0] or str(path) == best]
    chosen += [path for path in complete if path not in chosen][: max(0, limit - len(chosen))]
    for path in set(by_step(folder)) - set(chosen):
        unseal(path)  # first: a kill meanwhile leaves none that is complete in part
        shutil.rmtree(path, ignore_errors=True)
