"""The server and its client over real HTTP: answers, refusals, overload, slowness, and servers that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.errors import ConfigError
from agent_r1.tools.search.client import RETRY_SECONDS, SearchClient, SearchRefused, SearchUnavailable, check_server
from agent_r1.tools.search.index import Hit, Index
from agent_r1.tools.search.load import LoadResult, load
from agent_r1.tools.search.server import Overloaded, QueryQueue, ServerLimits, serve
from tests.tools.search_world import HeldIndex, build, free_port, serving, titles

QUICK = {"backoff_seconds": 0.01, "seconds_per_attempt": 10.0}


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


async def search(url: str, queries: list[str], **settings: float) -> list[list[Hit]]:
    async with SearchClient(url, **(QUICK | settings)) as client:  # type: ignore[arg-type]
        return await client.search(queries, 3)


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


@pytest.mark.parametrize(
    ("body", "status", "problem"),
    [
        (b"{", 400, "the body is not readable JSON: Expecting"),
        (b'{"queries": ["a"], "top_k": ' + b"9" * 5000 + b"}", 400, "the body is not readable JSON: Exceeds"),
        (b'{"queries": ["a"], "top_k": ' + b"9" * 4000 + b"}", 400, "9... (4,000 characters) is more than 8"),
        (b'{"queries": ["a"], "top_k": -3}', 400, "at least 1, got -3"),
        (b'{"queries": ["a"], "top_k": 1e400}', 400, "at least 1, got inf"),
        (b'{"queries": ["a"], "top_k": NaN}', 400, "at least 1, got nan"),
        (b'{"queries": ["a"], "top_k": [3]}', 400, "at least 1, got [3]"),
        (b'{"queries": ' + b"[" * 5000, 400, "the body is not readable JSON"),
        (b'{"queries": ["a"], "kind": "' + b"k" * 900 + b'"}', 400, "kkk... (902 characters)"),
        (b'{"queries": ["a"], "' + b"f" * 900 + b'": 1}', 400, "fff... (902 characters)"),
        (b"[]", 400, "must be a JSON object, got list"),
        (b'{"queries": []}', 400, "a list of at least one text"),
        (b'{"queries": [1]}', 400, "a list of at least one text"),
        (b'{"queries": ["a"], "topk": 3}', 400, "unknown field 'topk'"),
        (b'{"queries": ["a"], "top_k": 0}', 400, "at least 1, got 0"),
        (b'{"queries": ["a"], "top_k": true}', 400, "at least 1, got True"),
        (b'{"queries": ["a"], "top_k": 9}', 400, "top_k=9 is more than 8"),
        (b'{"queries": ["a"], "kind": "dense"}', 400, "can be searched by lexical, not by dense"),
        (b'{"queries": ["aaaaaaaaaaaaaaaaaaaaaaa"]}', 400, "more than 20 characters"),
        (b'{"queries": ["a", "b", "c"]}', 413, "3 queries in one request; at most 2"),
        (b'{"queries": ["' + b"a" * 7000 + b'"]}', 413, "more than 6,000 bytes"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_words(index: Index, body: bytes, status: int, problem: str) -> None:
    limits = ServerLimits(max_top_k=8, max_query_chars=20, max_queries=2, max_body_bytes=6000)
    with serving(index, limits) as url:
        answer = httpx.post(f"{url}/search", content=body)
        assert (answer.status_code, problem in answer.json()["error"]) == (status, True)
        assert httpx.get(f"{url}/health").status_code == 200  # and it goes on


def test_a_request_of_more_queries_than_may_wait_is_refused_for_good(index: Index) -> None:
    with serving(index, ServerLimits(max_waiting=2)) as url:
        answer = httpx.post(f"{url}/search", json={"queries": ["a", "b", "c"]})
    assert answer.status_code == 413
    assert "at most 2 are taken" in answer.text


def test_addresses_that_make_no_sense_are_refused(index: Index) -> None:
    with serving(index) as url:
        assert "needs ?query=" in httpx.get(f"{url}/search").json()["error"]
        assert "whole number" in httpx.get(f"{url}/search", params={"query": "a", "top_k": "x"}).json()["error"]
        huge = httpx.get(f"{url}/search", params={"query": "a", "top_k": "9" * 5000})
        assert (huge.status_code, "(5,002 characters)" in huge.json()["error"]) == (400, True)
        assert httpx.get(f"{url}/nothing").status_code == 404
        assert httpx.put(f"{url}/search").status_code == 405


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


def test_more_than_may_wait_are_sent_away_and_may_come_again(held: HeldIndex) -> None:
    limits = ServerLimits(max_waiting=2)

    async def fill_up(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            first = asyncio.create_task(http.post("/search", json={"queries": ["otter"]}))
            while not held.begun.is_set():  # the first is being ranked, so it does not wait any more
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


def test_a_search_that_takes_too_long_is_given_up_and_the_server_recovers(held: HeldIndex) -> None:
    with serving(held, ServerLimits(seconds=0.2)) as url:
        late = httpx.post(f"{url}/search", json={"queries": ["otter"]}, timeout=30)
        assert late.status_code == 504
        assert "no answer within 0.2 s" in late.json()["error"]
        held.go.set()
        assert titles(asyncio.run(search(url, ["otter"]))[0]) == ["Otter"]  # tried again until the thread is free


def test_a_body_that_does_not_come_is_not_waited_for(index: Index) -> None:
    body = b'{"queries": ["otter"]}'
    head = f"POST /search HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with serving(index, ServerLimits(seconds=0.2)) as url:
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), timeout=20) as connection:
            connection.sendall(head + body[:10])
            answer = b""
            while not answer.endswith(b"}") and (more := connection.recv(10_000)):  # head and body may come apart
                answer += more
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"the body did not come within 0.2 s" in answer
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
        b"GET /health HTTP/1.1\r\nHost: here\r\n\r\nGET /hea",  # answered, then half of a second request
        b"POST /health HTTP/1.1\r\nHost: here\r\nContent-Length: 100\r\n\r\nno",  # refused before its body came
    ],
)
def test_a_connection_that_sends_no_whole_request_is_closed(index: Index, sent: bytes) -> None:
    with serving(index, ServerLimits(seconds=0.2)) as url, connect(url) as connection:
        connection.sendall(sent)
        read_until_closed(connection)


def test_bytes_that_trickle_in_do_not_keep_a_connection_open(index: Index) -> None:
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


def test_idle_connections_do_not_lock_out_a_client_that_asks(index: Index) -> None:
    limits = ServerLimits(max_connections=20, seconds=60.0)  # long enough that only the bound can make room
    with serving(index, limits) as url, contextlib.ExitStack() as opened:
        for number in range(300):
            connection = opened.enter_context(connect(url))
            connection.sendall(b"POST /search HTTP/1.1\r\nHost: here\r\n" if number % 2 else b"")
        assert titles(asyncio.run(search(url, ["otter"], retry_seconds=0))[0]) == ["Otter"]
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_request_under_way_is_not_closed_to_make_room(held: HeldIndex) -> None:
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


def test_a_search_that_fails_is_told_to_its_clients_and_the_server_goes_on(index: Index) -> None:
    class Broken(Index):
        def search(self, queries, top_k, kind=None):  # type: ignore[no-untyped-def]
            if "boom" in queries:
                raise ConfigError("the ranker broke")
            return super().search(queries, top_k, kind)

    with serving(Broken.open(index.directory)) as url:
        with pytest.raises(SearchRefused, match="the ranker broke"):
            asyncio.run(search(url, ["boom"]))
        assert titles(asyncio.run(search(url, ["moon"]))[0]) == ["Moon"]


def test_a_server_asked_to_stop_answers_what_it_has(held: HeldIndex) -> None:
    answers: list[int] = []

    def ask(url: str) -> None:
        answers.append(httpx.post(f"{url}/search", json={"queries": ["otter"]}, timeout=30).status_code)

    with serving(held) as url:
        asking = threading.Thread(target=ask, args=(url,))
        asking.start()
        assert held.begun.wait(timeout=20)
        threading.Timer(0.2, held.go.set).start()  # the end of `with` asks the server to stop meanwhile
    asking.join(timeout=20)
    assert answers == [200]


def test_an_address_that_is_taken_is_told_before_anything_is_announced(index: Index) -> None:
    announced: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], 99_999):
            with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1, port {port}"):
                serve(index, host="127.0.0.1", port=port, limits=ServerLimits(), announce=announced.append)
    assert announced == []


def test_what_is_announced_can_be_asked_at_once(index: Index) -> None:
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


def test_a_client_waits_for_a_server_that_comes_back(index: Index) -> None:
    port = free_port()

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
    """A server that plays replies: (status, headers, body), or None for a connection that is dropped."""

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


FOUND: Reply = (200, {}, b'{"query_results": [{"query": "a", "results": []}]}')
BUSY: Reply = (503, {"Retry-After": "0"}, b"busy")


def test_a_client_repeats_what_may_pass() -> None:
    with Stub(BUSY, None, (504, {}, b"late"), FOUND) as stub:
        assert asyncio.run(search(stub.url, ["a"])) == [[]]
        assert stub.asked == 4


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ((400, {}, b"no such kind"), "answered 400: 'no such kind'"),
        ((404, {}, b""), "answered 404"),
        ((413, {"Retry-After": "0"}, b""), "answered 413"),
        ((422, {}, b""), "answered 422"),
        ((500, {}, b""), "answered 500"),
        ((503, {"Retry-After": "3600"}, b"at night"), "answered 503: 'at night'"),  # an hour is no moment
        ((200, {}, b"hello"), "Expecting value"),
        ((200, {}, b"[" * 5000), "/search: "),
        ((200, {}, b'{"query_results": ' + b"1" * 5000 + b"}"), "Exceeds the limit"),
        ((200, {}, b"{}"), "not the answer of a search server"),
        ((200, {}, b'{"query_results": []}'), "0 results for 1 queries"),
    ],
)
def test_a_client_does_not_repeat_what_would_be_said_again(reply: Reply, problem: str) -> None:
    with Stub(reply) as stub:
        with pytest.raises(SearchRefused, match=problem):
            asyncio.run(search(stub.url, ["a"]))
        assert stub.asked == 1


def test_a_client_waits_at_least_as_long_as_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr("agent_r1.tools.search.client.asyncio.sleep", noted)
    with Stub((503, {"Retry-After": "2"}, b""), BUSY, BUSY, FOUND) as stub:
        asyncio.run(search(stub.url, ["a"], backoff_seconds=0.1))
    # asked for 2 s, then twice for nothing: backoff 0.1 * 2**1 and 0.1 * 2**2; up to half as long again by chance
    assert [low <= wait <= 1.5 * low for wait, low in zip(waits, (2.0, 0.2, 0.4), strict=True)] == [True] * 3


def test_a_client_keeps_trying_for_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = 0.0, list[float]()
    sleep = asyncio.sleep

    async def advance(seconds: float) -> None:
        nonlocal now
        now += seconds
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr("agent_r1.tools.search.client.asyncio.sleep", advance)
    monkeypatch.setattr("agent_r1.tools.search.client.time.monotonic", lambda: now)
    monkeypatch.setattr("agent_r1.tools.search.client._JITTER.uniform", lambda low, high: low)
    with Stub(BUSY) as stub, pytest.raises(SearchUnavailable, match=r"no answer in 55\.0 s \(10 attempts, retry_seco"):
        asyncio.run(search(stub.url, ["a"], retry_seconds=60.0, backoff_seconds=1.0, max_wait=8.0))
    assert waits == [1, 2, 4, 8, 8, 8, 8, 8, 8]


def test_a_client_keeps_trying_for_two_minutes_by_default() -> None:
    assert inspect.signature(SearchClient).parameters["retry_seconds"].default == RETRY_SECONDS == 120.0


@pytest.mark.parametrize("name", ["seconds_per_attempt", "retry_seconds", "backoff_seconds", "max_wait"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_client_with_impossible_times_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"SearchClient needs {name} of at least .* got {value}"):
        SearchClient("http://127.0.0.1:1", **{name: value})  # type: ignore[arg-type]


def test_nothing_is_asked_for_no_queries() -> None:
    assert asyncio.run(search(f"http://127.0.0.1:{free_port()}", [])) == []


def test_a_load_test_counts_every_request(index: Index) -> None:
    with serving(index) as url:
        result = asyncio.run(load(url, clients=20, requests=100, queries=["otter", "moon"], queries_per_request=2))
    assert (result.clients, result.requests, result.errors) == (20, 100, {})
    assert 0 < result.p50 <= result.p95 <= result.p99 <= result.slowest <= result.seconds
    assert "100 requests" in str(result)
    assert "no errors" in str(result)


def test_a_load_test_counts_what_is_refused_and_says_why(index: Index) -> None:
    with serving(index, ServerLimits(max_queries=1)) as url:
        result = asyncio.run(load(url, clients=3, requests=9, queries_per_request=2))
    assert (result.requests, result.errors) == (9, {"SearchRefused": 9})
    assert result.per_second == 0
    counts, reason = str(result).splitlines()
    assert counts.endswith("9 SearchRefused; none was answered")
    assert reason.startswith(f"the first SearchRefused: {url}/search answered 413")
    assert "2 queries in one request; at most 1 are taken" in reason


def test_a_load_test_that_makes_no_sense_is_refused_before_it_begins(index: Index) -> None:
    with serving(index, ServerLimits(max_top_k=8)) as url:
        with pytest.raises(ConfigError, match="can be searched by lexical, not by 'foo'"):
            asyncio.run(load(url, clients=1, requests=1, kind="foo"))
        with pytest.raises(ConfigError, match="finds 1 to 8 passages per query, got top_k=9"):
            asyncio.run(load(url, clients=1, requests=1, top_k=9))


def times_of(times: list[float]) -> LoadResult:
    return LoadResult.of(times, clients=1, seconds=10.0, errors={}, reasons={})


def test_percentiles_are_nearest_ranks() -> None:
    result = times_of([float(time) for time in range(200, 0, -1)])
    # of 1 ... 200 s: 100 of them are at most 100, 190 at most 190, 198 at most 198
    assert (result.p50, result.p95, result.p99, result.slowest) == (100, 190, 198, 200)
    assert (result.requests, result.per_second) == (200, 20)
    few = times_of([3.0, 1.0, 2.0])  # half of three is at least two of them; 95 % and 99 % are all three
    assert (few.p50, few.p95, few.p99, few.slowest) == (2, 3, 3, 3)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50))
def test_so_many_percent_of_the_times_do_not_exceed_a_percentile(times: list[float]) -> None:
    result = times_of(times)
    for value, percent in ((result.p50, 50), (result.p95, 95), (result.p99, 99)):
        assert sum(time <= value for time in times) * 100 >= percent * len(times)
        assert sum(time < value for time in times) * 100 < percent * len(times)


def test_an_overloaded_batcher_says_so_before_anything_waits(index: Index) -> None:
    async def too_many() -> None:
        await QueryQueue(index, ServerLimits(max_waiting=2)).search(["a", "b", "c"], 1, "lexical")

    with pytest.raises(Overloaded):
        asyncio.run(too_many())
