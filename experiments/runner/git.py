"""The state of the repository that results come from: a commit, clean, with the predictions in it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_PREDICTION: Final = re.compile(r"^## Prediction[^\n]*\n(?P<text>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


class NotReproducible(ValueError):
    """Results that could not be had again, or predictions that could have been written after them."""


def head(root: Path) -> str:
    return _git(root, "rev-parse", "HEAD").strip()


def changes(root: Path) -> list[str]:
    """Files that differ from the commit that is checked out, new ones too."""
    return [line[3:] for line in _git(root, "status", "--porcelain", "--untracked-files=all").splitlines()]


def clean_commit(root: Path, besides: str) -> str:
    """The commit that is checked out; nothing has changed since but in the folder of results, to be written anew."""
    changed = [name for name in changes(root) if not name.startswith(besides)]
    if changed:
        shown = ", ".join(changed[:5]) + (", ..." if len(changed) > 5 else "")
        raise NotReproducible(
            f"results are written from a clean commit only, and these files differ from it: {shown}; commit them, or "
            "pass --results FOLDER to try something out"
        )
    return head(root)


def prediction(root: Path, readme: str) -> str:
    """The section "## Prediction..." of a README as the commit has it."""
    text = _git(root, "show", f"HEAD:{readme}")
    found = _PREDICTION.search(text)
    if found is None or not found["text"].strip():
        raise NotReproducible(f'{readme} has no section "## Predictions" in the commit: write it and commit it first')
    return found["text"].strip()


def code_differs(root: Path, one: str, other: str, paths: Sequence[str]) -> list[str]:
    """Python files below some paths that differ between two commits."""
    if one == other:
        return []
    every = _git(root, "diff", "--name-only", one, other, "--", *paths).splitlines()
    return [name for name in every if name.endswith(".py")]


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        raise NotReproducible(f"git {' '.join(arguments)} in {root} says: {said}")
    return done.stdout
