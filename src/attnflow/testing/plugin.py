"""A plugin of pytest: `pytest --attnflow train.py:score` audits a model or a function as one more test.

The setting `attnflow` of the configuration file lists what every run audits, one name a line. Nothing is imported
before such a test runs.
"""

from __future__ import annotations

from typing import Any, cast

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option and the setting."""
    about = "audit what SCRIPT.py:function means: a function of token ids, a module, or a function that makes one"
    parser.getgroup("attnflow").addoption("--attnflow", action="append", default=[], metavar="NAME", help=about)
    parser.addini("attnflow", about, type="linelist", default=[])


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add one test for each name."""
    names = cast(list[str], [*config.getini("attnflow"), *(config.getoption("--attnflow") or ())])
    items += [Audit.from_parent(session, name=name) for name in names]


class Audit(pytest.Item):
    """The audit of one name as a test."""

    def runtest(self) -> None:
        """Fail with the report, unless it is clean."""
        from attnflow.audit.scripts import blaming, example, load
        from attnflow.testing.assertions import assert_no_leak

        found = load(self.name)
        with blaming(self.name):
            assert_no_leak(found, example(found, 32))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        """The report, or why there is none, without a traceback."""
        return str(excinfo.value)

    def reportinfo(self) -> tuple[str, None, str]:
        """What a summary calls the test."""
        return self.name, None, f"attnflow {self.name}"
