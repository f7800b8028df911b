"""Real local services for the tests of paper_search: ours over HTTP, and one that answers as it is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import uvicorn

from agent_r1.serve.paper_server import PaperLibrary, PaperLimits, make_paper_config
from tests.tools.small_search import free_port


@contextmanager
def serving_papers(library: PaperLibrary, limits: PaperLimits | None = None) -> Iterator[str]:
    """Yield the address of a running server, and stop it as SIGTERM does."""
    config = make_paper_config(library, limits or PaperLimits())
    config.port = free_port()
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait = threading.Event()
    while not server.started and thread.is_alive():
        wait.wait(0.01)
    try:
        yield f"http://127.0.0.1:{config.port}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive(), "the server did not stop"


class Canned(NamedTuple):
    """One answer."""

    status: int = 200
    body: bytes = b'{"total": 0, "data": []}'
    retry_after: str | None = None


class CannedService:
    """Answers requests in order, the last one for ever, and remembers what was asked."""

    def __init__(self, answers: Sequence[Canned]) -> None:
        self.answers, self.asked, self.headers = list(answers), list[str](), list[dict[str, str]]()
        self._lock = threading.Lock()

    def next(self, path: str, headers: dict[str, str]) -> Canned:
        with self._lock:
            self.asked.append(path)
            self.headers.append(headers)
            return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def canned(*answers: Canned) -> Iterator[tuple[str, CannedService]]:
    service = CannedService(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = service.next(self.path, {name.lower(): value for name, value in self.headers.items()})
            self.send_response(answer.status)
            self.send_header("Content-Length", str(len(answer.body)))
            if answer.retry_after is not None:
                self.send_header("Retry-After", answer.retry_after)
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", service
        finally:
            server.shutdown()
