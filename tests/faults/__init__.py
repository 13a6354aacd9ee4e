"""Faults injected on purpose, counted: what is promised to hold under each, and what was lost.

A kind of fault is one file here, found by its name:

    PROMISE: str   one sentence: what must hold
    TRIALS: int    how many trials the suite runs
    SHORT: int     how many `make test` runs, a second or two in all

    def trial(seed: int, folder: Path) -> str | None:
        One fault, injected in an empty folder; None where the promise held, else what was lost or wrong.

An exception of a trial is a loss, and so is the end of its process.
"""
