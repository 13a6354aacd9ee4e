"""`python -m attnflow` is the command `attnflow`."""

import sys

from attnflow.cli import main

if __name__ == "__main__":
    sys.exit(main())
