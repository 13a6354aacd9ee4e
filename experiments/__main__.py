"""`python -m experiments --list`: what can be run, and how."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from attnflow._core.markup import aligned

ROOT = Path(__file__).parent


def names() -> list[str]:
    """Of all experiments."""
    return sorted(path.parent.name for path in ROOT.glob("*/__main__.py"))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    parser.add_argument("--list", action="store_true", help="a table of the experiments (also without this option)")
    parser.parse_args(arguments)
    rows = [["experiment", "question", "results"]]
    for name in names():
        question = (import_module(f"experiments.{name}").__doc__ or "").split("\n")[0]
        done = "tiny" if (ROOT / name / "results").is_dir() else "none yet"
        rows.append([name, question, done])
    print(aligned(rows, left=range(3)))
    print("\nRun one: python -m experiments.NAME OUTPUT --scale tiny; what is known of it: experiments/NAME/README.md")


if __name__ == "__main__":
    main()
