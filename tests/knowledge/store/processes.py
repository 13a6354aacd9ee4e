"""Code in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def run(code, *arguments):
    """A process of its own; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout
