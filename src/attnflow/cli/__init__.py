"""The `attnflow` command: one file per command, which parses, calls the package and prints."""

from attnflow.cli._main import main

__all__ = ["main"]
