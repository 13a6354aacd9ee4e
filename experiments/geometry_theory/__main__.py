"""Theorems 2.3 and 2.4 as a measurement over seeds: `python -m experiments.geometry_theory OUTPUT`."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.geometry_theory.study import SCALES, run, summarise
from experiments.records import command


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    command(
        "experiments.geometry_theory",
        __doc__,
        SCALES,
        lambda settings, given: run(settings, given.output),
        summarise,
        arguments,
    )


if __name__ == "__main__":
    main()
