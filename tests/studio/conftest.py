"""One studio and one browser for the tests of a module; they skip where one of them is not installed."""

import pytest

from tests.studio.browser import CHROMIUM, opened


@pytest.fixture(scope="module")
def studio():
    pytest.importorskip("starlette")
    pytest.importorskip("websockets")
    from tests.studio.server import serving

    with serving(sessions=8) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with playwright.sync_playwright() as tools:
        running = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(browser, studio):
    with opened(browser, studio) as shown:
        yield shown
