"""Clients that retry, leave, send nonsense or use the key of another: each costs at most its own episode something."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest

from agent_r1.errors import RolloutError
from agent_r1.serve.gateway import server as gateway_server
from agent_r1.serve.gateway.client import ClientSettings
from agent_r1.serve.gateway.server import GatewayServer
from agent_r1.types import StopReason, TaskRow
from tests.serve.gateway.agent_runs import ASK, SEARCH, chat, echo, openai_client, play, play_async, search

BODY = {"model": "m", "messages": [ASK]}


def http(client: ClientSettings) -> httpx.AsyncClient:
    return httpx.AsyncClient(headers={"Authorization": f"Bearer {client.api_key}"}, trust_env=False, timeout=10)


async def post(client: ClientSettings, body: Any = BODY, path: str = "/chat/completions", **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    content = body if isinstance(body, bytes) else json.dumps(body)
    async with http(client) as api:
        return await api.post(client.base_url + path, content=content, headers=named)


def text(response: Any) -> str:
    return str(response.json()["choices"][0]["message"]["content"])


def code(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_a_retry_gets_the_same_answer_and_is_one_step() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> list[str]:
        first = await post(client)
        again = await post(client, x_stainless_retry_count="1")
        return [text(first), text(again), first.json()["id"], again.json()["id"]]

    [trajectory] = play(agent, ["one", "two"])
    one, two, id_one, id_two = trajectory.steps[-1].info["agent_result"]
    assert (one, id_one) == (two, id_two)
    assert len(trajectory.steps) == 1
    assert trajectory.counts["gateway/retries"] == 1


def test_an_idempotency_key_marks_retries_and_an_equal_body_alone_does_not() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> list[str]:
        keyed = [text(await post(client, idempotency_key=key)) for key in ("a", "a", "b")]
        return [*keyed, text(await post(client))]

    [trajectory] = play(agent, ["one", "two", "three"])
    assert trajectory.steps[-1].info["agent_result"] == ["one", "one", "two", "three"]


def test_a_retry_of_a_call_that_is_still_sampled_waits_for_it() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> list[str]:
        answers = await asyncio.gather(post(client), post(client, x_stainless_retry_count="1"))
        return [text(answer) for answer in answers]

    [trajectory] = play(agent, ["one", "two"], delay=0.3)
    assert trajectory.steps[-1].info["agent_result"] == ["one", "one"]


def test_the_official_clients_own_retry_after_a_time_out_is_one_step() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> str:
        async with openai_client(client, timeout=0.25, max_retries=4) as api:
            made = await api.chat.completions.create(model="m", messages=[ASK])
        return str(made.choices[0].message.content)

    [trajectory] = play(agent, ["one", "two", "three"], delay=0.8)
    assert trajectory.steps[-1].info["agent_result"] == "one"
    assert len(trajectory.steps) == 1
    assert trajectory.counts["gateway/retries"] >= 1


def test_an_answer_that_its_client_never_got_is_given_to_the_next_equal_call() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> str:
        with pytest.raises(httpx.ReadTimeout):
            async with http(client) as api:
                await api.post(f"{client.base_url}/chat/completions", json=BODY, timeout=0.15)
        await asyncio.sleep(0.5)
        body = json.dumps(BODY, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        return text(await post(client, body))

    [trajectory] = play(agent, ["one", "two"], delay=0.4)
    assert trajectory.steps[-1].info["agent_result"] == "one"
    assert len(trajectory.steps) == 1


@pytest.mark.parametrize(
    ("option", "param"),
    [
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "?"}]}, "messages[0].role"),
        ({"wizardry": 1}, "wizardry"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_the_apis_own_error_and_no_step(option: dict[str, Any], param: str) -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> str:
        refused = await post(client, BODY | option)
        assert refused.status_code == 400
        await post(client)
        return str(refused.json()["error"]["param"])

    [trajectory] = play(agent, ["one"])
    assert trajectory.steps[-1].info["agent_result"] == param
    assert len(trajectory.steps) == 1


def test_log_probs_are_those_that_are_trained_on() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> list[Any]:
        answer = await post(client, BODY | {"logprobs": True})
        return [(each["token"], each["logprob"]) for each in answer.json()["choices"][0]["logprobs"]["content"]]

    [trajectory] = play(agent, ["one"])
    told = trajectory.steps[0].info["agent_result"]
    assert [logprob for _, logprob in told] == trajectory.steps[0].response_logprobs
    assert "".join(token for token, _ in told) == "one"


def test_a_context_that_is_too_long_is_the_apis_own_error_and_truncates_the_episode() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> None:
        said = await chat(client, [ASK])
        with pytest.raises(openai.BadRequestError) as refused:
            await chat(client, [ASK, echo(said), {"role": "user", "content": "more " * 400}])
        assert refused.value.code == "context_length_exceeded"
        raise RuntimeError("the agent gives up")

    [trajectory] = play(agent, ["one", "two"], max_context_tokens=300, max_response_tokens=50)
    assert trajectory.stop is StopReason.MAX_TOKENS  # not a failure of the agent
    assert len(trajectory.steps) == 1
    assert trajectory.counts["gateway/refused"] == 1


def test_more_calls_than_the_budget_are_refused_and_the_episode_stops_at_max_steps() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> str:
        for _ in range(2):
            await post(client)
        return " ".join(map(str, code(await post(client))))

    [trajectory] = play(agent, ["one", "two"], max_steps=2)
    assert trajectory.stop is StopReason.MAX_STEPS
    assert trajectory.steps[-1].info["agent_result"] == "400 max_steps_exceeded"
    assert trajectory.next_prompt_ids  # for a critic


def test_an_agent_that_never_stops_asking_is_sealed() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> int:
        async with http(client) as api:
            for _ in range(200):
                answer = await api.post(f"{client.base_url}/chat/completions", json=BODY)
                if answer.status_code == 410:
                    break
        return answer.status_code

    [trajectory] = play(agent, ["one"], max_steps=1)
    assert trajectory.steps[-1].info["agent_result"] == 410
    assert trajectory.counts["gateway/refused"] == 50


def test_a_response_that_is_cut_says_so_and_calls_nothing() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> str:
        choice = (await post(client, BODY | {"tools": [SEARCH]})).json()["choices"][0]
        assert "tool_calls" not in choice["message"]
        return str(choice["finish_reason"])

    [trajectory] = play(agent, [search("A" * 100)], max_response_tokens=20)
    assert trajectory.steps[0].info["agent_result"] == "length"
    assert trajectory.steps[0].is_cut
    assert trajectory.stop is StopReason.MAX_TOKENS


def test_a_clients_own_smaller_limit_is_kept_and_does_not_truncate_the_episode() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> str:
        return str((await post(client, BODY | {"max_tokens": 3})).json()["choices"][0]["finish_reason"])

    [trajectory] = play(agent, ["one two three four five six"])
    assert trajectory.steps[0].info["agent_result"] == "length"
    assert len(trajectory.steps[0].response_ids) == 3
    assert trajectory.stop is StopReason.ANSWERED


def test_a_call_that_cannot_be_read_stays_in_the_text_and_is_counted() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> str:
        return text(await post(client, BODY | {"tools": [SEARCH]}))

    [trajectory] = play(agent, ["<tool_call>\n{oops}\n</tool_call>"])
    assert "{oops}" in trajectory.steps[0].info["agent_result"]
    assert [call.fault for call in trajectory.steps[0].calls] == ["malformed"]


# Hostile and confused clients: an honest episode plays beside them, and must be as it is without them.


async def honest(row: TaskRow, client: ClientSettings) -> str:
    messages: list[Any] = [ASK]
    for _ in range(3):
        messages += [echo(await chat(client, messages)), {"role": "user", "content": "And?"}]
        await asyncio.sleep(0.05)
    return "done"


async def bad_json(client: ClientSettings, others: Sequence[ClientSettings]) -> Any:
    for body in (b"", b"{", b"[1]", b"\xff\xfe", b'{"messages": NaN}', b"[" * 100_000, b'{"model": 1, "messages": 2}'):
        answer = await post(client, body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]


async def huge_body(client: ClientSettings, others: Sequence[ClientSettings]) -> Any:
    async def chunks() -> Any:
        for _ in range(50):
            yield b"x" * 1_000_000

    async with http(client) as api:
        for body in (chunks(), b"x" * 50_000_000):
            try:
                answer = await api.post(f"{client.base_url}/chat/completions", content=body)
            except httpx.NetworkError:  # the server hung up while we were still sending
                continue
            assert code(answer) == (413, "body_too_large")


async def wrong_session(client: ClientSettings, others: Sequence[ClientSettings]) -> Any:
    root = client.base_url.partition("/s/")[0]
    for path in ("/s/guess/v1/chat/completions", "/s/../v1/chat/completions", "/v1/chat/completions"):
        async with httpx.AsyncClient(trust_env=False) as api:
            answer = await api.post(root + path, json=BODY, headers={"Authorization": "Bearer guess"})
        assert code(answer) == (401, "invalid_api_key")
    async with http(client) as api:
        assert (await api.post(f"{client.base_url}/elsewhere", json=BODY)).status_code == 404
        assert (await api.get(f"{client.base_url}/chat/completions")).status_code == 405
        assert (await api.post(f"{root}/anything", json=BODY)).status_code == 404


async def stolen_key(client: ClientSettings, others: Sequence[ClientSettings]) -> Any:
    for other in others:
        async with http(other) as api:
            answer = await api.post(f"{client.base_url}/chat/completions", json=BODY)
        assert code(answer) == (401, "invalid_api_key")


async def disconnect_mid_stream(client: ClientSettings, others: Sequence[ClientSettings]) -> Any:
    for _ in range(3):
        async with (
            http(client) as api,
            api.stream("POST", f"{client.base_url}/chat/completions", json=BODY | {"stream": True}) as answer,
        ):
            async for _line in answer.aiter_lines():
                break


async def slow_reader(client: ClientSettings, others: Sequence[ClientSettings]) -> Any:
    """Sends a request a byte at a time, asks on another connection and reads nothing."""
    host, port = client.base_url.split("/")[2].split(":")
    _, slow = await asyncio.open_connection(host, int(port))
    for byte in b"POST /v1/chat/completions HT":
        slow.write(bytes([byte]))
        await asyncio.sleep(0.005)
    path, body = client.base_url.partition(port)[2], json.dumps(BODY | {"stream": True}).encode()
    _, deaf = await asyncio.open_connection(host, int(port))
    head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    deaf.write(head.encode() + body)
    await asyncio.sleep(0.1)
    slow.close()
    deaf.close()


@pytest.mark.parametrize(
    "attack",
    [bad_json, huge_body, wrong_session, stolen_key, disconnect_mid_stream, slow_reader],
    ids=lambda a: a.__name__,
)
def test_a_hostile_client_harms_nobody_else(attack: Any) -> None:
    sessions: dict[str, ClientSettings] = {}

    async def agent(row: TaskRow, client: ClientSettings) -> str:
        sessions[row.row_id] = client
        if row.row_id == "honest":
            return await honest(row, client)
        await asyncio.sleep(0.05)  # until the other has a session
        others = [each for name, each in sessions.items() if name == "honest"]
        assert others
        await attack(client, others)
        await post(client)
        return "done"

    rows = [TaskRow(prompt=[ASK], row_id=name) for name in ("honest", "hostile")]
    good, bad = play(agent, lambda call: f"answer {call.turn}", rows=rows)
    assert good.stop is StopReason.ANSWERED, good.error
    assert [step.action_text for step in good.steps] == ["answer 0", "answer 1", "answer 2"]
    assert [step.info["history"] for step in good.steps] == ["new", "continued", "continued"]
    assert bad.stop is StopReason.ANSWERED, bad.error


def test_a_session_ends_with_its_episode() -> None:
    """Late calls get 410, on the path and by the key, and change nothing."""
    known: list[ClientSettings] = []

    async def first(row: TaskRow, client: ClientSettings) -> str:
        known.append(client)
        if row.row_id == "late":
            await asyncio.sleep(0.2)
            old = known[0]
            async with http(old) as api:
                answers = [
                    await api.post(url, json=BODY)
                    for url in (f"{old.base_url}/chat/completions", f"{root(old)}/v1/chat/completions")
                ]
            assert [code(answer) for answer in answers] == [(410, "session_closed")] * 2
        return text(await post(client))

    def root(client: ClientSettings) -> str:
        return client.base_url.partition("/s/")[0]

    rows = [TaskRow(prompt=[ASK], row_id=name) for name in ("early", "late")]
    early, late = play(first, lambda call: "one", rows=rows)
    assert len(early.steps) == len(late.steps) == 1
    assert late.stop is StopReason.ANSWERED, late.error


def test_the_key_alone_finds_the_session() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> str:
        plain = client.base_url.partition("/s/")[0] + "/v1"
        async with http(client) as api:
            models = (await api.get(f"{plain}/models")).json()["data"]
            answer = await api.post(f"{plain}/chat/completions", json=BODY)
        return f"{models[0]['id']} {text(answer)}"

    [trajectory] = play(agent, ["one"])
    assert trajectory.steps[0].info["agent_result"] == "policy one"


def test_sessions_cannot_be_guessed_and_only_this_machine_is_served() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> list[str]:
        await post(client)
        return [client.api_key, client.base_url]

    trajectories = play(agent, lambda call: "one", group_size=4)
    keys = {trajectory.steps[0].info["agent_result"][0] for trajectory in trajectories}
    assert len(keys) == 4
    assert min(map(len, keys)) >= 43  # 32 random bytes
    assert all("//127.0.0.1:" in trajectory.steps[0].info["agent_result"][1] for trajectory in trajectories)


def test_the_server_is_gone_after_the_run() -> None:
    server, ports = GatewayServer(episode_seconds=5), []

    async def agent(row: TaskRow, client: ClientSettings) -> None:
        ports.append(server.port)
        await post(client)

    play(agent, ["one"], server=server)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{ports[0]}/v1/models", trust_env=False)


def test_rows_are_played_only_while_the_gateway_is_open() -> None:
    with pytest.raises(RolloutError), GatewayServer(episode_seconds=5).serving(None):  # type: ignore[arg-type]
        pass


def test_a_failing_engine_fails_the_episode_and_not_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> str:
        answer = await post(client)
        if row.row_id == "bad":
            assert answer.status_code == 500
        return "done"

    def script(call: Any) -> str:
        if call.session.startswith("bad"):
            raise RuntimeError("no memory")
        return "one"

    rows = [TaskRow(prompt=[ASK], row_id=name) for name in ("bad", "good")]
    bad, good = asyncio.run(play_async(agent, script, rows=rows))
    assert (bad.stop, good.stop) == (StopReason.ERROR, StopReason.ANSWERED)
    assert bad.failure is not None
    assert "no memory" in bad.failure.message


def test_old_sessions_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_server, "MAX_ENDED", 2)
    server = GatewayServer(episode_seconds=5)

    async def agent(row: TaskRow, client: ClientSettings) -> None:
        await post(client)

    play(agent, lambda call: "one", server=server, group_size=5)
    assert len(server._ended) == 2
