"""Bodies of chat requests: what is read, and what is refused with which field and code."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from typing import Any

import pytest
from PIL import Image

from agent_r1.types import Observation
from agent_r1.vision.pictures import Picture
from agent_r1.wire.api_error import ApiError
from agent_r1.wire.chat_request import parse_chat
from agent_r1.wire.request_body import MAX_NESTING, parse_object, read_body

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
USER = {"role": "user", "content": "hi"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [USER], **fields}


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_chat(body(**fields))
    assert caught.value.status == 400
    return caught.value


def test_a_minimal_request_leaves_all_sampling_to_the_server() -> None:
    request = parse_chat(body())
    assert request.messages == [USER]
    assert (request.sampling.temperature, request.sampling.max_tokens, request.sampling.stop) == (None, None, ())
    assert (request.stream, request.n, request.logprobs, request.tool_choice) == (False, 1, False, "auto")


def test_every_option_is_read() -> None:
    request = parse_chat(
        body(
            tools=[WEATHER], temperature=0, top_p=0.5, top_k=-1, max_completion_tokens=7, stop="END", seed=3, n=2,
            logprobs=True, stream=True, stream_options={"include_usage": True}, parallel_tool_calls=False,
            tool_choice={"type": "function", "function": {"name": "weather"}}, user="u", frequency_penalty=0.0,
            response_format={"type": "json_object"},
        )
    )  # fmt: skip
    options = request.sampling
    assert (options.temperature, options.top_p, options.top_k, options.max_tokens) == (0.0, 0.5, 0, 7)
    assert (options.stop, options.seed, request.n, request.stream, request.include_usage) == (
        ("END",),
        3,
        2,
        True,
        True,
    )
    assert (request.tool_choice, request.forced_tool, request.parallel_tool_calls) == ("required", "weather", False)
    assert "strict" not in request.tools[0]["function"]  # chat templates would show it
    assert request.response_format == {"type": "json_object"}


def test_null_counts_as_absent_and_text_as_the_only_format() -> None:
    request = parse_chat(body(temperature=None, tools=None, response_format={"type": "text"}, audio=None))
    assert (request.sampling.temperature, request.tools, request.response_format) == (None, [], None)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_parameter"),
        ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
        ({"stop": ["a", ""]}, "stop", "invalid_value"),
        ({"stop": [1]}, "stop", "invalid_type"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"tool_choice": "auto"}, "tool_choice", "invalid_value"),
        ({"messages": []}, "messages", "missing_required_parameter"),
        ({"messages": [1]}, "messages[0]", "invalid_type"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{**USER, "image": "/etc/passwd"}]}, "messages[0].image", "unknown_parameter"),
        ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0].tool_call_id", "missing_required_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "invalid_value"),
        ({"model": None}, "model", "missing_required_parameter"),
    ],
)
def test_what_is_wrong_is_named_with_the_codes_of_the_api(fields: dict[str, Any], param: str, code: str) -> None:
    error = refused(**fields)
    assert (error.param, error.code) == (param, code)
    written = {"message": error.message, "type": "invalid_request_error", "param": param, "code": code}
    assert error.as_json() == {"error": written}
    assert "temprature" not in fields or "'temperature'" in error.message


def test_calls_are_decoded_and_their_results_get_the_name_of_the_tool() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    request = parse_chat(
        body(
            messages=[
                {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
                USER,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            ]
        )
    )
    system, _, calling, result = request.messages
    assert system == {"role": "system", "content": "Be\nbrief."}
    assert calling["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Ulm"}}
    assert result == {"role": "tool", "content": "rain", "name": "weather", "tool_call_id": "call_1"}
    Observation(messages=request.messages)  # our types take them


@pytest.mark.parametrize("text", ["{city:", '{"a": ' + "[" * 900 + "]" * 900 + "}"], ids=["not JSON", "nested"])
def test_arguments_that_cannot_be_read_stay_text(text: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": text}}
    request = parse_chat(body(messages=[USER, {"role": "assistant", "tool_calls": [call]}]))
    assert request.messages[1]["tool_calls"][0]["function"]["arguments"] == text


def image(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def test_a_picture_is_read_from_its_data_url() -> None:
    file = io.BytesIO()
    Image.new("RGB", (2, 3), "red").save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    (part,) = parse_chat(body(messages=image(url))).messages[0]["content"]
    assert isinstance(part["image"], Picture)
    assert (part["image"].width, part["image"].height) == (2, 3)


@pytest.mark.parametrize(
    "url", ["/etc/passwd", "file:///etc/passwd", "http://localhost/x.png", "data:image/png;base64,AA"]
)
def test_no_picture_is_read_from_the_disk_or_the_network(url: str) -> None:
    assert refused(messages=image(url)).param == "messages[0].content[0].image_url"


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"\xff{}", b'{"a": NaN}', b'{"a": ' + b"9" * 5000 + b"}", b"[" * 100_000,
     b'{"a":' * (MAX_NESTING + 1) + b"1" + b"}" * (MAX_NESTING + 1)],
)  # fmt: skip
def test_bodies_that_are_not_a_json_object_are_refused(text: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_object(text)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_a_body_is_read_up_to_its_limit() -> None:
    async def chunks(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b"1234"

    async def read(count: int, length: str | None = None) -> bytes:
        return await read_body(chunks(count), max_bytes=8, seconds=5, length=length)

    assert asyncio.run(read(2)) == b"12341234"
    for count, length in ((3, None), (0, "9")):
        with pytest.raises(ApiError) as caught:
            asyncio.run(read(count, length))
        assert (caught.value.status, caught.value.headers) == (413, {"Connection": "close"})


def test_a_body_that_does_not_arrive_is_given_up() -> None:
    async def silence() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    with pytest.raises(ApiError) as caught:
        asyncio.run(read_body(silence(), max_bytes=8, seconds=0.01))
    assert caught.value.status == 408
