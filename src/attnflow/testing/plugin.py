"""A pytest plugin: fixtures for tests of your models, and `pytest --attnflow train.py:score`.

pytest loads it wherever attnflow is installed. It imports nothing but pytest until a fixture or an audit is used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from attnflow.audit.guards import Guard


@pytest.fixture(scope="session")
def assert_no_leak() -> Callable[..., None]:
    """`attnflow.testing.assert_no_leak`: `assert_no_leak(model, batch)` fails with the table of the audit."""
    from attnflow import testing

    return testing.assert_no_leak


@pytest.fixture(scope="session")
def assert_same_mask() -> Callable[[object, object], None]:
    """`attnflow.testing.assert_same_mask`: `assert_same_mask(actual, expected)` fails with the pairs that differ."""
    from attnflow import testing

    return testing.assert_same_mask


@pytest.fixture
def guard_leaks() -> Generator[Callable[..., Guard]]:
    """`af.audit.guard` until the test ends: `guard_leaks(model)`, then train; a leak stops the training.

    The test also fails if a guarded model was never called, since nothing was audited then.
    """
    from attnflow.audit import guard

    guards: list[Guard] = []
    with ExitStack() as until_the_end:

        def guarded(model: Any, every: int | None = None, **options: Any) -> Guard:
            guards.append(until_the_end.enter_context(guard(model, every, **options)))
            return guards[-1]

        yield guarded
        bad = [str(one) for one in guards if not one.ok]
    if bad:
        pytest.fail("\n".join(bad), pytrace=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    about = (
        "audit SCRIPT.py:NAME as one more test: a function of token ids, a module, or a function that makes one, alone "
        "or as (module, inputs, order)"
    )
    parser.getgroup("attnflow").addoption("--attnflow", action="append", default=[], metavar="NAME", help=about)
    parser.addini("attnflow", about, type="linelist", default=[])


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    names = cast(list[str], [*config.getini("attnflow"), *(config.getoption("--attnflow") or ())])
    items += [Audit.from_parent(session, name=name) for name in names]


class Audit(pytest.Item):
    def runtest(self) -> None:
        """Audit it, and fail with the report if something leaks."""
        from attnflow.audit.scripts import blaming, example, load
        from attnflow.testing.assertions import assert_no_leak

        audited = load(self.name)
        with blaming(self.name):
            assert_no_leak(audited.subject, example(audited), audited.order)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        """Return the report, or the reason why an audit was impossible, without a traceback."""
        return str(excinfo.value)

    def reportinfo(self) -> tuple[str, None, str]:
        return self.name, None, f"attnflow {self.name}"
