from collections.abc import Callable
from typing import NamedTuple

import pytest

from attnflow.cli import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`attnflow ARGUMENTS` in this process, 80 columns, no terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("ATTNFLOW_TRACEBACK", raising=False)

    def call(*arguments: str) -> Outcome:
        capsys.readouterr()
        code = main(arguments)
        return Outcome(code, *capsys.readouterr())

    return call
