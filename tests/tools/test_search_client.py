"""The search client: what it retries, for how long, and what it gives up on at once."""

from __future__ import annotations

import asyncio
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agent_r1.tools.search import client
from agent_r1.tools.search.client import SearchRefused, SearchUnavailable
from agent_r1.tools.search.index import Hit
from tests.replaced import replaced
from tests.tools.small_search import build, free_port, search, serving, titles


def test_a_client_waits_for_a_server_that_comes_back(tmp_path: Path) -> None:
    index, port = build(tmp_path / "index"), free_port()

    async def ask_before_it_is_there() -> list[list[Hit]]:
        asking = asyncio.create_task(search(f"http://127.0.0.1:{port}", ["moon"], max_wait=0.1))
        await asyncio.sleep(0.05)
        with serving(index, port=port):
            found = await asking
        with pytest.raises(
            SearchUnavailable, match=r"in 0\.\d s \(1 attempt, retry_seconds=0\); the last: ConnectError"
        ):
            await search(f"http://127.0.0.1:{port}", ["moon"], retry_seconds=0)
        return found

    assert titles(asyncio.run(ask_before_it_is_there())[0]) == ["Moon"]


Reply = tuple[int, dict[str, str], bytes]


class Stub:
    """A server that sends prepared replies: (status, headers, body), or None to drop the connection."""

    def __init__(self, *replies: Reply | None) -> None:
        self.asked, rest = 0, list(replies)
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                stub.asked += 1
                self.rfile.read(int(self.headers["Content-Length"]))
                reply = rest.pop(0) if len(rest) > 1 else rest[0]
                if reply is None:
                    self.close_connection = True
                    return
                self.send_response(reply[0])
                for name, value in (reply[1] | {"Content-Length": str(len(reply[2]))}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply[2])

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Stub:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


FOUND: Reply = (200, {}, b'{"query_results": [{"query": null, "results": []}]}')
BUSY: Reply = (503, {"Retry-After": "0"}, b"busy")


def test_a_client_retries_temporary_failures() -> None:
    with Stub(BUSY, None, (504, {}, b"late"), FOUND) as stub:
        assert asyncio.run(search(stub.url, ["a"])) == [[]]
        assert stub.asked == 4


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ((400, {}, b"no such kind"), "answered 400: 'no such kind'"),
        ((413, {"Retry-After": "0"}, b""), "answered 413"),
        ((500, {}, b""), "answered 500"),
        ((503, {"Retry-After": "3600"}, b"at night"), "answered 503: 'at night'"),  # an hour is too long to wait
        ((200, {}, b"hello"), "Invalid JSON"),
        ((200, {}, b"[" * 5000), "Invalid JSON"),
        ((200, {}, b"{}"), "query_results"),
        ((200, {}, b'{"query_results": []}'), "0 results for 1 queries"),
    ],
)
def test_a_client_does_not_repeat_a_final_refusal(reply: Reply, problem: str) -> None:
    with Stub(reply) as stub:
        with pytest.raises(SearchRefused, match=problem):
            asyncio.run(search(stub.url, ["a"]))
        assert stub.asked == 1


def test_a_client_waits_at_least_as_long_as_the_server_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(client, "asyncio", replaced(asyncio, sleep=noted))
    with Stub((503, {"Retry-After": "2"}, b""), BUSY, BUSY, FOUND) as stub:
        asyncio.run(search(stub.url, ["a"], backoff_seconds=0.1))
    # asked for 2 s, then twice for none: backoff 0.1 * 2**1 and 0.1 * 2**2; jitter adds up to half
    assert [low <= wait <= 1.5 * low for wait, low in zip(waits, (2.0, 0.2, 0.4), strict=True)] == [True] * 3


def test_a_client_retries_for_retry_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = 0.0, list[float]()
    sleep = asyncio.sleep

    async def advance(seconds: float) -> None:
        nonlocal now
        now += seconds
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(client, "asyncio", replaced(asyncio, sleep=advance))
    monkeypatch.setattr(client, "time", replaced(time, monotonic=lambda: now))
    monkeypatch.setattr("agent_r1.tools.search.client._JITTER.uniform", lambda low, high: low)
    with Stub(BUSY) as stub, pytest.raises(SearchUnavailable, match=r"no answer in 55\.0 s \(10 attempts, retry_seco"):
        asyncio.run(search(stub.url, ["a"], retry_seconds=60.0, backoff_seconds=1.0, max_wait=8.0))
    assert waits == [1, 2, 4, 8, 8, 8, 8, 8, 8]


def test_an_empty_search_sends_no_request() -> None:
    assert asyncio.run(search(f"http://127.0.0.1:{free_port()}", [])) == []
