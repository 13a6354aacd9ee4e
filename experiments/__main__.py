"""`python -m experiments --list`, `python -m experiments NAME --scale tiny`."""

import sys

from experiments.runner.command import main

if __name__ == "__main__":
    sys.exit(main())
