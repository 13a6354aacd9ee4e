"""The model behind a page: it is the server's, its work says how far it is and is stopped, and masks do not wait."""

import json
import time

import psutil
import pytest

pytest.importorskip("starlette")
pytest.importorskip("websockets")

from tests.models.saved import save_tiny_llama
from tests.studio.server import serving

pytestmark = pytest.mark.slow  # each page starts a process that imports torch and reads a model

TEXT = "the of and to in I that his"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(folder):
    with serving(model={"model": folder, "bias": None}) as running:
        yield running


def ask(page, op, **message):
    """The reply, and what was said of its progress before."""
    page.socket.send(json.dumps({"id": 7, "op": op, **message}))
    heard = []
    while True:
        reply = json.loads(page.socket.recv(timeout=300))
        if "progress" not in reply:
            assert reply["id"] == 7
            return reply, heard
        heard.append(reply["progress"])


def test_the_model_is_the_one_of_the_command_line(server, folder):
    with server.page() as page:
        reply, heard = ask(page, "model", model="/etc/passwd", path="/etc/passwd", bias="/etc")
        assert (reply["model"], reply["kind"], reply["bias"]) == (folder, "LlamaForCausalLM", False)
        assert heard[0] == [0, 0, f"reading {folder}"]
        reply, heard = ask(page, "audit", text=TEXT)
        assert reply["verdict"] == "clean"
        assert any(total for _, total, _ in heard)
        assert ask(page, "geometry")[0]["ok"]
        assert len(ask(page, "trace", text=TEXT)[0]["tokens"]) == 8


@pytest.mark.parametrize(
    ("op", "message", "error"),
    [
        ("audit", {"text": "the " * 2000}, "at most 4,000 characters"),
        ("audit", {"text": {"path": "/etc/passwd"}}, "text must be text"),
        ("audit", {}, "text must be text"),
        ("trace", {"text": TEXT, "position": 1 << 70}, "position must be one of"),
        ("trace", {"text": TEXT, "position": [0]}, "expected an integer"),
        ("bias", {"text": TEXT, "layer": 0}, "bias"),
        ("state", {"what": "model"}, "unknown operation"),
        ("load", {"what": "model", "text": "{}"}, "unknown operation"),
    ],
)
def test_a_question_about_the_model_is_small_and_names_nothing(server, op, message, error):
    with server.page() as page:
        reply, _ = ask(page, op, **message)
        assert not reply["ok"]
        assert error in reply["error"]
        assert len(reply["error"]) < 600
        assert page.ask("state")["size"] == 16


def test_masks_do_not_wait_for_the_model_and_its_work_is_stopped(server):
    with server.page() as page:
        page.socket.send(json.dumps({"id": 2, "op": "audit", "text": TEXT}))  # which reads the model first
        page.socket.send(json.dumps({"id": 3, "op": "state"}))
        first = json.loads(page.socket.recv(timeout=120))
        assert first.get("id") == 3 or "progress" in first
        page.socket.send(json.dumps({"op": "stop", "what": "model"}))
        answers = {}
        while set(answers) != {2, 3}:
            reply = first if first else json.loads(page.socket.recv(timeout=120))
            first = None
            if "progress" not in reply:
                answers[reply["id"]] = reply
        assert answers[3]["size"] == 16
        assert (answers[2]["ok"], answers[2]["error"]) == (False, "stopped")
        assert ask(page, "audit", text=TEXT)[0]["verdict"] == "clean", "a new process reads the model again"


def test_the_process_of_a_model_ends_with_its_page(server):
    with server.page() as page:
        assert ask(page, "model")[0]["ok"]
        here = [each for each in psutil.Process(server.process.pid).children() if "model" in each.cmdline()]
        assert here
    for _ in range(100):
        if not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in here):
            break
        time.sleep(0.1)
    else:
        pytest.fail("it is still there")
