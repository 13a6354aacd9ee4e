"""A hub on the loopback interface that counts every byte it serves."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves folders as models; `ranges` holds what was read of each file, as (name, first, last but one)."""

    def __init__(self, models: dict[str, Path]) -> None:
        self.models = models
        self.ranges: list[tuple[str, int, int]] = []
        self.requests: list[str] = []
        self.whole_files = False
        self.break_at: int | None = None  # closes the connection after so many bytes of a body, once

    @property
    def served(self) -> int:
        return sum(stop - start for _, start, stop in self.ranges)

    @contextmanager
    def running(self) -> Iterator[str]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.requests.append(request.path)
        listing = re.match(r"/api/models/([^?]+?)(/revision/.*)?(\?.*)?$", request.path)
        if listing:
            return self._list(request, listing[1])
        found = re.match(rf"/(.+)/resolve/{COMMIT}/(.+)$", request.path)
        path = self.models[found[1]] / found[2] if found and found[1] in self.models else None
        if path is None or not path.is_file():
            return self._send(request, 404, b"{}")
        body = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        if self.whole_files or asked is None:
            self.ranges.append((path.name, 0, len(body)))
            return self._send(request, 200, body)
        start, stop = int(asked[1]), int(asked[2]) + 1
        return self._send_part(request, path.name, body, start, stop)

    def _send_part(self, request: BaseHTTPRequestHandler, name: str, body: bytes, start: int, stop: int) -> None:
        part, cut = body[start:stop], self.break_at
        if cut is not None and len(part) > cut:
            self.break_at = None
            part = part[:cut]
            request.close_connection = True
        self.ranges.append((name, start, start + len(part)))
        request.send_response(206)
        request.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(body)}")
        request.send_header("Content-Length", str(stop - start))
        request.end_headers()
        request.wfile.write(part)

    def _list(self, request: BaseHTTPRequestHandler, model: str) -> None:
        if model not in self.models:
            return self._send(request, 404, b"{}")
        files = [{"rfilename": path.name, "size": path.stat().st_size} for path in sorted(self.models[model].iterdir())]
        return self._send(request, 200, json.dumps({"id": model, "sha": COMMIT, "siblings": files}).encode())

    def _send(self, request: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)
