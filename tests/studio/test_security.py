"""The studio serves one reader on one machine: each test tries to be somebody else, or to ask for too much."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress

import psutil
import pytest

pytest.importorskip("starlette")
pytest.importorskip("websockets")

from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.studio.server import serving

POLICY = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
LIMIT = 200_000  # bytes of a message
ROUTES = ["/", "/studio.js", "/studio.svg", "/session", "/nothing"]


@pytest.fixture(scope="module")
def server():
    with serving(first_message=1.0, message_bytes=LIMIT) as running:
        yield running


def request(server, path="/", method="GET", host=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for value in [f"127.0.0.1:{server.port}"] if host is None else host:
        connection.putheader("Host", value)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


def closed(connection):
    """The code and the reason with which the server closes a socket, and nothing said before it."""
    with pytest.raises(ConnectionClosed) as caught:
        pytest.fail(f"the server said {connection.recv(timeout=20)!r}")
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code, caught.value.rcvd.reason


def test_it_listens_on_the_loopback_and_nowhere_else(server):
    listening = [
        each.laddr.ip
        for each in psutil.Process(server.process.pid).net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    ]
    assert listening == ["127.0.0.1"]
    for address in ("127.0.0.2", "0.0.0.1"):
        with socket.socket() as probe:
            probe.settimeout(2)
            assert probe.connect_ex((address, server.port)) != 0


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost:{port}.evil.example", "[::1]:{port}",
     "127.0.0.1:{port}@evil.example", "", "LOCALHOST:{port}", "0.0.0.0:{port}"],
)  # fmt: skip
def test_a_name_that_somebody_else_controls_gets_nothing(server, path, host):
    """DNS rebinding: the browser believes that the page of another site is on this server."""
    response, body = request(server, path, host=[host.format(port=server.port)])
    assert response.status in (400, 421)
    assert b"<script" not in body


def test_both_names_of_the_loopback_are_served(server):
    for name in ("127.0.0.1", "localhost"):
        assert request(server, host=[f"{name}:{server.port}"])[0].status == 200


@pytest.mark.parametrize("hosts", [[], ["127.0.0.1:{port}", "evil.example"], ["evil.example", "127.0.0.1:{port}"]])
def test_no_host_or_two_of_them_get_nothing(server, hosts):
    response, _ = request(server, host=[host.format(port=server.port) for host in hosts])
    assert response.status in (400, 421)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_is_sent_to_it_but_questions(server, method):
    assert request(server, "/", method)[0].status == 405


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "own"])
def test_every_answer_has_the_policy_and_none_lets_another_site_read_it(server, path, origin):
    own = server.origin if origin == "own" else origin
    for method, host in (("GET", None), ("HEAD", None), ("OPTIONS", None), ("GET", ["evil.example"])):
        response, _ = request(server, path, method, host, Origin=own, Access_Control_Request_Method="GET")
        headers = {name.lower(): value for name, value in response.getheaders()}
        assert POLICY.items() <= headers.items()
        assert not [name for name in headers if name.startswith("access-control")]
        assert "server" not in headers


@pytest.mark.parametrize(
    "path",
    ["/../../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/studio.js/../report.js", "/report.js",
     "/..%2freport.css", "/studio.js%00", "/studio.html", "/session/../studio.html", "/.", "/?file=/etc/passwd#x"],
)  # fmt: skip
def test_no_path_of_a_client_is_opened(server, path):
    response, body = request(server, path)
    assert response.status == 404 or path.startswith("/?")
    assert b"root:" not in body


def test_what_is_served_holds_neither_the_token_nor_an_inline_script(server):
    for path in ROUTES:
        body = request(server, path)[1]
        assert server.token.encode() not in body
    page = request(server)[1].decode()
    assert "style=" not in page
    assert "<style" not in page
    assert page.count("<script") == page.count('<script type="module" src="/studio.js"></script>') == 1
    assert "http://" not in page
    assert "https://" not in page
    assert len(server.token) >= 43  # 256 bits


def test_tokens_are_compared_in_constant_time(monkeypatch):
    from attnflow.studio import app

    compared = []
    monkeypatch.setattr(app.hmac, "compare_digest", lambda *pair: compared.append(pair) or False)
    assert not app.is_token("secret", "secret")
    assert compared == [(b"secret", b"secret")]


def test_every_start_has_another_token(server):
    with serving() as other:
        assert other.token != server.token


@pytest.mark.parametrize(
    "origin",
    [None, "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1", "http://127.0.0.1", "http://localhost:{port}",
     "http://127.0.0.1:{port}/", "http://127.0.0.1:{port}.evil.example", "http://evil.example:{port}",
     "http://127.0.0.1:{port} http://evil.example", "file://"],
)  # fmt: skip
def test_a_socket_of_another_origin_is_not_opened(server, origin):
    with pytest.raises(InvalidStatus) as caught:
        server.connect(origin=origin and origin.format(port=server.port)).close()
    assert caught.value.response.status_code == 403


@pytest.mark.parametrize(
    "first",
    ["{}", '{"token": ""}', '{"token": "' + "A" * 43 + '"}', '{"token": null}', '{"token": ["TOKEN"]}', "TOKEN",
     '"TOKEN"', '["TOKEN"]', '{"token": "TOKEN "}', '{"token": "TOKEX"}', '{"op": "state"}', "[" * 50_000, "", "\0",
     '{"token": "\\ud800"}', b"TOKEN", b'{"token": "TOKEN"}'],
    ids=lambda first: repr(first)[:24],
)  # fmt: skip
def test_a_socket_without_the_token_is_closed_and_learns_nothing(server, first):
    if isinstance(first, str):
        first = first.replace("TOKEN", server.token).replace("TOKEX", server.token[:-1])
    else:
        first = first.replace(b"TOKEN", server.token.encode())
    with server.connect() as connection:
        connection.send(first)
        with suppress(ConnectionClosed):  # it may be closed already
            connection.send('{"id": 1, "op": "state"}')
        assert closed(connection)[0] == 4401


def test_who_says_nothing_is_shown_out(server):
    with server.connect() as connection:
        assert closed(connection)[0] == 4401


@pytest.mark.parametrize("text", ["not JSON", "[]", "1", '"state"', b"\xff", "[" * 100_000])
def test_what_is_no_message_ends_the_page(server, text):
    with server.page() as page:
        page.socket.send(text)
        assert closed(page.socket)[0] == 4400


@pytest.mark.parametrize("operation", [{}, [], [[]], {"a": []}, None, True, 1 << 70, 1.5, "", "x" * 500])
def test_an_operation_that_is_none_is_answered_and_the_page_goes_on(server, operation):
    with server.page() as page:
        reply = page.ask(operation)
        assert not reply["ok"]
        assert "unknown operation" in reply["error"] or "integers are at most" in reply["error"]
        assert len(reply["error"]) < 100
        assert page.ask("state")["ok"]


LARGE = [
    ({"name": "../../etc/passwd", "text": "a b"}, "unknown family"),
    ({"name": "butterfly", "text": "/etc/passwd " * 40}, "1 to 32 words"),
    ({"name": "butterfly", "text": "a" * 150_000}, "at most 2,000 characters"),
    ({"name": "permutation_lm", "text": "a b", "settings": {"permutation": "1" * 100_000}}, "at most 400"),
    ({"name": "butterfly", "text": "a b", "pairs": [[0, 1]] * 10_000}, "at most 64 pairs"),
    ({"name": "butterfly", "text": "a b", "pairs": [[0, 1 << 70]]}, "integers are at most"),
    ({"name": "butterfly", "text": "a b", "settings": {"tokens": "9"}}, "no parameter 'tokens'"),
]


def test_a_family_is_named_and_small_and_a_message_beyond_the_limit_ends_the_page(server):
    with server.page() as page:
        for message, error in LARGE:
            reply = page.ask("family", **message)
            assert not reply["ok"]
            assert error in reply["error"]
            assert len(reply["error"]) < 500
        assert page.ask("state")["size"] == 16
        page.socket.send(json.dumps({"op": "load", "text": "x" * LIMIT}))
        assert closed(page.socket)[0] == 1009


@pytest.mark.slow
def test_more_pages_than_it_serves_wait_outside():
    with serving(sessions=2) as few, ExitStack() as pages:
        for _ in range(2):
            assert pages.enter_context(few.page()).ask("state")["ok"]
        with few.page() as third:
            assert closed(third.socket) == (4429, "2 pages are open already")
        pages.close()
        for _ in range(50):
            with few.page() as again:
                try:
                    assert again.ask("state")["ok"]
                    break
                except ConnectionClosed:
                    time.sleep(0.1)
        else:
            pytest.fail("no page could be opened after the others were closed")


LONG = {"name": "sliding_window", "parameters": {"n": 131_072, "window": 8}}


@pytest.mark.slow
def test_work_without_end_is_ended_and_the_design_is_kept():
    with serving(LONG, seconds=4.0) as short, short.page() as page:
        assert page.ask("pick", name="sliding_window", settings={"n": "131072", "window": "9"})["ok"]
        assert page.ask("paint", strokes=[[5, 6, 90, 91, 1]])["ok"]
        assert page.ask("labels", kind="next")["ok"]
        began = time.monotonic()
        reply = page.ask("leaks")
        assert (reply["ok"], reply["restarted"]) == (False, True)
        assert "stopped after 4 seconds" in reply["error"]
        assert time.monotonic() - began < 60
        for _ in range(10):  # on a busy machine the new process may need more than its time to start
            state = page.ask("state")
            if state["ok"]:
                break
        assert state["num_labels"] == 131_071
        assert "window=9" in state["layers"][0]["title"]


@pytest.mark.slow
def test_a_reader_stops_what_takes_too_long():
    with serving(LONG, seconds=300.0) as patient, patient.page() as page:
        assert page.ask("paint", strokes=[[5, 6, 90, 91, 1]])["ok"]
        assert page.ask("labels", kind="next")["ok"]
        page.socket.send('{"id": 2, "op": "leaks"}')
        time.sleep(1.0)
        page.socket.send('{"op": "stop"}')
        reply = json.loads(page.socket.recv(timeout=60))
        assert (reply["id"], reply["error"]) == (2, "stopped")
        assert page.ask("state")["num_labels"] == 131_071


def test_messages_that_wait_are_counted():
    with serving(LONG, queued=4) as busy, busy.page() as page:
        assert page.ask("paint", strokes=[[5, 6, 90, 91, 1]])["ok"]

        def send_and_read():  # the server may close while some are still sent
            for _ in range(8):
                page.socket.send('{"op": "flow"}')
            list(iter(lambda: page.socket.recv(timeout=60), None))

        with pytest.raises(ConnectionClosed) as caught:
            send_and_read()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 4429


@pytest.mark.slow
def test_a_mask_that_does_not_fit_into_memory_is_refused_and_the_page_goes_on():
    pytest.importorskip("resource")
    with serving(memory=4 << 30, seconds=120.0) as small, small.page() as page:
        spec = {"name": "document", "parameters": {"lengths": [4_000_000] * 32}}
        reply = page.ask("load", text=json.dumps(spec))
        assert not reply["ok"]
        assert "memory" in reply["error"]
        assert page.ask("state")["size"] == 16


def children(server):
    return psutil.Process(server.process.pid).children(recursive=True)


@pytest.mark.slow
def test_a_process_that_dies_is_replaced_with_what_the_page_had():
    with serving() as running, running.page() as page:
        assert page.ask("invert")["ok"]
        for child in children(running):
            child.kill()
        reply = page.ask("state")
        assert (reply["ok"], reply["restarted"]) == (False, True)
        assert "kept" in reply["error"]
        assert page.ask("state")["layers"][0]["title"].startswith("~")


@pytest.mark.slow
def test_it_ends_when_nobody_uses_it():
    with serving(idle=3.0) as idle:
        with idle.page() as page:
            assert page.ask("state")["ok"]
            workers = children(idle)
            assert idle.process.wait(60) == 0
        assert workers
        _, alive = psutil.wait_procs(workers, timeout=20)
        assert not alive
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", idle.port)) != 0


@pytest.mark.slow
def test_no_process_outlives_the_server_however_it_ends():
    with serving() as running, running.page() as page:
        assert page.ask("state")["ok"]
        workers = children(running)
        assert workers
        os.kill(running.process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(workers, timeout=30)
        assert not alive


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)]
)
@pytest.mark.slow
def test_the_command_says_where_it_is_and_ends_quietly_while_a_process_starts(number, code):
    command = [sys.executable, "-m", "attnflow", "studio", "butterfly", "--n", "5", "--no-open", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = ""
    while not said.rstrip().endswith("}"):
        said += process.stdout.readline()
    address = json.loads(said)["address"]
    assert address.startswith("http://127.0.0.1:")
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)  # which waits for its processes, too: they hold the pipe
    assert "Traceback" not in errors
    assert process.returncode == code


def test_a_port_that_is_taken_is_named(server, monkeypatch):
    from attnflow.cli import main

    assert main(["studio", "--port", str(server.port), "--no-open"]) == 2
