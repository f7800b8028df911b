"""The bare model over HTTP: answers, streams, tools, limits and refusals, with the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from agent_r1.engines.base import Completion, Prompt, Sampling, Streamer
from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.serve.api.events import together
from agent_r1.serve.api.limits import ServeLimits
from agent_r1.serve.api.served_model import Reading, Response
from tests.chatml import renderer, tokenizer
from tests.serve.api_server import CALL, ECHO, HI, ask, scripted_model, serving_script

openai = pytest.importorskip("openai", reason="pip install 'agent-r1[dev]'")


def client(url: str, key: str = "unused") -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def echoing() -> Iterator[str]:
    """Says the last thing that the user said."""

    def last(call: Any) -> str:
        text = tokenizer().decode(call.prompt_ids, skip_special_tokens=False)
        return str(text.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0])

    with serving_script(last) as (url, _):
        yield url


def test_a_question_is_answered_whole_and_as_a_stream(echoing: str) -> None:
    text = "naïve 漢字 <b> ` [x] ok"
    asked = {"model": "scripted", "messages": [{"role": "user", "content": text}]}
    whole = client(echoing).chat.completions.create(**asked)
    chunks = list(client(echoing).chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert whole.choices[0].message.content == text
    assert whole.choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == len(text.encode()) + 1  # one token per byte, and the end


def test_text_streams_as_it_is_sampled() -> None:
    with serving_script(["abcdef"], delay=0.01) as (url, _):
        chunks = list(client(url).chat.completions.create(model="scripted", messages=HI, stream=True))
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert texts == list("abcdef")


def test_calls_go_back_to_the_client_and_their_results_into_the_prompt() -> None:
    with serving_script([f"I ask.\n{CALL % 'a'}", "aaa"]) as (url, engine):
        first = client(url).chat.completions.create(model="scripted", messages=HI, tools=[ECHO])
        (call,) = first.choices[0].message.tool_calls
        answer = {"role": "tool", "tool_call_id": call.id, "content": "aaa"}
        messages = [*HI, first.choices[0].message, answer]
        second = client(url).chat.completions.create(model="scripted", messages=messages, tools=[ECHO])
    assert first.choices[0].finish_reason == "tool_calls"
    assert first.choices[0].message.content == "I ask."
    assert (call.function.name, json.loads(call.function.arguments)) == ("echo", {"text": "a"})
    assert second.choices[0].message.content == "aaa"
    shown = tokenizer().decode(engine.calls[1].prompt_ids, skip_special_tokens=False)
    assert '<tool_call>\n{"name": "echo", "arguments": {"text": "a"}}\n</tool_call>' in shown
    assert "<|im_start|>tool\naaa<|im_end|>" in shown


def test_a_streamed_call_never_shows_as_text() -> None:
    with serving_script([f"I ask.\n{CALL % 'a'}"]) as (url, _):
        chunks = list(client(url).chat.completions.create(model="scripted", messages=HI, tools=[ECHO], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "I ask."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
        (0, "echo", '{"text": "a"}')
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_without_tools_or_with_tool_choice_none_a_call_is_text() -> None:
    with serving_script([CALL % "a"] * 2) as (url, engine):
        asked: list[dict[str, Any]] = [{}, {"tools": [ECHO], "tool_choice": "none"}]
        for fields in asked:
            choice = ask(url, **fields).json()["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (CALL % "a", "stop")
    assert engine.calls[0].prompt_ids == engine.calls[1].prompt_ids


def test_thinking_is_a_field_of_its_own() -> None:
    with serving_script(["<think>hm</think>\n\n4"] * 2) as (url, _):
        message = ask(url).json()["choices"][0]["message"]
        lines = ask(url, stream=True).text.split("\n\n")
    assert (message["content"], message["reasoning_content"]) == ("4", "hm")
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    assert "".join(delta.get("content") or "" for delta in deltas) == "4"
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_answer_and_the_sampling(stream: bool) -> None:
    with serving_script(["one STOP two"]) as (url, engine):
        answer = client(url).chat.completions.create(
            model="scripted", messages=HI, stop=["STOP", "zzz"], stream=stream, max_tokens=50
        )
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        else:
            text = answer.choices[0].message.content
            assert answer.usage.completion_tokens == len("one STOP")
            assert answer.choices[0].finish_reason == "stop"
    assert text == "one "
    assert engine.calls[0].sampling.max_tokens == 50


def test_options_reach_the_engine_and_others_keep_their_defaults() -> None:
    with serving_script(["a", "b"]) as (url, engine):
        ask(url, temperature=0.3, top_p=0.9, top_k=5, seed=-7, max_tokens=9)
        ask(url)
    given, default = (call.sampling for call in engine.calls)
    assert (given.temperature, given.top_p, given.top_k, given.seed, given.max_tokens) == (0.3, 0.9, 5, -7, 9)
    assert (default.temperature, default.seed) == (1.0, None)
    assert default.max_tokens == 1000 - len(engine.calls[1].prompt_ids)  # all the room there is


def test_an_answer_that_is_cut_says_so() -> None:
    with serving_script(["abcdef"]) as (url, _):
        choice = ask(url, max_tokens=3).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("abc", "length")


def test_several_answers_have_their_own_index_and_seed() -> None:
    with serving_script(lambda call: f"seed {call.sampling.seed}") as (url, _):
        answer = ask(url, n=3, seed=5).json()
        chunks = list(client(url).chat.completions.create(model="scripted", messages=HI, n=3, seed=5, stream=True))
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["seed 5", "seed 6", "seed 7"]
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["seed 5", "seed 6", "seed 7"]


def test_logprobs_are_those_of_the_sampled_tokens() -> None:
    ids = [*renderer().encode_response("é4")]
    completion = {"token_ids": ids, "logprobs": [-0.25 * i for i in range(len(ids))], "stop": "stop"}
    with serving_script([Completion(**completion), Completion(**completion)]) as (url, _):  # type: ignore[arg-type]
        whole = ask(url, logprobs=True).json()["choices"][0]["logprobs"]["content"]
        chunks = list(client(url).chat.completions.create(model="scripted", messages=HI, logprobs=True, stream=True))
    assert [token["logprob"] for token in whole] == [0.0, -0.25, -0.5]  # without the end of the turn
    assert [token["bytes"] for token in whole] == [None, None, [52]]  # the first two are halves of a character
    streamed = [
        token.logprob
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for token in chunk.choices[0].logprobs.content
    ]
    assert streamed == [0.0, -0.25, -0.5]


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"temprature": 1}, 400, "unknown_parameter", "temprature"),
        ({"logprobs": True, "top_logprobs": 2}, 400, "unsupported_parameter", "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, 400, "unsupported_parameter", "response_format"),
        ({"tools": [ECHO], "tool_choice": "required"}, 400, "unsupported_parameter", "tool_choice"),
        ({"n": 17}, 400, "invalid_value", "n"),
        ({"row": 1}, 400, "unknown_parameter", "row"),
        ({"model": "gpt-5"}, 404, "model_not_found", "model"),
        ({"messages": [{"role": "user", "content": "x" * 1000}]}, 400, "context_length_exceeded", "messages"),
        ({"messages": [{"role": "user", "content": "x" * 300_000}]}, 400, "context_length_exceeded", "messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused_gets_the_apis_own_error(
    echoing: str, fields: dict[str, Any], status: int, code: str, param: str, stream: bool
) -> None:
    answer = ask(echoing, **fields, stream=stream)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)


def test_the_official_client_raises_its_own_errors(echoing: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client(echoing).chat.completions.create(model="scripted", messages=[{"role": "user", "content": "x" * 2000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client(echoing).chat.completions.create(model="other", messages=HI)


def test_text_completions_continue_raw_text() -> None:
    with serving_script(lambda call: tokenizer().decode(call.prompt_ids).upper()) as (url, _):
        answer = ask(url, "/v1/completions", prompt=["ab", [99, 100]], max_tokens=9, logprobs=0).json()
        chunks = list(client(url).completions.create(model="scripted", prompt="ab", stream=True))
        short = ask(url, "/v1/completions", prompt="a" * 40).json()
        too_long = [ask(url, "/v1/completions", prompt="a" * size) for size in (1000, 300_000)]
    decoded = tokenizer().decode([99, 100]).upper()
    assert [choice["text"] for choice in answer["choices"]] == ["AB", decoded]
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [0.0, 0.0]
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 1]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "AB"
    assert [answer.json()["error"]["code"] for answer in too_long] == ["context_length_exceeded"] * 2
    assert short["choices"][0]["text"] == "A" * 16  # the API's own default


def test_the_model_its_health_and_its_counts_can_be_read() -> None:
    with serving_script(["abc"]) as (url, _):
        ask(url)
        ask(url, temprature=1)
        models = client(url).models.list().data
        one = client(url).models.retrieve("scripted")
        health = httpx.get(f"{url}/health").json()
        metrics = httpx.get(f"{url}/metrics").text.splitlines()
        missing = httpx.get(f"{url}/v1/embeddings")
    assert [model.id for model in models] == ["scripted"]
    assert one.max_model_len == 1000
    assert (health["status"], health["mode"], health["active_requests"]) == ("ok", "model", 0)
    assert 'agent_r1_requests_total{outcome="ok",route="chat"} 1' in metrics
    assert 'agent_r1_requests_total{outcome="refused",route="chat"} 1' in metrics
    assert "agent_r1_completion_tokens_total 4" in metrics
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "invalid_request_error"


def test_an_engine_that_cannot_stream_answers_all_at_once() -> None:
    class Whole:
        def __init__(self, engine: ScriptedEngine) -> None:
            self.generate, self.release, self.abort = engine.generate, engine.release, engine.abort

    deltas: list[Any] = []
    engine: Any = Whole(ScriptedEngine(["one STOP two"], tokenizer=tokenizer()))
    assert not isinstance(engine, Streamer)
    response = Response(scripted_model(engine), deltas.append, Reading(stop=["STOP"]))
    finished, _ = asyncio.run(
        response.sample(Prompt([1]), Sampling(max_tokens=50, stop_ids=renderer().stop_ids), session="s")
    )
    assert finished.choice.text == "one " == "".join(delta.text for delta in deltas)


def test_if_one_of_several_answers_fails_the_others_are_ended() -> None:
    ended: list[str] = []

    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError

    async def go_on() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("the other")

    async def both() -> None:
        with pytest.raises(KeyError):
            await together([fail(), go_on()])
        assert ended == ["the other"]

    asyncio.run(both())


def test_too_many_requests_at_once_are_asked_to_come_back() -> None:
    limits = ServeLimits(max_requests=1)
    body = {"model": "scripted", "messages": HI, "stream": True}
    with serving_script(["abcdef" * 10, "b"], limits=limits, delay=0.02) as (url, _):
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as first:
            parts = first.iter_bytes()  # kept, because a generator that is dropped closes the connection
            next(parts)
            second = ask(url)
        assert (second.status_code, second.headers["retry-after"]) == (429, "1")
        assert second.json()["error"]["code"] == "rate_limit_exceeded"


def test_an_answer_that_takes_too_long_is_ended() -> None:
    limits = ServeLimits(request_seconds=0.2)
    with serving_script(["abcdef" * 10] * 2, limits=limits, delay=0.05) as (url, _):
        whole = ask(url)
        with pytest.raises(openai.APIError) as caught:
            list(client(url).chat.completions.create(model="scripted", messages=HI, stream=True))
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "timeout")
    assert caught.value.code == "timeout"
