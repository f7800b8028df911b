"""A real model under load and beside clients that misbehave: nobody else notices them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from agent_r1.engines.local.local_engine import LocalEngine
from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.serve.api.app import Server
from agent_r1.serve.api.bare_mode import BareMode
from agent_r1.serve.api.limits import ServeLimits
from tests.chatml import tokenizer
from tests.serve.api_server import HI, ask, make_run, mini_server, scripted_model, serving, serving_script

LIMITS = ServeLimits(max_body_bytes=100_000, read_seconds=2.0, stall_seconds=1.0)
MESSAGES = [{"role": "user", "content": "count"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    return mini_server(make_run(tmp_path_factory.mktemp("runs")), "eval.temperature=1", limits=LIMITS)


@pytest.fixture(scope="module")
def url(server: Server) -> Iterator[str]:
    with serving(server, limits=LIMITS) as address:
        yield address


def engine_of(server: Server) -> LocalEngine:
    engine = server.model.engine
    assert isinstance(engine, LocalEngine)
    return engine


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "mini", "messages": MESSAGES, "max_tokens": 12, **fields}


def alone(url: str, **fields: Any) -> str:
    answer = httpx.post(f"{url}/v1/chat/completions", json=body(**fields), timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def wait_until_idle(server: Server) -> None:
    deadline = time.monotonic() + 20
    while engine_of(server).num_requests:
        assert time.monotonic() < deadline, "a request of a client that left is still computed"
        time.sleep(0.01)


def raw(url: str, data: bytes, *, receive_buffer: int | None = None) -> socket.socket:
    parts = urlsplit(url)
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(20)
    connection.connect((parts.hostname, parts.port))
    connection.sendall(data)
    return connection


def post(content: bytes, *, length: int | None = None) -> bytes:
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content) if length is None else length}\r\n\r\n"
    )
    return head.encode() + content


def test_200_requests_at_once_are_all_answered_and_each_as_if_it_were_alone(url: str) -> None:
    async def one(client: httpx.AsyncClient, index: int) -> tuple[int, str]:
        asked = body(seed=index % 50, stream=index % 2 == 1)
        answer = await client.post(f"{url}/v1/chat/completions", json=asked)
        if not asked["stream"]:
            return answer.status_code, answer.json()["choices"][0]["message"]["content"]
        lines = [line for line in answer.text.split("\n\n") if line.startswith("data: {")]
        deltas = [choice["delta"] for line in lines for choice in json.loads(line[6:])["choices"]]
        return answer.status_code, "".join(delta.get("content") or "" for delta in deltas)

    async def all_at_once() -> list[tuple[int, str]]:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=200)) as client:
            return await asyncio.gather(*(one(client, index) for index in range(200)))

    answers = asyncio.run(all_at_once())
    assert {status for status, _ in answers} == {200}
    texts = [text for _, text in answers]
    assert texts[:50] == texts[50:100] == texts[100:150] == texts[150:]  # the same seed, the same answer
    assert len(set(texts[:50])) > 40
    assert alone(url, seed=7) == texts[7]


def test_a_seed_repeats_an_answer_and_streams_say_the_same(url: str) -> None:
    assert alone(url, seed=3) == alone(url, seed=3) != alone(url, seed=4)


def test_logprobs_add_up_to_what_the_model_gives(url: str) -> None:
    answer = httpx.post(f"{url}/v1/chat/completions", json=body(logprobs=True, seed=1), timeout=60).json()
    tokens = answer["choices"][0]["logprobs"]["content"]
    assert all(-20 < token["logprob"] < 0 for token in tokens)
    ended = answer["choices"][0]["finish_reason"] == "stop"
    assert len(tokens) == answer["usage"]["completion_tokens"] - ended


def test_a_stop_text_ends_the_request_in_the_engine(url: str, server: Server) -> None:
    whole = alone(url, seed=5, max_tokens=200)
    stop = whole[10:12]
    answer = httpx.post(f"{url}/v1/chat/completions", json=body(seed=5, max_tokens=200, stop=[stop]), timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == whole[: whole.index(stop)]
    assert answer["usage"]["completion_tokens"] < 40
    wait_until_idle(server)


@pytest.mark.parametrize("stream", [False, True])
def test_when_a_client_leaves_its_request_ends(url: str, server: Server, stream: bool) -> None:
    asked = json.dumps(body(stream=stream, max_tokens=None, n=8)).encode()
    connection = raw(url, post(asked))
    if stream:
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
    else:
        while not engine_of(server).num_requests:
            time.sleep(0.005)
    connection.close()
    wait_until_idle(server)
    assert alone(url)


def test_a_request_counts_while_its_body_is_sent() -> None:
    content = json.dumps({"model": "scripted", "messages": HI}).encode()
    with serving_script(["a"] * 1000, limits=ServeLimits(max_requests=1)) as (address, _):
        slow = raw(address, post(content[:10], length=len(content)))
        deadline = time.monotonic() + 20
        while ask(address).status_code == 200:  # until the server has read the headers of the slow one
            assert time.monotonic() < deadline
        assert ask(address).status_code == 429
        slow.sendall(content[10:])
        assert slow.recv(20).startswith(b"HTTP/1.1 200")
        slow.close()


HOSTILE = {
    "no JSON": post(b"{"),
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "deep": post(b'{"messages":' + b"[" * 50_000),
    "half a body": post(b'{"model": "mini"', length=1000),
    "half a head": b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-",
    "a wrong path": b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "another host": b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "50 MB announced": post(b"x", length=50_000_000),
}


def test_hostile_clients_harm_nobody_else(url: str, server: Server) -> None:
    expected = alone(url, seed=9)
    connections = [raw(url, data) for data in HOSTILE.values() for _ in range(4)]
    assert [alone(url, seed=9) for _ in range(3)] == [expected] * 3
    for connection in connections:
        connection.close()
    wait_until_idle(server)


def test_a_body_of_50_mb_is_not_taken_in(url: str) -> None:
    connection, sent = raw(url, HOSTILE["50 MB announced"]), 0
    try:
        for _ in range(50):
            connection.sendall(b"x" * 1_000_000)
            sent += 1
    except OSError:  # the server has closed the connection
        pass
    assert sent < 50
    assert alone(url)


def test_a_client_that_reads_nothing_is_disconnected() -> None:
    engine = ScriptedEngine(lambda call: "x" * 800, tokenizer=tokenizer())
    model = scripted_model(engine)
    own = Server(BareMode(model, LIMITS), model, limits=LIMITS)
    asked = {"model": "scripted", "messages": HI, "stream": True, "n": 8, "logprobs": True}
    with serving(own, limits=LIMITS, send_buffer=4096) as address:
        connection = raw(address, post(json.dumps(asked).encode()), receive_buffer=1024)
        time.sleep(0.5)
        assert ask(address).status_code == 200  # others are answered meanwhile
        time.sleep(LIMITS.stall_seconds + 0.5)
        assert httpx.get(f"{address}/health").json()["active_requests"] == 0
        with contextlib.suppress(ConnectionResetError):
            assert b"[DONE]" not in answers_of(connection)
        connection.close()


def answers_of(connection: socket.socket) -> bytes:
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def test_refusals_close_the_connection_when_the_body_was_not_read(url: str) -> None:
    data = answers_of(raw(url, HOSTILE["50 MB announced"]))
    assert data.startswith(b"HTTP/1.1 413")
    assert b"body_too_large" in data
    assert answers_of(raw(url, HOSTILE["another host"])).startswith(b"HTTP/1.1 403")
    assert answers_of(raw(url, HOSTILE["half a body"])).startswith(b"HTTP/1.1 408")


def test_web_pages_of_other_origins_are_refused(url: str) -> None:
    def status(**headers: str) -> int:
        return httpx.post(f"{url}/v1/chat/completions", json=body(), headers=headers, timeout=60).status_code

    host = urlsplit(url).netloc
    assert status(Origin="https://evil.example") == 403
    assert status(Origin="null") == 403
    assert status(Origin=f"http://{host}") == 200


def test_the_chat_page_allows_only_its_own_scripts(url: str) -> None:
    page = httpx.get(f"{url}/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    for name in ("chat.js", "chat.css"):
        assert f"/static/{name}" in page.text
        assert httpx.get(f"{url}/static/{name}").status_code == 200
    assert "innerHTML" not in httpx.get(f"{url}/static/chat.js").text
    assert httpx.get(f"{url}/static/secret.js").status_code == 404


def test_a_key_is_needed_for_everything_but_the_page_and_the_health(tmp_path_factory: pytest.TempPathFactory) -> None:
    own = mini_server(make_run(tmp_path_factory.mktemp("keyed")))
    with serving(own, key="right-key") as url:

        def status(path: str, key: str | None) -> int:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            return httpx.get(f"{url}{path}", headers=headers).status_code

        assert [status(path, None) for path in ("/", "/health", "/static/chat.js")] == [200] * 3
        assert [status(path, None) for path in ("/v1/models", "/metrics")] == [401] * 2
        assert status("/v1/models", "wrong-key") == 401
        assert status("/v1/models", "right-key") == 200
        refused = httpx.post(f"{url}/v1/chat/completions", json=body())
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")


def test_an_agent_with_a_real_model_plays_its_recipe(tmp_path_factory: pytest.TempPathFactory) -> None:
    own = mini_server(make_run(tmp_path_factory.mktemp("agent")), "rollout.max_response_tokens=8", agent=True)
    with serving(own) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json={"model": "mini", "messages": HI}, timeout=60).json()
    assert answer["agent_r1"]["stop"] in ("answered", "max_tokens")
    assert answer["usage"]["completion_tokens"] > 0
