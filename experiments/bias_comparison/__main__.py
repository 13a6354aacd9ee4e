"""Guidance-only training against its controls at equal parameters: `python -m experiments.bias_comparison OUTPUT`.

Every finished run is a file, so that an interrupted comparison goes on where it stopped, and several processes can
share the work by taking arms each (`--arms`).
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.bias_comparison.compare import ARMS, SCALES, compare
from experiments.bias_comparison.summary import summarise
from experiments.records import command


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    command(
        "experiments.bias_comparison",
        __doc__,
        SCALES,
        lambda config, given: compare(config, given.output, given.arms.split(",")),
        summarise,
        arguments,
        {"--arms": {"default": ",".join(ARMS), "help": "only these arms"}},
    )


if __name__ == "__main__":
    main()
