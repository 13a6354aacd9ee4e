"""`python -m experiments --list`, `python -m experiments NAME --scale tiny`, `python -m experiments evaluate MODEL`."""

import sys

from experiments.runner.command import main

if __name__ == "__main__":
    if sys.argv[1:2] == ["evaluate"]:
        from experiments.evaluation.command import main as evaluate

        sys.exit(evaluate(sys.argv[2:]))
    sys.exit(main())
