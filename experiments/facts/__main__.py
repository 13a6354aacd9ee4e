"""Facts as entries of a store, edited at run time: `python -m experiments.facts OUTPUT`.

Training saves its state, and every finished run is a file, so that an interrupted study goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.facts.study import SCALES, run
from experiments.facts.summary import summarise
from experiments.records import command


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    command(
        "experiments.facts",
        __doc__,
        SCALES,
        lambda study, given: run(study, given.output, given.arms.split(","), given.seeds or study.seeds),
        summarise,
        arguments,
        {
            "--arms": {"default": "main", "help": "which: main, answers alone, sparsemax, coordinate"},
            "--seeds": {"type": int, "nargs": "+", "help": "of the main arm, only these"},
        },
    )


if __name__ == "__main__":
    main()
