"""Facts in a converted model ablated and edited, entry by entry: `python -m experiments.knowledge_ablation OUTPUT`.

Each fact is a file, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.knowledge_ablation.ablate import SCALES, ablate
from experiments.knowledge_ablation.summary import summarise
from experiments.records import command


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    command(
        "experiments.knowledge_ablation",
        __doc__,
        SCALES,
        lambda config, given: ablate(config, given.output),
        summarise,
        arguments,
    )


if __name__ == "__main__":
    main()
