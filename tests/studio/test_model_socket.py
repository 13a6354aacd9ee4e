"""The model behind a page: it is the server's, its work says how far it is and is stopped, and masks do not wait."""

import json
import time

import psutil
import pytest

pytest.importorskip("starlette")
pytest.importorskip("websockets")

from tests.models.saved import save_tiny_llama
from tests.studio.server import Page, serving

pytestmark = pytest.mark.slow  # each page starts a process that imports torch and reads a model

TEXT = "the of and to in I that his"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(folder):
    with serving(model={"model": folder, "bias": None}, kept=3.0) as running:
        yield running


def heard(page, *numbers):
    """The replies to these messages by their id, and what was said of progress before."""
    replies, progress = {}, []
    while not set(numbers) <= set(replies):
        reply = json.loads(page.socket.recv(timeout=300))
        if "progress" in reply:
            progress.append(reply["progress"])
        else:
            replies[reply["id"]] = reply
    return replies, progress


def ask(page, op, **message):
    page.socket.send(json.dumps({"id": 7, "op": op, **message}))
    replies, progress = heard(page, 7)
    return replies[7], progress


def of_model(server):
    """The running processes of models."""
    return [each for each in psutil.Process(server.process.pid).children() if "model" in each.cmdline()]


def test_the_model_is_the_one_of_the_command_line_and_ends_after_its_page(server, folder):
    with server.page() as page:
        reply, progress = ask(page, "model", model="/etc/passwd", path="/etc/passwd", bias="/etc")
        assert (reply["model"], reply["kind"], reply["bias"]) == (folder, "LlamaForCausalLM", False)
        assert progress[0] == [0, 0, f"reading {folder}"]
        reply, progress = ask(page, "audit", text=TEXT)
        assert reply["verdict"] == "clean"
        assert any(total for _, total, _ in progress)
        for op, message, said in [
            ("trace", {}, "opening the feed-forward layers"),
            ("trace", {"ablate": 4}, "two forward passes, and one of 5 copies of the text"),
            ("entry", {"entry": 3}, "looking at entry 3"),
            ("passages", {"entry": 3}, "reading texts"),
            ("without", {"entry": 3}, "looking at entry 3"),
            ("why", {"layer": 0, "head": 1}, "a forward pass, and the components of the residual stream"),
        ]:
            reply, progress = ask(page, op, text=TEXT, model="/etc/passwd", path="/etc/passwd", **message)
            assert reply["ok"]
            assert said in [what for _, _, what in progress]
        for op, message, error in [
            ("audit", {"text": "the " * 2000}, "at most 4,000 characters"),
            ("audit", {"text": {"path": "/etc/passwd"}}, "text must be text"),
            ("trace", {"text": TEXT, "position": 1 << 70}, "position must be one of"),
            ("trace", {"text": TEXT, "ablate": 1 << 70}, "ablate must be at most 16"),
            ("entry", {"text": TEXT, "entry": "/etc/passwd"}, "entry: expected an integer"),
            ("why", {"text": TEXT, "layer": 1 << 70, "head": 0}, "layer"),
            ("state", {"what": "model"}, "unknown operation"),
            ("load", {"what": "model", "text": "{}"}, "unknown operation"),
        ]:
            reply, _ = ask(page, op, **message)
            assert not reply["ok"]
            assert error in reply["error"]
        assert page.ask("state")["size"] == 16
        [process] = of_model(server)
    process.wait(30)


def test_masks_do_not_wait_for_the_model_and_a_stop_ends_its_process(server):
    with server.page() as page:
        page.socket.send(json.dumps({"id": 2, "op": "audit", "text": TEXT}))  # which reads the model first
        page.socket.send(json.dumps({"id": 3, "op": "state"}))
        assert heard(page, 3)[0][3]["size"] == 16
        deadline = time.monotonic() + 60
        while not of_model(server) and time.monotonic() < deadline:  # it starts beside the answer about masks
            time.sleep(0.05)
        [process] = of_model(server)
        page.socket.send(json.dumps({"op": "stop", "what": "model"}))
        reply = heard(page, 2)[0][2]
        assert (reply["ok"], reply["error"]) == (False, "stopped")
        process.wait(30)
        assert ask(page, "audit", text=TEXT)[0]["verdict"] == "clean", "a new process reads the model again"


def test_a_page_that_is_loaded_again_has_its_process_and_another_has_the_model_at_once(server):
    """What a page changed is there after a reload; one process reads the model for all pages, and one waits."""
    first, second = (json.dumps({"token": server.token, "page": name}) for name in ("first", "second"))
    with server.connect() as socket:
        socket.send(first)
        page = Page(socket)
        assert page.ask("invert")["ok"]
        assert page.ask("about")["model"] is not None
        assert ask(page, "model")[0]["ok"]
        [process] = of_model(server)
    with server.connect() as again, server.connect() as other:
        again.send(first)
        assert Page(again).ask("state")["undo"] == "invert"
        other.send(second)
        assert Page(other).ask("state")["undo"] is None
        reply, progress = ask(Page(other), "model")
        assert reply["ok"]
        assert not progress, "it was read before"
        assert of_model(server) == [process]
        for _ in range(300):
            if len(psutil.Process(server.process.pid).children()) == 4:  # two pages, the model, the one that waits
                break
            time.sleep(0.1)
        else:
            pytest.fail("no process waits for the next page")
    process.wait(60)


def test_a_page_that_leaves_in_the_middle_of_an_answer_leaves_the_process_in_order(server):
    with server.page() as page:
        page.socket.send(json.dumps({"id": 2, "op": "explain", "text": TEXT}))
        heard_one = json.loads(page.socket.recv(timeout=300))
        assert "progress" in heard_one
    with server.page() as page:
        assert ask(page, "geometry")[0]["stacks"]
        reply, progress = ask(page, "explain", text=TEXT)
        assert reply["edges"]
        assert not progress, "the answer was kept for who asks again"
