"""The search server over real HTTP: answers, refusals, overload, slow clients, and load tests."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from agent_r1.errors import ConfigError
from agent_r1.serve.search_load import load
from agent_r1.serve.search_server import QueryQueue, ServerLimits, serve
from agent_r1.tools.search.client import SearchRefused, check_server
from agent_r1.tools.search.index import Hit, Index
from tests.tools.small_search import HeldIndex, build, search, serving, titles


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return build(tmp_path_factory.mktemp("search") / "index")


@pytest.fixture
def held(index: Index) -> Iterator[HeldIndex]:
    slow = HeldIndex.open(index.directory)
    slow.go.clear()
    slow.begun.clear()
    yield slow
    slow.go.set()


def test_a_server_finds_what_its_index_finds(index: Index) -> None:
    queries = ["who eats frogs", "zzz", "mill"]
    with serving(index) as url:
        assert asyncio.run(search(url, queries)) == index.search(queries, 3)
        health = httpx.get(f"{url}/health").json()
        found = httpx.get(f"{url}/search", params={"query": "moon", "top_k": 1}).json()
    assert health == {
        "status": "ok",
        "num_passages": 5,
        "corpus_sha256": index.manifest.corpus_sha256,
        "kinds": ["lexical"],
        "max_queries": 512,
        "max_top_k": 100,
        "waiting": 0,
    }
    [answered] = found["query_results"]
    assert answered["query"] == "moon"
    assert answered["results"][0]["document"] == {"id": "moon", "title": "Moon", "text": "Nobody lives on the moon."}


@pytest.fixture(scope="module")
def strict_url(index: Index) -> Iterator[str]:
    with serving(index, ServerLimits(max_top_k=8, max_query_chars=20, max_queries=2, max_body_bytes=6000)) as url:
        yield url


@pytest.mark.parametrize(
    ("body", "status", "problem"),
    [
        (b"{", 400, "Invalid JSON"),
        (b'{"queries": ' + b"[" * 5000, 400, "Invalid JSON"),
        (b"[]", 400, "object"),
        (b'{"queries": []}', 400, "queries"),
        (b'{"queries": [1]}', 400, "queries"),
        (b'{"queries": ["a"], "topk": 3}', 400, "topk"),
        (b'{"queries": ["a"], "' + b"f" * 900 + b'": 1}', 400, "fff"),
        (b'{"queries": ["a"], "top_k": 0}', 400, "top_k"),
        (b'{"queries": ["a"], "top_k": true}', 400, "top_k"),
        (b'{"queries": ["a"], "top_k": NaN}', 400, "top_k"),
        (b'{"queries": ["a"], "top_k": ' + b"9" * 4000 + b"}", 400, "top_k is more than 8"),
        (b'{"queries": ["a"], "top_k": 9}', 400, "top_k is more than 8"),
        (b'{"queries": ["a"], "kind": "' + b"k" * 900 + b'"}', 400, "kind"),
        (b'{"queries": ["a"], "kind": "dense"}', 400, "supports lexical, not dense"),
        (b'{"queries": ["aaaaaaaaaaaaaaaaaaaaaaa"]}', 400, "more than 20 characters"),
        (b'{"queries": ["a", "b", "c"]}', 413, "3 queries"),
        (b'{"queries": ["' + b"a" * 7000 + b'"]}', 413, "6,000 bytes"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_with_a_short_reason(
    strict_url: str, body: bytes, status: int, problem: str
) -> None:
    answer = httpx.post(f"{strict_url}/search", content=body)
    message = answer.json()["error"]
    assert (answer.status_code, problem in message) == (status, True), message
    assert len(message) < 200
    assert httpx.get(f"{strict_url}/health").status_code == 200


def test_a_request_of_more_queries_than_may_wait_is_refused_for_good(index: Index) -> None:
    with serving(index, ServerLimits(max_waiting=2)) as url:
        assert httpx.post(f"{url}/search", json={"queries": ["a", "b", "c"]}).status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/search", 400),
        ("GET", "/search?query=a&top_k=x", 400),
        ("GET", "/search?query=a&top_k=" + "9" * 5000, 400),
        ("GET", "/nothing", 404),
        ("PUT", "/search", 405),
    ],
)
def test_an_address_that_makes_no_sense_is_refused(strict_url: str, method: str, path: str, status: int) -> None:
    assert httpx.request(method, f"{strict_url}{path}").status_code == status


def test_queries_of_many_clients_are_ranked_together(index: Index) -> None:
    sizes: list[int] = []

    class Counted(Index):
        def search(self, queries, top_k, kind=None):  # type: ignore[no-untyped-def]
            sizes.append(len(queries))
            return super().search(queries, top_k, kind)

    async def ask_all() -> list[list[list[Hit]]]:
        queue = QueryQueue(Counted.open(index.directory), ServerLimits(max_batch=4))
        # "river" finds three passages: a request for one that is ranked with one for two must not get both
        found = await asyncio.gather(*(queue.search(["river", "moon"], top_k, "lexical") for top_k in (1, 2, 3)))
        queue.close()
        return list(found)

    found = asyncio.run(ask_all())
    assert sizes == [4, 2]  # two requests of two queries fill a batch of four
    assert [[len(hits) for hits in request] for request in found] == [[1, 1], [2, 1], [3, 1]]
    assert found == [index.search(["river", "moon"], top_k) for top_k in (1, 2, 3)]


def test_queries_above_the_waiting_limit_are_refused_until_there_is_room(held: HeldIndex) -> None:
    limits = ServerLimits(max_waiting=2)

    async def fill_up(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            first = asyncio.create_task(http.post("/search", json={"queries": ["otter"]}))
            while not held.begun.is_set():  # the first is being ranked, so it is no longer waiting
                await asyncio.sleep(0.001)
            others = asyncio.create_task(http.post("/search", json={"queries": ["moon", "mill"]}))
            while (await http.get("/health")).json()["waiting"] < 2:
                await asyncio.sleep(0.001)
            refused = await http.post("/search", json={"queries": ["frogs"]})
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            held.go.set()
            assert [answer.status_code for answer in await asyncio.gather(first, others)] == [200, 200]
            assert (await http.post("/search", json={"queries": ["frogs"]})).status_code == 200

    with serving(held, limits) as url:
        asyncio.run(fill_up(url))


def test_a_search_that_takes_too_long_fails_and_the_server_recovers(held: HeldIndex) -> None:
    with serving(held, ServerLimits(seconds=0.2)) as url:
        late = httpx.post(f"{url}/search", json={"queries": ["otter"]}, timeout=30)
        assert late.status_code == 504
        held.go.set()
        assert titles(asyncio.run(search(url, ["otter"]))[0]) == ["Otter"]  # tried again until the thread is free


def test_a_body_that_does_not_arrive_is_refused(index: Index) -> None:
    body = b'{"queries": ["otter"]}'
    head = f"POST /search HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with serving(index, ServerLimits(seconds=0.2)) as url:
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), timeout=20) as connection:
            connection.sendall(head + body[:10])
            answer = b""
            while not answer.endswith(b"}") and (more := connection.recv(10_000)):  # head and body may come apart
                answer += more
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"0.2 s" in answer
        assert titles(asyncio.run(search(url, ["otter"]))[0]) == ["Otter"]


def connect(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), timeout=20)


def read_until_closed(connection: socket.socket) -> bytes:
    """Fails after the socket's timeout if the server leaves the connection open."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(10_000):
            received += more
    return received


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /search HTTP/1.1\r\nHost: here\r\nX-Part",
        b"GET /health HTTP/1.1\r\nHost: here\r\n\r\nGET /hea",  # answered, followed by half of a second request
        b"POST /health HTTP/1.1\r\nHost: here\r\nContent-Length: 100\r\n\r\nno",  # refused before its body arrived
    ],
)
def test_a_connection_without_a_complete_request_is_closed(index: Index, sent: bytes) -> None:
    with serving(index, ServerLimits(seconds=0.2)) as url, connect(url) as connection:
        connection.sendall(sent)
        read_until_closed(connection)


def test_single_bytes_do_not_keep_a_connection_open(index: Index) -> None:
    with serving(index, ServerLimits(seconds=0.3)) as url, connect(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
        is_open = True
        for _ in range(400):  # 20 s
            try:
                connection.sendall(b"a")
            except ConnectionError:
                is_open = False
                break
            time.sleep(0.05)
        assert not is_open


def test_idle_connections_do_not_lock_out_other_clients(index: Index) -> None:
    limits = ServerLimits(max_connections=20, seconds=60.0)  # so long that only the limit can make room
    with serving(index, limits) as url, contextlib.ExitStack() as opened:
        for number in range(300):
            connection = opened.enter_context(connect(url))
            connection.sendall(b"POST /search HTTP/1.1\r\nHost: here\r\n" if number % 2 else b"")
        assert titles(asyncio.run(search(url, ["otter"], retry_seconds=0))[0]) == ["Otter"]
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_pending_request_is_not_closed_to_make_room(held: HeldIndex) -> None:
    async def ask_in_a_crowd(url: str) -> int:
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            asking = asyncio.create_task(http.post("/search", json={"queries": ["otter"]}))
            while not held.begun.is_set():
                await asyncio.sleep(0.001)
            with contextlib.ExitStack() as opened:
                crowd = [opened.enter_context(connect(url)) for _ in range(50)]
                await asyncio.to_thread(read_until_closed, crowd[0])  # the crowd has been noticed
                held.go.set()
                return (await asking).status_code

    with serving(held, ServerLimits(max_connections=5, seconds=60.0)) as url:
        assert asyncio.run(ask_in_a_crowd(url)) == 200


def test_a_failed_search_is_reported_and_the_server_continues(index: Index) -> None:
    class Broken(Index):
        def search(self, queries, top_k, kind=None):  # type: ignore[no-untyped-def]
            if "boom" in queries:
                raise ConfigError("the ranker broke")
            return super().search(queries, top_k, kind)

    with serving(Broken.open(index.directory)) as url:
        with pytest.raises(SearchRefused, match="the ranker broke"):
            asyncio.run(search(url, ["boom"]))
        assert titles(asyncio.run(search(url, ["moon"]))[0]) == ["Moon"]


def test_a_server_that_is_stopped_answers_pending_requests(held: HeldIndex) -> None:
    answers: list[int] = []

    def ask(url: str) -> None:
        answers.append(httpx.post(f"{url}/search", json={"queries": ["otter"]}, timeout=30).status_code)

    with serving(held) as url:
        asking = threading.Thread(target=ask, args=(url,))
        asking.start()
        assert held.begun.wait(timeout=20)
        threading.Timer(0.2, held.go.set).start()  # leaving `with` stops the server meanwhile
    asking.join(timeout=20)
    assert answers == [200]


def test_a_taken_address_is_an_error_before_anything_is_announced(index: Index) -> None:
    announced: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], 99_999):
            with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1, port {port}"):
                serve(index, host="127.0.0.1", port=port, limits=ServerLimits(), announce=announced.append)
    assert announced == []


def test_an_announced_server_answers_at_once(index: Index) -> None:
    words = ["-m", "agent_r1.cli", "search", "serve", str(index.directory), "--port", "0"]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            said = server.stdout.readline()
            assert said.startswith("5 passages at http://127.0.0.1:")
            url = said.split()[-1].removesuffix("/search")
            assert check_server(url, top_k=5, kind="lexical").num_passages == 5
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=30) == 0
        finally:
            server.kill()


def test_a_load_test_counts_every_request(index: Index) -> None:
    with serving(index) as url:
        result = asyncio.run(load(url, clients=20, requests=100, queries=["otter", "moon"], queries_per_request=2))
    assert (result.clients, result.requests, result.errors) == (20, 100, {})
    assert 0 < result.p50 <= result.p95 <= result.p99 <= result.slowest <= result.seconds
    assert "100 requests" in str(result)
    assert "no errors" in str(result)


def test_a_load_test_counts_refusals_with_their_reason(index: Index) -> None:
    with serving(index, ServerLimits(max_queries=1)) as url:
        result = asyncio.run(load(url, clients=3, requests=9, queries_per_request=2))
    assert (result.requests, result.errors) == (9, {"SearchRefused": 9})
    assert result.per_second == 0
    counts, reason = str(result).splitlines()
    assert counts.endswith("9 SearchRefused; none was answered")
    assert "answered 413" in reason
