"""A chat-completions server for tests: it plays the replies it is given, over real HTTP on a free port."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, str, dict[str, str]] | None  # status, body, headers; None: the connection is dropped; 0: no reply


def says(verdict: Any, **choice: Any) -> Reply:
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": verdict}, **choice}]}), {}


GOOD = says("It is right.\nScore: 0.7")


class _Listener(ThreadingHTTPServer):
    request_queue_size = 128  # connections that come at once; of more than the usual 5, some would have to try again


class Server:
    """Plays its replies in order, the last one for ever, and remembers what it was asked."""

    def __init__(self, *replies: Reply, meet: int = 1) -> None:
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.most_at_once = 0
        self._end = threading.Event()
        self._replies = list(replies)
        self._active = 0
        self._lock = threading.Lock()
        # So many requests have to be here before any is answered, and one too many has the time to be seen.
        self._meeting = threading.Barrier(meet, action=lambda: time.sleep(0.05 if meet > 1 else 0.0))
        self._server = _Listener(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def answer(self, path: str, headers: dict[str, str], body: bytes) -> Reply:
        with self._lock:
            self.requests.append((path, headers, json.loads(body)))
            reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
            self._active += 1
            self.most_at_once = max(self.most_at_once, self._active)
        self._meeting.wait(timeout=20)
        if reply is not None and reply[0] == 0:
            self._end.wait(timeout=20)
        with self._lock:
            self._active -= 1
        return reply

    def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                reply = server.answer(self.path, dict(self.headers), body)
                if reply is None or reply[0] == 0:
                    self.close_connection = True
                    return
                status, text, headers = reply
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler

    @contextmanager
    def running(self) -> Iterator[Server]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._end.set()
            self._server.shutdown()
            self._server.server_close()
